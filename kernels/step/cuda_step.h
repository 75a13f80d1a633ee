// CudaStep: a step (docs/design.md, "Two roads, one step") on a GPU, for the plans that CudaServes.
// Sibling of Step (step.h): the same members, tensors and rules, the same selections but for
// near-ties, outputs equal within 5e-3.
//
//   Begin -> per layer Append, [Select,] Attend -> End
//   Begin -> the engine launches a graph that it captured of those layers, Replay -> End
//
// Page and block addresses of the members' views are device addresses and are only passed on.
// Everything is enqueued on the stream of Begin: after tensors of the device, no call waits for the
// GPU. Begin refreshes addresses and lengths by copies that the stream orders, and writes the index
// rows of the units that earlier steps completed; where chess selects anew, and where SentenceKV
// gets new buckets, it does so here, for all layers; Append, Select and Attend enqueue kernels
// whose arguments do not change from step to step, so that an engine may capture them, all layers,
// into a graph of its own: Begin, capture the layers, launch, End. Later steps of the same shape
// (members with the same plans, in the same order, prompts complete or not, as many new tokens
// each; tensors at the same addresses) launch it again. The graph is good as long as the
// workspace's generation is that of the capture and Replay does not refuse. What is captured of an
// Append of one token a member may be the layer's attention: its tensors stay as they are until
// then. Where every member is shorter than its min_tokens nothing is enqueued for selections: a
// graph that is captured then is stale once one is longer, and the one captured then serves both.
//
// Tensors: device memory, or host memory, which is copied; a call with any of host memory returns
// when its copies are done, and is refused under capture. Keys, values, outputs: bf16, fp16, fp32.
// Queries are rounded to the pages' dtype for attention, not for scores.
//
// Several new tokens of a member are attended together (ops/attend_chunk), a prompt chunk that
// selects by itself.
//
// Codec packed: extents may lie in device memory; the views then name their descriptions
// (codec/extent.h). A graph stays good while the daemon packs more, until there are more extents
// than the workspace has room for.
//
// Selector zoom: Attend takes the queries that Select took, in the pages' dtype; a member's state
// is refreshed from its view before Begin, and what it points into outlives the step on the GPU.
//
// Selector vote: whether a cached selection is used is the GPU's decision (ops/reuse), so that a
// graph serves hits and misses. The cache goes with the sequence's state (cuda_vote_cache.h).
//
// A state may be cloned while its step is open or under way, after AwaitBegin: what kernels keep of
// a step counts only in steps of more tokens. A clone in an open step is of what was committed
// before.
//
// Pages in the host's memory (view.far_pages) are attended in place, over the bus. In steps of one
// new token behind a prompt, of codec raw, what is selected of them is promoted first: copied into
// a cache on the GPU, where it stays as long as it is selected often (cuda_hot_pages.h). A graph
// that was captured before any page was the host's is stale then.
//
// Selector bucket: prompt tokens that no layer was given queries of are not observed
// (docs/spec/sentencekv.md 2); the Begin behind a prompt's end ranks its tokens, which takes the
// GPU about as long as attending n_obs of them in full.
// Threads: one call at a time for a step, its workspace and its states.
#ifndef KVSTRATA_KERNELS_STEP_CUDA_STEP_H_
#define KVSTRATA_KERNELS_STEP_CUDA_STEP_H_

#include <memory>
#include <vector>

#include "kernels/cuda/candidates.h"
#include "kernels/step/cuda_workspace.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaShadow;  // cuda_shadow.h

// Whether CudaStep can serve a sequence: UNIMPLEMENTED CUDA_PLAN or CUDA_MODEL, which names the
// key, its value and what is served. For opening a sequence; Begin asks it again.
Status CudaServes(const Plan& plan, const Geometry& geometry);

class CudaStep : public StepBatch {
 public:
  // Where the GPU writes `value` when it has done all of a step: the slot of a table's reader, so
  // that the daemon sees the epoch left (ADR 7). Host memory registered with CUDA.
  struct Exit {
    uint64_t* address = nullptr;  // null: nothing is written
    uint64_t value = 0;
  };

  // REQUIRES: as StepBatch; the members' geometry is the workspace's; index blocks up to
  // view.tokens are writable from indexed_tokens() on; states, views and workspace outlive the
  // step. An error: UNIMPLEMENTED (CudaServes); FAILED_PRECONDITION WORKSPACE_BUSY (its last step
  // is still open), CAPTURE_BEGIN (the stream is being captured); DATA_LOSS EXTENT_INVALID;
  // GPU_STUCK, GPU_MEMORY, CUDA_ERROR. The caller then leaves the epoch itself: nothing on the GPU
  // reads pages. Cost: compares the page tables with those of the step before; a copy of the
  // lengths and one for each member whose table changed; one kernel a level where units are
  // complete that have no rows yet, three where chess selects.
  static Result<std::unique_ptr<CudaStep>> Begin(std::vector<StepMember> members,
                                                 CudaWorkspace* workspace, cuda::Stream stream,
                                                 Exit exit);
  // Without End: the states stay as they were, but for the index, and the exit is written.
  ~CudaStep();

  // Measures from now on what each Attend of `member` loses, into *shadow; answers stay the same
  // bits. REQUIRES: Decodes(member), before its first Attend.
  void Shadow(int member, CudaShadow* shadow);

  // As Step's, on the stream. Errors: CUDA_ERROR; CAPTURE_HOST_TENSOR and CAPTURE_ALLOCATES
  // (FAILED_PRECONDITION) under capture. lse: device or host.
  Status Append(int layer, const Rows& k, const Rows& v);
  Status Select(int layer, const Rows& q);
  Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse);

  // What this step writes to page `from` is to be in page `to`, too, with all that `from` holds:
  // End copies it. Of a member that was forked meanwhile, whose page is another sequence's now.
  void MovePage(const std::byte* from, std::byte* to) { moved_pages_.push_back({from, to}); }

  // Waits for what Begin enqueued: from then on a member's state may be cloned, unless it is a
  // prompt's of selector bucket. DEADLINE_EXCEEDED GPU_STUCK after 10 s.
  Status AwaitBegin() const;

  // The engine launched, on the stream, a graph that was captured of a step of this shape: all
  // layers are done. FAILED_PRECONDITION GRAPH_STALE when none was, of all layers, at this
  // generation.
  Status Replay();

  // All layers hold the new tokens: the states advance. Enqueues the exit on `stream`, which must
  // come after everything of the step. The step is over. FAILED_PRECONDITION CAPTURE_END.
  Status End(cuda::Stream stream);

  // The selection of the last layer selected, attended or replayed, as Step::selection; GroupsOf,
  // UnitsOf and PositionsOf read it; of a prompt that is cut, the last chunk's. What attending that
  // layer read for one member, as Step::cost. For tools and tests: both copy from the device and
  // wait. FAILED_PRECONDITION CAPTURE_READ, SELECTION_NONE.
  Result<Selection> ReadSelection(int member) const;
  Result<StepCost> ReadCost(int member) const;
  // Selector bucket: the prompt's tokens that a KV head of that layer keeps, ascending. Also
  // FAILED_PRECONDITION KEPT_NONE.
  Result<std::vector<int32_t>> ReadKept(int member, int head) const;

 private:
  using Part = CudaWorkspace::Part;
  using PerMember = CudaWorkspace::PerMember;

  CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
           Exit exit);
  static cuda::CandidateRule RuleOf(const Plan& plan);
  // Bytes from a unit's minimum to its maximum.
  static int64_t FieldStride(const IndexLayout& index);
  Status Check(int code, const char* what) const { return ws_.Check(code, what); }
  Result<bool> IsCapturing(cuda::Stream stream) const;

  // Begin.
  void CutParts();
  // Whether the part's layers have kernels that do nothing for sequences attended in full. Those of
  // selector bucket keep the sentence's queries, those of codecs read what is stored.
  static bool ScoresByQuery(const Part& part);
  // Whether all members of such parts are shorter than their min_tokens.
  bool IsShort() const;
  void CutPrompt(int member);
  CudaWorkspace::Capacity Need() const;
  VoteBuffers::Capacity NeedOfVotes() const;
  Status Prepare();
  Status Stage(const CudaWorkspace::StagingSlot& slot);
  Status SeparateOps(const CudaWorkspace::StagingSlot& slot);
  Status StageInts(const CudaWorkspace::StagingSlot& slot);
  Status StageVoteCaches(const CudaWorkspace::StagingSlot& slot);
  Status OwnVoteCache(SequenceState* state);
  Status Summarize();
  Status SummarizeMembers(int first, int count);
  Status SummarizeLevel(const Part& part, int level);
  Status WriteExit(cuda::Stream stream);

  // Selector cascade (cuda_cascade.cc): the host decides when, Begin's kernels select.
  static bool Cascades(const StepMember& m);
  static const CascadeTrigger& TriggerOf(const StepMember& m);
  static Run CascadeList(const StepMember& m);
  bool IsCascadeDue(int member) const;
  // How many tokens a selection that is due sees; -1: none is.
  int32_t CascadeAt(int member) const;
  void DecideCascades();
  Status SelectCascades();
  Status SelectCascade(int first, int count);
  cuda::DeviceSelection CascadeOf(const Part& part) const;
  Result<Selection> ReadCascade(int member, int32_t n) const;

  // Selector bucket (cuda_bucket.cc): the host closes sentences, Begin's kernels make their
  // buckets.
  static bool HasBuckets(const StepMember& m);
  static Run BucketList(const StepMember& m);
  void DecideSentences();
  Status StageSentences(const CudaWorkspace::StagingSlot& slot);
  Status FitBuckets(SequenceState* state);
  Status MakeBuckets();
  Status MakePromptBuckets(int member);
  Status RankPrompt(int member, int layer, const int32_t* lengths);
  Status MakeWholeBuckets(int member);
  const cuda::SentenceTable* TablesOf(const Part& part) const;
  Status Observe(const Part& part, int layer, const std::byte* q, DType dtype);
  void NoteObserved(const Part& part, int layer);
  Status PickBuckets(const Part& part, int layer, const std::byte* q, DType dtype);
  cuda::DeviceSelection BucketSelection(const Part& part) const;
  Result<Selection> ReadBuckets(int member, int32_t n) const;
  Result<std::vector<int32_t>> ReadBucketEnds(const StepMember& m, int head) const;
  Result<std::vector<int32_t>> ReadKeptOf(const StepMember& m, int head) const;

  // Pages in the host's memory (cuda_hot_pages.cc): their selected slices are promoted.
  static bool MayPromote(const StepMember& m);
  Status StageHotPages(const CudaWorkspace::StagingSlot& slot);
  Status FollowPages(int member, const CudaWorkspace::StagingSlot& slot);
  // Into `pages`, where the promoted slices are found.
  Status Promote(const Part& part, int layer, cuda::PagedLayer* pages);
  bool Serves(std::vector<Part> captured) const;

  // Tensors.
  Result<Rows> OnDevice(const Rows& rows, int32_t heads, DeviceBuffer* copy);
  Result<Rows> Copied(const Rows& rows, int32_t heads, DType dtype, DeviceBuffer* to);
  Result<cuda::DeviceSource> SourceOf(const Rows& rows, DeviceBuffer* copy, DeviceBuffer* dense);
  bool IsDense(const void* data, int64_t token_stride, int64_t head_stride, DType dtype,
               int32_t heads) const;
  // Whether attend_raw takes the queries as they are.
  bool IsAttendable(const Rows& q) const;
  Status StoreOutput(const MutableRows& out, bool on_device);

  // Of one layer, where the layer's attention will read them and write them to their pages.
  struct NewRows {
    int layer = -1;
    cuda::DeviceSource k, v;
  };
  bool AttendsNewRows() const;
  Status AppendPending();
  Status CopyMovedPages(cuda::Stream stream);
  Status AppendRows(const NewRows& rows);

  // Ops. Rows of `q` and `out` are dense from here on.
  bool Selects(const Part& part, int layer) const;
  bool Observes(const Part& part, int layer) const;
  cuda::PagedLayer PagesOf(const Part& part, int layer) const;
  cuda::DeviceSelection SelectionOf(const Part& part, int layer) const;
  // Of the members' index: field 0 of a level.
  cuda::DeviceRows IndexRowsOf(const Part& part, int level, int layer) const;
  cuda::DeviceRows BoundsOf(const Part& part, int layer) const {
    return IndexRowsOf(part, 0, layer);
  }
  // As `calls` of the layer, where nothing but kernels of a decode step is enqueued.
  template <typename Enqueue>
  Status Repeat(std::vector<RepeatedCall> CudaWorkspace::CalledShape::*calls, int layer,
                const RepeatedCall::Tensors& tensors, const Enqueue& enqueue);
  Status SelectFrom(int layer, const Rows& q);
  Status SelectParts(int layer, const Rows& q);
  Status SelectPart(const Part& part, int layer, const Rows& q);
  Status ScoreBounds(const Part& part, int layer, const std::byte* q, DType dtype);
  Status VoteBounds(const Part& part, int layer, const std::byte* q, DType dtype);
  Status Pick(const Part& part);
  // Selector vote (cuda_vote.cc).
  Status SelectVotes(const Part& part, int layer, const std::byte* q, DType dtype);
  Status MeanQuery(const Part& part, const std::byte* q, DType dtype);
  cuda::Reuse ReuseOf(const Part& part, int layer, const int32_t* tokens) const;
  Status CountVotes(const Part& part, int layer, const std::byte* q, DType dtype,
                    const int32_t* tokens, const cuda::Reuse& reuse);
  Status PickVoted(const Part& part, const int32_t* tokens);
  cuda::DeviceSelection VotedSelection(const Part& part) const;
  Result<Selection> ReadVotes(const Part& part, int member, int32_t n) const;
  // Selector block over codec packed (cuda_packed.cc).
  struct PackedCounts {
    int32_t segments = 0, blocks = 0, take = 0;
  };
  static bool IsPacked(const StepMember& m);
  static int32_t PackedEnd(const StepMember& m);
  Status CheckPacked() const;
  PackedBuffers::Capacity NeedOfPacked() const;
  PackedCounts PackedCountsOf(int member) const;
  // Whether the table of segments on the GPU is that of the member's packed storage.
  bool KnowsPacked(int member) const;
  Status StagePacked(const CudaWorkspace::StagingSlot& slot);
  cuda::PackedLayer PackedLayerOf(const Part& part, int layer) const;
  cuda::DeviceSelection BlocksOf(const Part& part, int layer) const;
  Status SelectBlocks(const Part& part, int layer, const std::byte* q, DType dtype);
  Status AttendPacked(const Part& part, int layer, const Rows& q, const MutableRows& out,
                      float* lse);
  Status AttendPackedItems(const Part& part, int layer, int32_t row, const Rows& q,
                           const MutableRows& out, float* lse);
  Result<Selection> ReadBlocks(int member, int32_t n) const;
  // Plan sekv (cuda_spans.cc).
  struct SpanCounts {
    int32_t parts = 0, room = 0, end = 0;
  };
  static bool ReadsSpans(const Part& part);
  void NeedOfSpans(CudaWorkspace::Capacity* need) const;
  Status CheckSpans() const;
  static SpanCounts SpanCountsOf(const StepMember& m);
  Status StageSpans(const CudaWorkspace::StagingSlot& slot);
  cuda::SpanLayer SpansOf(const Part& part, int layer) const;
  cuda::SpanQueries SpanQueriesOf(const Part& part, const Rows& q, int32_t token) const;
  Status ScoreSpans(const Part& part, int layer, const Rows& q, int32_t token);
  Status AttendSpans(const Part& part, int layer, const Rows& q, const MutableRows& out,
                     float* lse);
  Result<Selection> ReadSpans(const Part& part, int member, int32_t n) const;
  Status AttendParts(int layer, const Rows& q, const MutableRows& out, float* lse);
  Status AttendPart(const Part& part, int layer, const Rows& q, const MutableRows& out, float* lse);
  Status AttendChunk(const Part& part, int layer, const Rows& q, const MutableRows& out,
                     float* lse);
  cuda::AttentionOutput OutputFrom(int32_t row, const MutableRows& out, float* lse) const;
  Status AttendItems(cuda::AttendRawBatch work, int32_t row, int32_t items, const Rows& q,
                     const MutableRows& out, float* lse);

  // What a plan loses (cuda_shadow.cc).
  void MeasureShadows(int layer, const Rows& q);
  Status MeasureShadow(int member, int layer, const Rows& q, CudaShadow* shadow);
  Status AttendPositions(int member, int layer, const Rows& q, CudaShadow* shadow);
  Result<const void*> HeadOfGroups(const Rows& q, int32_t row, int head, CudaShadow* shadow);
  void NoteCapturedShadows();
  void CopyShadows(cuda::Stream stream);

  CudaWorkspace::CapturedShape* ShapeUnderCapture();
  // The last that holds new tokens of the member.
  const Part& PartOf(int member) const;
  Status CheckReadable() const;
  Result<Selection> ReadPart(const Part& part, int member) const;
  Status CopyToHost(void* to, const void* from, uint64_t bytes) const;
  Result<Selection> ReadUnits(int member, int32_t n) const;

  CudaWorkspace& ws_;
  const cuda::CudaOps& ops_;
  cuda::Stream stream_;  // a call that is made a graph is enqueued elsewhere (RepeatedCall)
  const Exit exit_;
  std::vector<Part> parts_;
  std::vector<uint8_t> reselects_;    // by member: a trigger of cascade fired in this Begin
  std::vector<uint8_t> observed_;     // [members][layers]: queries of a prompt were kept
  std::vector<CudaShadow*> shadows_;  // by member, null: none; empty: of none
  NewRows pending_;                   // of a layer that was appended, but not attended yet
  struct MovedPage {
    const std::byte* from;
    std::byte* to;
  };
  std::vector<MovedPage> moved_pages_;
  int32_t vote_lists_ = 0;  // of all parts, in VoteBuffers
  bool decodes_ = false;    // one new token of each member, behind its prompt
  int selected_layer_ = -1;
  // Whose queries and rows were all enqueued before its expand_spans: its attend_spans reads ahead.
  int span_rows_layer_ = -1;
  bool begun_ = false, ended_ = false;
  bool launched_ = false;  // Begin, a kernel
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_CUDA_STEP_H_
