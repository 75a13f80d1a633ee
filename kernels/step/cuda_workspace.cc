#include "kernels/step/cuda_workspace.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

namespace kvstrata {
namespace {

constexpr std::chrono::seconds kStuck{10};
// In the host's copy of a table: a word that the device may have as anything. No table holds it.
constexpr uint64_t kUnknown = ~uint64_t{0};

// A quarter more, so that a growing sequence seldom makes a buffer grow.
int32_t Generous(int32_t n, int32_t multiple) {
  const int64_t most = int64_t{n} + n / 4;
  return static_cast<int32_t>((most + multiple - 1) / multiple * multiple);
}

int32_t Grown(int32_t capacity, int32_t need, int32_t generous) {
  return need <= capacity ? capacity : generous;
}

}  // namespace

CudaWorkspace::CudaWorkspace(const cuda::CudaOps& ops, const Geometry& geometry,
                             int32_t reserve_tokens,
                             std::shared_ptr<HotCacheBudget> hot_cache_budget)
    : ops_(ops),
      geometry_(geometry),
      reserve_tokens_(reserve_tokens),
      hot_cache_budget_(std::move(hot_cache_budget)) {}

CudaWorkspace::~CudaWorkspace() {
  KVS_CHECK(!in_step_);
  if (last_work_ != nullptr) {
    (void)AwaitOnHost(last_work_);  // pinned memory must outlive its copies
    (void)ops_.destroy_event(last_work_);
  }
  for (const StagingSlot& slot : slots_) {
    if (slot.done != nullptr) (void)ops_.destroy_event(slot.done);
    if (slot.data != nullptr) (void)ops_.free_pinned(slot.data);
  }
}

int64_t CudaWorkspace::IntsBeforeRows() const {
  return int64_t{capacity_.members} * (static_cast<int>(PerMember::kCount) + 1) + 1;
}

Status CudaWorkspace::Reserve(DeviceBuffer* buffer, uint64_t bytes, cuda::Stream stream) {
  if (bytes <= buffer->bytes()) return OkStatus();
  bool capturing = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_capturing(stream, &capturing), "asking for a capture"));
  if (capturing) {
    return FailedPrecondition(
        "CAPTURE_ALLOCATES",
        "this step needs more memory of the GPU, which cannot be had while a "
        "graph is captured; run one step of this shape before it is captured");
  }
  ForgetGraphs();
  return buffer->Reserve(ops_, bytes + bytes / 4);
}

void CudaWorkspace::ForgetGraphs() {
  ++generation_;
  captured_.clear();
  called_.clear();
}

int CudaWorkspace::call_graphs() const {
  int64_t graphs = 0;
  for (const CalledShape& shape : called_) {
    graphs += std::ranges::count_if(shape.selects, &RepeatedCall::has_graph) +
              std::ranges::count_if(shape.attends, &RepeatedCall::has_graph);
  }
  return static_cast<int>(graphs);
}

CudaWorkspace::CalledShape* CudaWorkspace::CallsOf(const std::vector<Part>& parts) {
  for (CalledShape& shape : called_) {
    if (shape.parts == parts) return &shape;
  }
  if (called_.size() == kCalledShapes) called_.clear();
  CalledShape& shape = called_.emplace_back();
  shape.parts = parts;
  shape.selects.resize(static_cast<size_t>(geometry_.layers));
  shape.attends.resize(static_cast<size_t>(geometry_.layers));
  return &shape;
}

Status CudaWorkspace::Fit(Capacity need) {
  const Capacity now = capacity_;
  Capacity c;
  const auto power = [](int32_t n) {
    return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(n)));
  };
  c.members = Grown(now.members, need.members, power(need.members));
  c.rows = Grown(now.rows, need.rows, power(need.rows));
  c.chunk = Grown(now.chunk, need.chunk, power(need.chunk));
  c.pages = Grown(now.pages, need.pages, Generous(need.pages, 64));
  c.blocks = Grown(now.blocks, need.blocks, Generous(need.blocks, 8));
  c.units = Grown(now.units, need.units, Generous(need.units, 64));
  c.list = std::max(now.list, need.list);
  c.cascade_pages = Grown(now.cascade_pages, need.cascade_pages, Generous(need.cascade_pages, 64));
  c.span_parts = Grown(now.span_parts, need.span_parts,
                       std::max(std::min(power(need.span_parts), cuda::kSpanPartsMax),
                                need.span_parts));  // too many are refused
  c.far_pages = Grown(now.far_pages, need.far_pages, Generous(need.far_pages, 64));
  c.spans = Grown(now.spans, need.span_parts > 0 ? std::max(need.spans, 1) : 0,
                  Generous(std::max(need.spans, 1), 32));
  c.votes = now.votes.Grown(need.votes);
  c.packed = now.packed.Grown(need.packed);
  c.bucket_list = std::max(now.bucket_list, need.bucket_list);
  if (c == now) return OkStatus();

  ForgetGraphs();
  capacity_ = {};  // until all of it is there
  const auto reserve = [this](DeviceBuffer* buffer, int64_t bytes) {
    return buffer->Reserve(ops_, static_cast<uint64_t>(bytes));
  };
  const int64_t lists = int64_t{c.members} * geometry_.kv_heads;
  constexpr int64_t kInt = sizeof(int32_t), kAddress = sizeof(uint64_t);
  const int64_t ints = int64_t{c.members} * (static_cast<int>(PerMember::kCount) + 1) + 1 + c.rows;
  KVS_RETURN_IF_ERROR(reserve(&ints_, ints * kInt));
  KVS_RETURN_IF_ERROR(reserve(&pages_.device, int64_t{c.members} * c.pages * kAddress));
  KVS_RETURN_IF_ERROR(reserve(&blocks_.device, int64_t{c.members} * c.blocks * kAddress));
  const int64_t tiles = int64_t{c.chunk} * geometry_.group() / 64 + 1;
  const int64_t items = std::max<int64_t>({c.members, kItemsOfMember, tiles});
  KVS_RETURN_IF_ERROR(reserve(&attend_counters_, items * geometry_.kv_heads * kInt));
  KVS_RETURN_IF_ERROR(reserve(
      &attend_workspace_, ops_.attend_raw_workspace_bytes(geometry_.group(), geometry_.head_dim)));
  if (c.chunk > 0) {
    KVS_RETURN_IF_ERROR(
        reserve(&chunk_workspace_, ops_.attend_chunk_workspace_bytes(geometry_.head_dim)));
  }
  if (c.units > 0) {
    KVS_RETURN_IF_ERROR(reserve(&scores_, lists * c.units * int64_t{sizeof(float)}));
    KVS_RETURN_IF_ERROR(reserve(&units_, std::max(lists * c.list, int64_t{4}) * kInt));
    KVS_RETURN_IF_ERROR(reserve(&counts_, lists * kInt));
    KVS_RETURN_IF_ERROR(reserve(&sink_end_, c.members * kInt));
    KVS_RETURN_IF_ERROR(reserve(&recent_begin_, c.members * kInt));
    cuda::VoteBatch vote;
    vote.rows.kv_heads = geometry_.kv_heads;
    vote.batch = c.members;
    vote.query_heads = geometry_.query_heads;
    vote.output_rows = geometry_.kv_heads;
    vote.candidate_stride = c.units;
    KVS_RETURN_IF_ERROR(reserve(&vote_scratch_, ops_.vote_scratch_bytes(vote)));
    cuda::PickBatch pick;
    pick.score_stride = c.units;
    pick.groups = geometry_.kv_heads;
    pick.scratch_lists = static_cast<int32_t>(lists);
    int64_t scratch = 0;  // small batches have more CTAs a list
    for (pick.batch = 1; pick.batch <= c.members; ++pick.batch) {
      scratch = std::max(scratch, ops_.pick_scratch_bytes(pick));
    }
    // Counters lie where `lists` puts them: what is left there of another number must go.
    KVS_RETURN_IF_ERROR(pick_scratch_.Free());
    KVS_RETURN_IF_ERROR(reserve(&pick_scratch_, scratch));
  }
  if (c.cascade_pages > 0) {
    const int64_t channels = int64_t{geometry_.layers} * geometry_.kv_heads * geometry_.head_dim;
    KVS_RETURN_IF_ERROR(reserve(&cascade_units_, int64_t{c.members} * c.cascade_pages * kInt));
    KVS_RETURN_IF_ERROR(reserve(&cascade_counts_, c.members * kInt));
    KVS_RETURN_IF_ERROR(reserve(&cascade_scratch_,
                                c.members * cuda::CascadeScratchBytes(channels, c.cascade_pages)));
  }
  cascade_ids_.assign(static_cast<size_t>(c.members), 0);
  KVS_RETURN_IF_ERROR(FitSpans(c));
  KVS_RETURN_IF_ERROR(FitFarPages(c));
  KVS_RETURN_IF_ERROR(votes_.Fit(ops_, geometry_, c.votes));
  KVS_RETURN_IF_ERROR(packed_.Fit(ops_, geometry_, c.packed));
  const int64_t segment_words =
      int64_t{geometry_.layers} * c.packed.batch * PackedBuffers::SegmentWords(geometry_, c.packed);
  KVS_RETURN_IF_ERROR(reserve(&packed_segments_.device, segment_words * kAddress));
  packed_segments_.host.assign(static_cast<size_t>(segment_words), kUnknown);
  packed_ids_.assign(static_cast<size_t>(c.packed.batch), 0);
  KVS_RETURN_IF_ERROR(buckets_.Fit(ops_, geometry_, c.members, c.bucket_list));
  KVS_RETURN_IF_ERROR(reserve(&vote_caches_.device, c.members * kAddress));
  KVS_RETURN_IF_ERROR(reserve(&sentences_.device, c.members * kSentenceEntries * kAddress));
  pages_.host.assign(static_cast<size_t>(c.members) * c.pages, kUnknown);
  blocks_.host.assign(static_cast<size_t>(c.members) * c.blocks, kUnknown);
  vote_caches_.host.assign(static_cast<size_t>(c.members), kUnknown);
  sentences_.host.assign(static_cast<size_t>(c.members) * kSentenceEntries, kUnknown);
  pages_.staging_offset = static_cast<uint64_t>((ints * kInt + 15) / 16 * 16);
  blocks_.staging_offset = pages_.staging_offset + pages_.host.size() * kAddress;
  vote_caches_.staging_offset = blocks_.staging_offset + blocks_.host.size() * kAddress;
  packed_segments_.staging_offset =
      vote_caches_.staging_offset + vote_caches_.host.size() * kAddress;
  sentences_.staging_offset =
      packed_segments_.staging_offset + packed_segments_.host.size() * kAddress;
  span_parts_.staging_offset = sentences_.staging_offset + sentences_.host.size() * kAddress;
  span_routers_.staging_offset = span_parts_.staging_offset + span_parts_.host.size() * kAddress;
  far_pages_.staging_offset = span_routers_.staging_offset + span_routers_.host.size() * kAddress;
  hot_tables_.staging_offset = far_pages_.staging_offset + far_pages_.host.size() * kAddress;
  capacity_ = c;
  return AllocateStaging();
}

// What plan sekv keeps.
Status CudaWorkspace::FitSpans(const Capacity& c) {
  constexpr size_t kPartWords = sizeof(cuda::SpanPart) / sizeof(uint64_t);
  constexpr size_t kRouterWords = sizeof(cuda::SpanRouter) / sizeof(uint64_t);
  const auto members = static_cast<size_t>(c.span_parts > 0 ? c.members : 0);
  span_parts_.host.assign(members * static_cast<size_t>(c.span_parts) * kPartWords, kUnknown);
  span_routers_.host.assign(members * kRouterWords, kUnknown);
  span_ids_.assign(members, 0);
  if (members == 0) return OkStatus();
  const auto reserve = [this](DeviceBuffer* buffer, uint64_t count, uint64_t bytes) {
    return buffer->Reserve(ops_, count * bytes);
  };
  const uint64_t rows = members * static_cast<uint64_t>(geometry_.query_heads);
  const uint64_t lists = members * static_cast<uint64_t>(geometry_.kv_heads);
  const auto spans = static_cast<uint64_t>(c.spans);
  KVS_RETURN_IF_ERROR(reserve(&span_parts_.device, span_parts_.host.size(), sizeof(uint64_t)));
  KVS_RETURN_IF_ERROR(reserve(&span_routers_.device, span_routers_.host.size(), sizeof(uint64_t)));
  KVS_RETURN_IF_ERROR(reserve(&relevance_, rows * spans, sizeof(float)));
  KVS_RETURN_IF_ERROR(reserve(&later_relevance_, rows * spans, sizeof(float)));
  KVS_RETURN_IF_ERROR(reserve(&coarse_, rows * spans, sizeof(float)));
  KVS_RETURN_IF_ERROR(reserve(&span_chosen_, rows * spans / 32, sizeof(uint32_t)));
  KVS_RETURN_IF_ERROR(reserve(&span_list_, lists * spans * cuda::kSpanPieces, sizeof(uint32_t)));
  KVS_RETURN_IF_ERROR(reserve(&span_counts_, lists, sizeof(int32_t)));
  cuda::AttendSpansBatch w;
  w.layer.kv_heads = geometry_.kv_heads;
  w.layer.group = geometry_.group();
  w.layer.head_dim = geometry_.head_dim;
  int64_t bytes = 0;  // small batches have more CTAs an item
  for (w.queries.batch = 1; w.queries.batch <= c.members; ++w.queries.batch) {
    bytes = std::max(bytes, ops_.attend_spans_workspace_bytes(w));
  }
  return reserve(&span_workspace_, static_cast<uint64_t>(bytes), 1);
}

// What members with pages in the host's memory need.
Status CudaWorkspace::FitFarPages(const Capacity& c) {
  const auto members = static_cast<size_t>(c.far_pages > 0 ? c.members : 0);
  far_pages_.host.assign(members * static_cast<size_t>(c.far_pages), kUnknown);
  hot_tables_.host.assign(members * kHotEntries, kUnknown);
  for (AddressTable* table : {&far_pages_, &hot_tables_}) {
    KVS_RETURN_IF_ERROR(table->device.Reserve(ops_, table->host.size() * sizeof(uint64_t)));
  }
  return hot_counters_.Reserve(
      ops_, members * static_cast<uint64_t>(geometry_.kv_heads) * sizeof(uint32_t));
}

Status CudaWorkspace::AllocateStaging() {
  const uint64_t bytes = hot_tables_.staging_offset + hot_tables_.host.size() * sizeof(uint64_t);
  if (last_work_ == nullptr) {
    KVS_RETURN_IF_ERROR(Check(ops_.create_event(&last_work_), "making an event"));
  }
  for (StagingSlot& slot : slots_) {
    if (slot.done == nullptr) {
      KVS_RETURN_IF_ERROR(Check(ops_.create_event(&slot.done), "making an event"));
    }
    KVS_RETURN_IF_ERROR(AwaitOnHost(slot.done));
    void* data = slot.data;
    slot.data = nullptr;
    if (data != nullptr) {
      KVS_RETURN_IF_ERROR(Check(ops_.free_pinned(data), "freeing pinned memory"));
    }
    KVS_RETURN_IF_ERROR(Check(ops_.allocate_pinned(bytes, &data), "allocating pinned memory"));
    slot.data = static_cast<std::byte*>(data);
  }
  return OkStatus();
}

Status CudaWorkspace::Follow(cuda::Stream stream) {
  return Check(ops_.await_event(stream, last_work_), "ordering two streams");
}

Status CudaWorkspace::AwaitOnHost(cuda::Event event) {
  const auto deadline = std::chrono::steady_clock::now() + kStuck;
  for (;;) {
    bool done = false;
    KVS_RETURN_IF_ERROR(Check(ops_.is_event_done(event, &done), "asking for an event"));
    if (done) return OkStatus();
    if (std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::yield();
  }
  return {Code::kDeadlineExceeded, "GPU_STUCK",
          "the GPU has not finished earlier steps for 10 s; look for a kernel that hangs on the "
          "engine's stream"};
}

Result<CudaWorkspace::StagingSlot*> CudaWorkspace::NextSlot() {
  StagingSlot& slot = slots_[next_slot_];
  KVS_RETURN_IF_ERROR(AwaitOnHost(slot.done));
  next_slot_ = (next_slot_ + 1) % slots_.size();
  return &slot;
}

Status CudaWorkspace::Upload(AddressTable* table, int32_t stride, int member,
                             const std::byte* const* addresses, int32_t count,
                             const StagingSlot& slot, cuda::Stream stream) {
  const int64_t row = int64_t{member} * stride;
  uint64_t* const known = table->host.data() + row;
  static_assert(sizeof(*addresses) == sizeof(*known));
  if (count == 0 || std::memcmp(known, addresses, count * sizeof(uint64_t)) == 0) {
    return OkStatus();  // as most steps find it
  }
  const auto address = [addresses](int32_t i) { return reinterpret_cast<uint64_t>(addresses[i]); };
  int32_t first = 0, last = count;
  while (first < count && known[first] == address(first)) ++first;
  while (last > first && known[last - 1] == address(last - 1)) --last;
  const auto bytes = static_cast<uint64_t>(last - first) * sizeof(uint64_t);
  std::byte* const staged =
      slot.data + table->staging_offset + static_cast<uint64_t>(row + first) * sizeof(uint64_t);
  std::memcpy(staged, addresses + first, bytes);
  KVS_RETURN_IF_ERROR(
      Check(ops_.copy_async(table->device.as<uint64_t>() + row + first, staged, bytes, stream),
            "copying a page table"));
  std::memcpy(known + first, addresses + first, bytes);
  return OkStatus();
}

}  // namespace kvstrata
