// Selector block over codec packed (mosaickv) in a CudaStep.
//
// What is packed is attended in blocks, each KV head's own; rows that are not packed yet are
// attended on their pages, and op attend_packed merges the two. Where the packed extents lie is a
// table on the GPU, by layer and member, which Begin brings up to date when the daemon has packed
// more: a graph reads what is there, and stays good.
//
// The selection is that of kernels/select/block.cc, but that blocks are counted: of a budget of
// tokens as many are chosen as whole blocks fit. Where a short block is chosen (the last of a
// prompt segment whose length is no multiple of `block`), the CPU may find room for one more.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/ops/pick/pick.h"
#include "kernels/select/block_ranges.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

using cuda::PackedSegment;

constexpr int32_t kAllBlocks = std::numeric_limits<int32_t>::max();

int32_t KeepOf(const Plan& plan, const Geometry& g) {
  return plan.packed.keep == 0 ? g.head_dim / 4 : plan.packed.keep;
}

int32_t StoredChannels(const Plan& plan, const Geometry& g) {
  return plan.packed.truncate ? g.head_dim - g.head_dim / 4 : g.head_dim;
}

// As the plan says, or a milder one that max_loss has asked for (loss_limit.h).
bool IsOfPlan(const PackedHead& h, const Plan& plan, const Geometry& g) {
  const int32_t asked = KeepOf(plan, g);
  const bool milder = plan.stored.max_loss < 1 && h.keys.keep > asked && h.keys.neighbours == 1;
  if (!milder && (h.keys.keep != asked || h.keys.neighbours != plan.packed.neighbours))
    return false;
  const PackedRows wanted =
      PackedFormat(g.head_dim, h.keys.keep, h.keys.neighbours, plan.packed.truncate);
  return h.keys.bits == wanted.bits && h.block == plan.packed.block;
}

int32_t BlocksWithin(const Plan& plan, int32_t tokens) {
  return std::max(1, CeilShare(plan.block.share, tokens) / plan.packed.block);
}

template <typename T>
uint64_t AddressOf(const T* at) {
  return reinterpret_cast<uint64_t>(at);
}

// Of one layer, [segments][kv_heads].
std::vector<PackedSegment> SegmentsOf(const PackedStorage& packed, const Geometry& g, int layer) {
  std::vector<PackedSegment> table;
  std::vector<int32_t> blocks(static_cast<size_t>(g.kv_heads), 0);
  for (size_t s = 0; s < packed.segments().size(); ++s) {
    const Run tokens = packed.segments()[s].tokens;
    for (int h = 0; h < g.kv_heads; ++h) {
      const PackedHead& head = packed.head(static_cast<int>(s), layer, h);
      const int32_t rows = tokens.end - tokens.begin;
      table.push_back({AddressOf(head.r_k), AddressOf(head.r_v), AddressOf(head.keys.data),
                       AddressOf(head.values.data), AddressOf(head.blocks.data), rows,
                       blocks[static_cast<size_t>(h)], head.keys.keep, head.keys.neighbours,
                       head.block, 0});
      blocks[static_cast<size_t>(h)] += (rows + head.block - 1) / head.block;
    }
  }
  return table;
}

}  // namespace

bool CudaStep::IsPacked(const StepMember& m) { return m.state->plan().codec == CodecKind::kPacked; }

int32_t CudaStep::PackedEnd(const StepMember& m) {
  const PackedStorage* const packed = m.state->packed();
  return packed == nullptr ? 0 : packed->end();
}

// The ops take so many extents, all of the plan's strategy, but that max_loss may have kept more
// elements of a vector, the same number in all heads: other ones are damaged.
Status CudaStep::CheckPacked() const {
  const Geometry& g = geometry();
  for (int i = 0; i < members(); ++i) {
    const PackedStorage* const packed = members_[i].state->packed();
    if (packed == nullptr || KnowsPacked(i)) continue;
    const auto count = static_cast<int32_t>(packed->segments().size());
    if (count > PackedBuffers::kSegmentsMax) {
      return Unimplemented("CUDA_PLAN", std::to_string(count) +
                                            " packed extents of a sequence are not served on a "
                                            "GPU; at most " +
                                            std::to_string(PackedBuffers::kSegmentsMax) +
                                            " are; use shorter sequences, or backend simd");
    }
    const Plan& plan = members_[i].state->plan();
    for (int32_t head = 0; head < count * g.layers * g.kv_heads; ++head) {
      const int32_t of_segment = head % (g.layers * g.kv_heads);
      const int segment = head / (g.layers * g.kv_heads);
      const PackedHead& h = packed->head(segment, of_segment / g.kv_heads, of_segment % g.kv_heads);
      const PackedHead& first = packed->head(segment, 0, 0);
      if (IsOfPlan(h, plan, g) && h.keys.keep == first.keys.keep) continue;
      const Run tokens = packed->segments()[static_cast<size_t>(segment)].tokens;
      return {Code::kDataLoss, "EXTENT_INVALID",
              "extent of tokens " + std::to_string(tokens.begin) + " to " +
                  std::to_string(tokens.end) + ": head " + std::to_string(of_segment) +
                  " is not packed as the plan says"};
    }
  }
  return OkStatus();
}

PackedBuffers::Capacity CudaStep::NeedOfPacked() const {
  PackedBuffers::Capacity need;
  for (const StepMember& m : members_) {
    if (!IsPacked(m)) continue;
    const Plan& plan = m.state->plan();
    const PackedStorage* const packed = m.state->packed();
    const int32_t tokens = std::max(m.view.tokens + m.new_tokens, ws_.reserve_tokens_);
    int32_t segments = 0, final = 0;
    if (packed != nullptr) {
      segments = static_cast<int32_t>(packed->segments().size());
      final = static_cast<int32_t>(
          std::ranges::count_if(packed->segments(), &PackedStorage::Segment::final));
    }
    need.batch = members();
    need.keep =
        std::max({need.keep, KeepOf(plan, geometry()), packed == nullptr ? 0 : packed->keep_max()});
    need.segments = std::max(need.segments, PackedBuffers::SegmentsFor(final, segments));
    need.blocks = std::max(need.blocks, tokens / plan.packed.block + segments + 1);
    need.list = std::max(need.list, BlocksWithin(plan, tokens));
  }
  return need;
}

// The numbers that a graph reads instead of being captured with them.
CudaStep::PackedCounts CudaStep::PackedCountsOf(int member) const {
  const StepMember& m = members_[member];
  const PackedStorage* const packed = m.state->packed();
  if (packed == nullptr) return {};
  const Plan& plan = m.state->plan();
  const int32_t n = m.view.tokens + 1;
  return {static_cast<int32_t>(packed->segments().size()), packed->BlockCount(0, 0),
          n < plan.min_tokens ? kAllBlocks : BlocksWithin(plan, n)};
}

bool CudaStep::KnowsPacked(int member) const {
  const auto i = static_cast<size_t>(member);
  return i < ws_.packed_ids_.size() && ws_.packed_ids_[i] == members_[i].state->packed()->id();
}

Status CudaStep::StagePacked(const CudaWorkspace::StagingSlot& slot) {
  const PackedBuffers::Capacity& room = ws_.capacity_.packed;
  for (int i = 0; i < members(); ++i) {
    const PackedStorage* const packed = members_[i].state->packed();
    if (packed == nullptr || KnowsPacked(i)) continue;
    ws_.packed_ids_[static_cast<size_t>(i)] = 0;  // until all of it is on its way
    for (int layer = 0; layer < geometry().layers; ++layer) {
      const std::vector<PackedSegment> table = SegmentsOf(*packed, geometry(), layer);
      std::vector<const std::byte*> words(table.size() * sizeof(PackedSegment) / sizeof(uint64_t));
      std::memcpy(words.data(), table.data(), table.size() * sizeof(PackedSegment));
      KVS_RETURN_IF_ERROR(ws_.Upload(
          &ws_.packed_segments_, PackedBuffers::SegmentWords(geometry(), room),
          layer * room.batch + i, words.data(), static_cast<int32_t>(words.size()), slot, stream_));
    }
    ws_.packed_ids_[static_cast<size_t>(i)] = packed->id();
  }
  return OkStatus();
}

cuda::PackedLayer CudaStep::PackedLayerOf(const Part& part, int layer) const {
  const PackedBuffers::Capacity& room = ws_.capacity_.packed;
  const int64_t row = int64_t{layer} * room.batch + part.first;
  cuda::PackedLayer packed;
  packed.segments =
      reinterpret_cast<const PackedSegment*>(ws_.packed_segments_.device.as<uint64_t>() +
                                             row * PackedBuffers::SegmentWords(geometry(), room));
  packed.counts = ws_.Ints(PerMember::kSegments) + part.first;
  packed.segment_stride = room.segments;
  packed.kv_heads = geometry().kv_heads;
  packed.head_dim = geometry().head_dim;
  packed.truncated = part.plan.packed.truncate;
  packed.keep_max = std::min(room.keep, StoredChannels(part.plan, geometry()));
  return packed;
}

// Of blocks; every KV head has its list.
cuda::DeviceSelection CudaStep::BlocksOf(const Part& part, int layer) const {
  if (!Selects(part, layer)) return {};
  const PackedBuffers& buffers = ws_.packed_;
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  cuda::DeviceSelection blocks;
  blocks.unit_tokens = 1;
  blocks.groups = geometry().kv_heads;
  blocks.list_stride = ws_.capacity_.packed.list;
  blocks.units = buffers.units.as<int32_t>() + list * blocks.list_stride;
  blocks.counts = buffers.counts.as<int32_t>() + list;
  blocks.sink_end = buffers.sink_end.as<int32_t>() + part.first;
  blocks.recent_begin = buffers.recent_begin.as<int32_t>() + part.first;
  return blocks;
}

// By the first new token of each member. The first block is always on and has no score.
Status CudaStep::SelectBlocks(const Part& part, int layer, const std::byte* q, DType dtype) {
  const Geometry& g = geometry();
  const PackedBuffers& buffers = ws_.packed_;
  const PackedBuffers::Capacity& room = ws_.capacity_.packed;
  const int64_t list = int64_t{part.first} * g.kv_heads;
  cuda::ScorePackedBatch score;
  score.layer = PackedLayerOf(part, layer);
  score.queries = {q, dtype, int64_t{g.query_heads} * g.head_dim, part.count, g.group()};
  score.scores = buffers.scores.as<float>() + list * room.blocks;
  score.score_stride = room.blocks;
  score.first = 1;
  score.ahead = true;
  KVS_RETURN_IF_ERROR(Check(ops_.score_packed(score, stream_), "op score_packed"));

  cuda::PickBatch w;
  w.scores = score.scores;
  w.score_stride = room.blocks;
  w.batch = part.count;
  w.groups = g.kv_heads;
  w.rule = {1, score.first, 0, 0, 0};
  w.tokens = ws_.Ints(PerMember::kBlocks) + part.first;
  w.takes = ws_.Ints(PerMember::kTake) + part.first;
  w.ahead = true;
  w.list_stride = room.list;
  w.units = buffers.units.as<int32_t>() + list * room.list;
  w.counts = buffers.counts.as<int32_t>() + list;
  w.sink_end = buffers.sink_end.as<int32_t>() + part.first;
  w.recent_begin = buffers.recent_begin.as<int32_t>() + part.first;
  w.scratch = buffers.pick.as<std::byte>();
  w.scratch_lists = room.batch * g.kv_heads;
  return Check(ops_.pick(w, stream_), "op pick");
}

Status CudaStep::AttendPacked(const Part& part, int layer, const Rows& q, const MutableRows& out,
                              float* lse) {
  for (int32_t t = 0; t < part.new_tokens; ++t) {
    KVS_RETURN_IF_ERROR(
        AttendPackedItems(part, layer, first_row_[part.first] + part.begin + t, q, out, lse));
  }
  return OkStatus();
}

// One new token of each of the part's members, the first of them row `row` of the batch.
Status CudaStep::AttendPackedItems(const Part& part, int layer, int32_t row, const Rows& q,
                                   const MutableRows& out, float* lse) {
  const Geometry& g = geometry();
  const float scale = g.logit_scale();
  const int64_t rows = int64_t{ws_.capacity_.packed.batch} * g.query_heads;
  float* const partial = ws_.packed_.partial.as<float>();
  const cuda::Partials of_pages = {partial + rows * g.head_dim, partial + rows * (g.head_dim + 1),
                                   partial, 1};
  const std::byte* const queries = q.data + row * q.token_stride;
  cuda::AttendRawBatch raw;
  raw.layer = PagesOf(part, layer);
  raw.selection.sink_end = ws_.Ints(PerMember::kSinkEnd) + part.first;
  raw.selection.recent_begin = ws_.Ints(PerMember::kRecentBegin) + part.first;
  raw.batch = part.count;
  raw.group = g.group();
  raw.tokens = ws_.visible() + row;
  raw.q = queries;
  raw.q_stride = q.token_stride;
  raw.scale = scale;
  if (pending_.layer >= 0) {
    raw.new_k = pending_.k.From(row);
    raw.new_v = pending_.v.From(row);
  }
  raw.partial = of_pages;
  raw.ahead = part.new_tokens == 1;
  raw.workspace = ws_.attend_workspace_.as<std::byte>();
  KVS_RETURN_IF_ERROR(Check(ops_.attend_raw(raw, stream_), "op attend_raw"));

  cuda::AttendPackedBatch w;
  w.layer = PackedLayerOf(part, layer);
  w.queries = {queries, q.dtype, q.token_stride / SizeOf(q.dtype), part.count, g.group()};
  w.selection = BlocksOf(part, layer);
  w.scale = scale;
  w.with = of_pages;
  w.to = OutputFrom(row, out, lse);
  w.counters = ws_.attend_counters_.as<uint32_t>();
  w.workspace = ws_.packed_.workspace.as<float>();
  w.ahead = true;
  return Check(ops_.attend_packed(w, stream_), "op attend_packed");
}

// As its selector makes it (kernels/select/block.cc).
Result<Selection> CudaStep::ReadBlocks(int member, int32_t n) const {
  const StepMember& m = members_[member];
  const Geometry& g = geometry();
  const PackedStorage* const packed = m.state->packed();
  if (n < m.state->plan().min_tokens || packed == nullptr) return Selection::Full(n);
  const cuda::DeviceSelection device =
      BlocksOf({member, 1, 1, true, m.state->plan()}, selected_layer_);
  std::vector<int32_t> counts(static_cast<size_t>(g.kv_heads));
  std::vector<int32_t> listed(counts.size() * static_cast<size_t>(device.list_stride));
  int32_t sink_end = 0, recent_begin = 0;
  KVS_RETURN_IF_ERROR(CopyToHost(counts.data(), device.counts, counts.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(CopyToHost(listed.data(), device.units, listed.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(CopyToHost(&sink_end, device.sink_end, sizeof(sink_end)));
  KVS_RETURN_IF_ERROR(CopyToHost(&recent_begin, device.recent_begin, sizeof(recent_begin)));
  Selection selection;
  selection.Reset(n, g.kv_heads);
  for (int head = 0; head < g.kv_heads; ++head) {
    const BlockRanges ranges(*packed, selected_layer_, head);
    std::vector<int32_t>& units = selection.units[head];
    for (int32_t id = 0; id < sink_end; ++id) units.push_back(id);
    const int32_t* const list = listed.data() + int64_t{head} * device.list_stride;
    units.insert(units.end(), list, list + counts[head]);
    for (int32_t id = recent_begin; id < ranges.count(); ++id) units.push_back(id);
    for (const int32_t id : units) AppendRun(ranges.Tokens(id), &selection.runs[head]);
    AppendRun({packed->end(), n}, &selection.runs[head]);
    for (size_t s = 0; s < packed->segments().size(); ++s) {
      const PackedRows& blocks = packed->head(static_cast<int>(s), selected_layer_, head).blocks;
      selection.scored_bytes += int64_t{ranges.end(s) - ranges.first(s)} * blocks.stride;
    }
  }
  return selection;
}

}  // namespace kvstrata
