// SPDX-License-Identifier: Apache-2.0
// CudaSelector: a selector's half on a GPU (kernels/select/selector.h has the CPU's): which rows
// does a query need, by ops on the step's stream.
//
// An object belongs to a workspace and serves all sequences of its selector there, one step at a
// time. What it keeps of a sequence goes with the sequence's state; buffers and tables that it
// declared (step_memory.h) hold what one step needs. What differs from step to step is in columns
// and tables, which Stage fills, never in arguments of ops: an engine captures Select into a graph.
// One file each in kernels/plans/NAME/gpu, and step/gpu/lists/cuda_fixed.cc for those that no query
// decides (window); one row each in cuda_selector_rows.h.
//
// Order of a step: Fit, Stage, then Select and SelectionOf layer by layer, Read. Threads: one call
// at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/batches/batch.h"
#include "kernels/select/selector.h"
#include "kernels/step/gpu/frame/cuda_part.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaFrame;  // cuda_frame.h

// The queries that Select takes.
enum class CudaQueries : uint8_t {
  kNone,   // it is not called: what is chosen is known when the step begins
  kDense,  // any dtype, rows and heads side by side
  kNative  // the pages' dtype, as attention takes them
};

// What a selector that keeps a prompt's queries has beside its choices.
class CudaObserver {
 public:
  virtual ~CudaObserver() = default;
  // A graph did what Select of a prompt's part had enqueued when it was captured.
  virtual void NoteReplayed(const CudaFrame& frame, const CudaPart& part, int layer) = 0;
  // Tokens of the prompt that a KV head of frame.selected_layer() keeps. FAILED_PRECONDITION
  // KEPT_NONE.
  virtual Result<std::vector<int32_t>> ReadKept(const CudaFrame& frame, int member,
                                                int head) const = 0;
};

// What a selector is like, under a plan.
struct CudaSelectorTraits {
  CudaQueries queries = CudaQueries::kDense;
  // It is asked in dense layers, too, where everything is attended.
  bool in_dense_layers = false;
  // Its kernels do nothing for sequences shorter than their min_tokens.
  bool idles_when_short = false;
  // The first op of Select reads ahead of the kernel before it (launch.cuh).
  bool reads_ahead = true;
  // Every selection has the newest token in it, and none is made of its key.
  bool attends_newest = true;
  // A prompt's chunks select, cut at multiples of so many tokens from the sequence's start; 0: they
  // do not.
  int32_t prompt_chunk = 0;
  // Its own; null: it does not ask for a prompt's queries.
  CudaObserver* observer = nullptr;
};

class CudaSelector {
 public:
  CudaSelector() = default;
  CudaSelector(const CudaSelector&) = delete;
  CudaSelector& operator=(const CudaSelector&) = delete;
  virtual ~CudaSelector() = default;

  virtual CudaSelectorTraits traits(const Plan& plan) = 0;

  virtual Status Fit(const CudaFrame&, std::span<const CudaPart>) { return OkStatus(); }
  // Forgets the step before, decides what is the host's to decide, and fills columns and tables.
  // What is chosen for all layers at once, or kept for later choices, is enqueued by what it gives
  // to CudaFrame::OnceIndexed.
  virtual Status Stage(CudaFrame*) { return OkStatus(); }

  // q: the part's rows. By the first new token of each member; of a prompt as the selector does.
  virtual Status Select(CudaFrame*, const CudaPart&, int, const Rows&) { return OkStatus(); }
  virtual cuda::DeviceSelection SelectionOf(const CudaFrame& frame, const CudaPart& part) const = 0;
  // The selection of frame.selected_layer(), as the CPU's selector makes it; `tokens` with the
  // query's own.
  virtual Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                                 int32_t tokens) const = 0;

 protected:
  // Whether it is the member's.
  bool Has(const CudaFrame& frame, int member) const;
};

}  // namespace kvstrata
