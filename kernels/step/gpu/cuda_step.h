// SPDX-License-Identifier: Apache-2.0
// CudaStep: a step (docs/design.md, "Two transports, one step") on a GPU, for the plans that
// CudaServes. Sibling of Step (step.h): the same members, tensors and rules, the same selections
// but for near-ties, outputs equal within 5e-3.
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
// Codecs packed and planes: extents may lie in device memory; the views then name their
// descriptions (codec/extent.h). A graph stays good while the daemon packs more, until there are
// more extents or groups than the workspace has room for. With planes several tokens attend all.
//
// Selector zoom: Attend takes the queries that Select took, in the pages' dtype; a member's state
// is refreshed from its view before Begin, and what it points into outlives the step on the GPU.
//
// Selector vote: whether a cached selection is used is the GPU's decision (ops/reuse), so that a
// graph serves hits and misses. The cache goes with the sequence's state (cuda_vote.cc).
//
// A state may be cloned while its step is open or under way, after AwaitBegin: what kernels keep of
// a step counts only in steps of more tokens. A clone in an open step is of what was committed
// before.
//
// Pages in the host's memory (view.host_pages) are attended in place, over the bus. In steps of one
// new token behind a prompt, of codec raw, what is selected of them is promoted first: copied into
// a cache on the GPU, where it stays as long as it is selected often (cuda_hot_pages.h). A graph
// that was captured before any page was the host's is stale then.
//
// Selector bucket: prompt tokens that no layer was given queries of are not observed
// (docs/spec/sentencekv.md 2); the Begin behind a prompt's end ranks its tokens, which takes the
// GPU about as long as attending n_obs of them in full.
// Threads: one call at a time for a step, its workspace and its states.
#pragma once

#include <memory>
#include <vector>

#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector.h"
#include "kernels/step/gpu/frame/cuda_serves.h"
#include "kernels/step/gpu/frame/cuda_workspace.h"

namespace kvstrata {

class CudaShadow;  // cuda_shadow.h

class CudaStep : public CudaFrame {
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
  // Before End: the states stay as they were, but for the index, and the exit is written.
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
  // End copies it. For a member that was forked meanwhile, whose page is another sequence's now.
  void MovePage(const std::byte* from, std::byte* to) { moved_pages_.emplace_back(from, to); }

  // Waits for what Begin enqueued: from then on a member's state may be cloned, unless it is a
  // prompt's of selector bucket. DEADLINE_EXCEEDED GPU_STUCK after 10 s.
  Status AwaitBegin() const { return memory().slots().Await(); }

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
  CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
           Exit exit);

  // Begin (cuda_step.cc).
  Status Prepare();
  Status Stage();
  Status WriteExit(cuda::Stream stream);
  // What the ops of this call are captured for; null: nothing is captured.
  CudaGraphs::Captured* BatchUnderCapture();

  // A layer (cuda_layer.cc). Rows of `q` and `out` are dense from AttendParts on.
  bool AttendsNewRows() const;
  Status AppendPending();
  Status AppendRows(const NewRows& rows);
  // As `calls` of the layer, where nothing but kernels of a decode step is enqueued.
  template <typename Enqueue>
  Status Repeat(std::vector<RepeatedCall> CudaGraphs::Called::*calls, int layer,
                const RepeatedCall::Tensors& tensors, const Enqueue& enqueue);
  Status SelectFrom(int layer, const Rows& q);
  Status SelectParts(int layer, const Rows& q);
  // q as a selector wants it; *dense and *native are copies that other parts may have had made.
  Result<Rows> QueriesFor(CudaQueries wanted, const Rows& q, Rows* dense, Rows* native);
  bool SelectsByQuery(const CudaPart& part, int layer) const;
  Status AttendParts(int layer, const Rows& q, const MutableRows& out, float* lse);
  Status AttendPart(const CudaPart& part, int layer, const Rows& q, const MutableRows& out,
                    float* lse);
  Status AttendChunk(const CudaPart& part, int layer, const Rows& q, const MutableRows& out,
                     float* lse);

  void NoteCapturedShadows();

  // Selections read back (cuda_selection.cc).
  Status CheckReadable() const;
  Result<Selection> ReadPart(const CudaPart& part, int member) const;

  const Exit exit_;
  std::vector<CudaShadow*> shadows_;  // by member, null: none; empty: of none
  std::vector<std::pair<const std::byte*, std::byte*>> moved_pages_;
  bool decodes_ = false;  // one new token of each member, behind its prompt
  bool begun_ = false, ended_ = false;
};

}  // namespace kvstrata
