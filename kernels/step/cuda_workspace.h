// CudaWorkspace: what the steps of one model keep on the GPU from one to the next, for one stream
// of steps: address tables of pages and index blocks, lengths, scores, selections, scratch, and
// copies of tensors that the ops do not take as they are. Steps (cuda_step.h) fill it; it decides
// nothing.
//
// Its buffers are sized by the largest batch so far, generously, and their addresses and strides
// stay the same until one has to grow. So one workspace serves batches of any shape in turn, and a
// graph that was captured of a step serves every later step of the same shape, whatever ran in
// between, until `generation` changes.
//
// Ownership: borrows the table of ops. Threads: one call at a time; one step at a time, too: steps
// that are open together need a workspace each. The device is the one that is current in calls.
// Cost: about 2 MB, 52 MB once prompts come in chunks, and, for plans with an index, 4 bytes a
// unit, KV head and sequence, and twice that for strata; for chess 19 bytes a page and sequence,
// and 8 a channel of all layers and KV heads; for sekv 12 bytes a span, query head and sequence,
// and 16 a span, KV head and sequence; growing waits for the GPU.
#ifndef KVSTRATA_KERNELS_STEP_CUDA_WORKSPACE_H_
#define KVSTRATA_KERNELS_STEP_CUDA_WORKSPACE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/hot_pages.h"
#include "kernels/cuda/sentence_table.h"
#include "kernels/plan.h"
#include "kernels/step/bucket_buffers.h"
#include "kernels/step/hot_cache_budget.h"
#include "kernels/step/packed_buffers.h"
#include "kernels/step/repeated_call.h"
#include "kernels/step/vote_buffers.h"

namespace kvstrata {

class CudaWorkspace {
 public:
  // Room for sequences of `reserve_tokens` from the first step on, so that graphs live longer.
  // hot_cache_budget: of the sequences' hot caches; null: as much as the GPU has.
  CudaWorkspace(const cuda::CudaOps& ops, const Geometry& geometry, int32_t reserve_tokens = 0,
                std::shared_ptr<HotCacheBudget> hot_cache_budget = nullptr);
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;
  // Waits for the GPU. REQUIRES: no step is open.
  ~CudaWorkspace();

  // Changes when a buffer has grown: graphs captured before hold addresses that are gone.
  uint64_t generation() const { return generation_; }
  // How many repeated calls of engines that capture none are graphs (repeated_call.h).
  int call_graphs() const;

  // Entries of an address table that a cuda::SentenceTable takes, and a cuda::HotPages.
  static constexpr int32_t kSentenceEntries = sizeof(cuda::SentenceTable) / sizeof(uint64_t);
  static constexpr int32_t kHotEntries = sizeof(cuda::HotPages) / sizeof(uint64_t);

 private:
  friend class CudaStep;

  // New tokens of a member that are queries of attend_raw, each by itself; more are a chunk.
  static constexpr int32_t kItemsOfMember = 8;
  // Entries that buffers have room for; strides of tables and lists.
  struct Capacity {
    int32_t members = 0, rows = 0;  // of a batch; rows: new tokens
    int32_t chunk = 0;              // new tokens of a launch of attend_chunk
    int32_t pages = 0, blocks = 0;  // of a member
    int32_t units = 0, list = 0;    // of a (member, KV head): candidates, chosen ones
    int32_t cascade_pages = 0;      // of a member with selector cascade: candidates
    int32_t bucket_list = 0;        // of a (member, KV head) with selector bucket: tokens chosen
    int32_t span_parts = 0, spans = 0;  // of a member with codec lowrank
    int32_t far_pages = 0;              // pages of a member with pages in the host's memory
    VoteBuffers::Capacity votes;        // of selector vote
    PackedBuffers::Capacity packed;     // of codec packed
    bool operator==(const Capacity&) const = default;
  };
  // Arrays of a step, one entry a member; behind them `starts`, one entry more, and `visible`.
  enum class PerMember {
    kLengths,
    kFrom,
    kTo,
    kSinkEnd,
    kRecentBegin,
    kSelectAt,
    kSegments,
    kBlocks,
    kTake,
    kQueriesFrom,
    kWholeBuckets,
    kSpanParts,
    kSpanRoom,
    kSpanEnd,
    kAllRows,  // cuda::kExpandAll of every member
    kCount
  };
  // New tokens of one member, or of several with one each, that one launch of every op serves. A
  // prompt whose chunks select has a part for each.
  struct Part {
    int32_t first = 0, count = 0;  // members
    int32_t new_tokens = 1;        // of each
    bool selects = false;          // the prompt is complete and the plan selects, or is packed
    Plan plan;                     // of the members, where it selects
    int32_t begin = 0;             // first of them among the member's new tokens
    bool prompt = false;           // a chunk of a prompt, with a selection of its own
    int32_t list = 0;              // of selector vote: its first list in VoteBuffers
    bool observes = false;  // of a prompt whose last queries are kept; the plan is there, too
    bool promotes = false;  // selects, and a member has pages in the host's memory
    bool idle = false;      // of a step all of whose members are shorter than their min_tokens
    bool operator==(const Part&) const = default;
  };
  // A batch whose layers were captured, since the last growth.
  struct CapturedShape {
    std::vector<Part> parts;
    std::vector<uint8_t> appended, attended;  // by layer
  };
  // The calls that such batches make outside of the engine's graphs, since the last growth.
  struct CalledShape {
    std::vector<Part> parts;
    std::vector<RepeatedCall> selects, attends;  // by layer
  };
  static constexpr size_t kCalledShapes = 8;  // at most
  // Pinned memory that a step's tables are copied from, laid out as on the device.
  struct StagingSlot {
    std::byte* data = nullptr;
    cuda::Event done = nullptr;  // what Begin enqueued
  };
  struct AddressTable {
    DeviceBuffer device;         // uint64_t [members][stride]
    std::vector<uint64_t> host;  // what is there once all copies are done
    uint64_t staging_offset = 0;
  };

  Status Check(int code, const char* what) const { return CudaStatus(ops_, code, what); }
  // Makes every buffer large enough. Not under capture.
  Status Fit(Capacity need);
  // The same for one buffer; FAILED_PRECONDITION CAPTURE_ALLOCATES under capture.
  Status Reserve(DeviceBuffer* buffer, uint64_t bytes, cuda::Stream stream);
  Status AllocateStaging();
  // Buffers have grown: what was captured holds addresses that are gone.
  void ForgetGraphs();
  CalledShape* CallsOf(const std::vector<Part>& parts);
  Status FitSpans(const Capacity& c);
  Status FitFarPages(const Capacity& c);
  // Orders `stream` behind the step before.
  Status Follow(cuda::Stream stream);
  // A slot whose last step has begun on the GPU. DEADLINE_EXCEEDED GPU_STUCK after 10 s.
  Result<StagingSlot*> NextSlot();
  Status AwaitOnHost(cuda::Event event);
  // Brings a member's row of a table up to date: copies what differs.
  Status Upload(AddressTable* table, int32_t stride, int member, const std::byte* const* addresses,
                int32_t count, const StagingSlot& slot, cuda::Stream stream);

  int64_t IntsBeforeRows() const;
  int32_t* Ints(PerMember array) const {
    return ints_.as<int32_t>() + static_cast<int>(array) * int64_t{capacity_.members};
  }
  int32_t* starts() const { return Ints(PerMember::kCount); }
  // Of each new token: the positions that it sees.
  int32_t* visible() const { return ints_.as<int32_t>() + IntsBeforeRows(); }

  const cuda::CudaOps& ops_;
  const Geometry geometry_;
  const int32_t reserve_tokens_;
  const std::shared_ptr<HotCacheBudget> hot_cache_budget_;
  uint64_t generation_ = 0;
  Capacity capacity_;
  bool in_step_ = false;

  AddressTable pages_, blocks_, vote_caches_;  // vote_caches_: one entry a member
  AddressTable sentences_;                     // a cuda::SentenceTable a member
  // Of members with pages in the host's memory: cuda::HotPages::pages, a cuda::HotPages each.
  AddressTable far_pages_, hot_tables_;
  DeviceBuffer hot_counters_;
  DeviceBuffer ints_;
  DeviceBuffer scores_, vote_scratch_, pick_scratch_;
  DeviceBuffer units_, counts_, sink_end_, recent_begin_;  // a DeviceSelection
  // Of selector cascade, a list of pages each member, which steps that select nothing find as it
  // was; whose it is (CascadeTrigger::selection_id), 0: nobody's.
  DeviceBuffer cascade_units_, cascade_counts_, cascade_scratch_;
  std::vector<uint64_t> cascade_ids_;
  VoteBuffers votes_;
  // Of codec packed: uint64_t words of PackedSegment [layers][batch][segments][kv_heads], and whose
  // they are (PackedStorage::id), 0: nobody's.
  AddressTable packed_segments_;
  std::vector<uint64_t> packed_ids_;
  PackedBuffers packed_;
  BucketBuffers buckets_;
  // Of plan sekv: tables of 8-byte words, and whose they are (SpanStorage::id), 0: nobody's; scores
  // of all query heads, lists of all KV heads.
  AddressTable span_parts_, span_routers_;
  std::vector<uint64_t> span_ids_;
  DeviceBuffer relevance_, later_relevance_, coarse_;
  DeviceBuffer span_list_, span_counts_, span_chosen_, span_workspace_;
  DeviceBuffer attend_counters_;  // of attend_chunk, attend_packed, attend_spans
  DeviceBuffer attend_workspace_, chunk_workspace_;
  // Tensors: copies of the host's, dense rows, queries in the pages' dtype, outputs.
  DeviceBuffer host_k_, host_v_, host_q_, dense_k_, dense_v_, dense_q_, native_q_, out_, lse_;

  std::array<StagingSlot, 4> slots_;
  size_t next_slot_ = 0;
  cuda::Event last_work_ = nullptr;  // of the last step
  std::vector<CapturedShape> captured_;
  std::vector<CalledShape> called_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_CUDA_WORKSPACE_H_
