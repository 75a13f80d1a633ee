// SPDX-License-Identifier: Apache-2.0
// CudaWorkspace: what the steps of one model keep on the GPU from one to the next, for one stream
// of steps: memory (step_memory.h), the GPU's half of every selector and codec, and what is known
// of graphs. Steps (cuda_step.h) use it; it decides nothing.
//
// Its buffers are sized by the largest batch so far, generously, and their addresses and strides
// stay the same until one has to grow. So one workspace serves batches of any shape in turn, and a
// graph that was captured of a step serves every later step of the same shape, whatever ran in
// between, until `generation` changes.
//
// Ownership: borrows the table of ops. Threads: one call at a time; one step at a time, too: steps
// that are open together need a workspace each. The device is the one that is current in calls.
// Cost: about 2 MB, 52 MB once prompts come in chunks, and, for plans with an index, 4 bytes a
// unit, KV head and sequence, and twice that for softmax; for chess 19 bytes a page and sequence,
// and 8 a channel of all layers and KV heads; for tokenselect, of each sequence that one launch
// serves, 2 bytes a token and query head, and 4 a token; for sentencekv 4 bytes a listed token,
// sequence and KV head, and at the end of a prompt up to 256 MB; what codecs take: cuda_packed.h,
// cuda_planes.h, cuda_spans.cc. Growing waits for the GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/frame/cuda_graphs.h"
#include "kernels/step/gpu/frame/cuda_host_pages.h"
#include "kernels/step/gpu/frame/cuda_index.h"
#include "kernels/step/gpu/frame/cuda_selector.h"
#include "kernels/step/gpu/frame/cuda_tensors.h"
#include "kernels/step/gpu/memory/hot_cache_budget.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaWorkspace {
 public:
  // Room for sequences of `reserve_tokens` from the first step on, so that graphs live longer.
  // hot_cache_budget: of the sequences' hot caches; null: as much as the GPU has. not_finite:
  // page-locked words that outlive this, of which a step sets that of each member that it wrote a
  // NaN or an infinity of, by the time it has ended on the GPU; null: nobody asks.
  CudaWorkspace(const cuda::CudaOps& ops, const Geometry& geometry, int32_t reserve_tokens = 0,
                std::shared_ptr<HotCacheBudget> hot_cache_budget = nullptr,
                uint32_t* not_finite = nullptr);
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;
  // Waits for the GPU. REQUIRES: no step is open.
  ~CudaWorkspace();

  // Changes when a buffer has grown: graphs captured before hold addresses that are gone.
  uint64_t generation() const { return memory_.generation(); }
  // How many repeated calls of engines that capture none are graphs (repeated_call.h).
  int call_graphs() { return graphs_.calls(generation()); }

  // Null: of selector full, of codec raw.
  CudaSelector* SelectorOf(const Plan& plan) const {
    return selectors_[static_cast<size_t>(plan.selector)].get();
  }
  CudaCodec* CodecOf(const Plan& plan) const {
    return codecs_[static_cast<size_t>(plan.codec)].get();
  }

 private:
  friend class CudaFrame;
  friend class CudaStep;

  // New tokens of a member that are queries of attend_raw, each by itself; more are a chunk.
  static constexpr int32_t kItemsOfMember = 8;

  // Makes all memory large enough for a step of these parts. Not under capture.
  Status Fit(const CudaFrame& frame, std::span<const CudaPart> parts);
  // What the driver itself needs of it.
  Status FitRows(const CudaFrame& frame);

  const Geometry geometry_;
  const int32_t reserve_tokens_;
  uint32_t* const not_finite_;
  bool in_step_ = false;
  StepMemory memory_;
  const std::vector<std::unique_ptr<CudaCodec>> codecs_;        // by CodecKind
  const std::vector<std::unique_ptr<CudaSelector>> selectors_;  // by SelectorKind
  CudaIndex index_;
  CudaHostPages host_pages_;
  CudaTensors tensors_;
  CudaGraphs graphs_;

  const StepMemory::Column lengths_;  // tokens
  const StepMemory::Column words_;    // StepMember::not_finite_word
  WordTable pages_;                   // addresses, by member
  int32_t chunk_ = 0;                 // new tokens of a launch of attend_chunk
  DeviceBuffer attend_counters_;  // for attend_chunk, attend_packed, attend_planes, attend_spans
  DeviceBuffer attend_workspace_, chunk_workspace_;
};

}  // namespace kvstrata
