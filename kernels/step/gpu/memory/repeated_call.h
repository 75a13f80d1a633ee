// SPDX-License-Identifier: Apache-2.0
// RepeatedCall: a call of Select or Attend for one layer, outside of the engine's graphs, that
// comes again and again (cuda_step.h).
//
// A launch costs the CPU about 3 us, and a call that selects makes up to four. What it enqueues
// stays the same from step to step as long as shape, tensors and the workspace's buffers do: when a
// call has come kSeen times alike, what it enqueues is captured as a small graph, which costs the
// CPU about 0.1 ms once, and is launched as one from then on. A call of one kernel is left as it
// is.
//
// Ownership: borrows the table of ops, owns the graph. Threads: one call at a time. The device is
// the one that is current in Run.
#pragma once

#include <cstdint>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

class RepeatedCall {
 public:
  // What a graph of the call depends on besides its layer and the step's shape.
  struct Tensors {
    const void *q = nullptr, *out = nullptr, *lse = nullptr;
    int64_t q_strides[2] = {}, out_strides[2] = {};
    DType q_dtype = DType::kBF16, out_dtype = DType::kBF16;
    bool operator==(const Tensors&) const = default;
  };
  static constexpr int kSeen = 3;

  RepeatedCall() = default;
  RepeatedCall(RepeatedCall&& other) noexcept;
  RepeatedCall& operator=(RepeatedCall&&) = delete;
  ~RepeatedCall() { Drop(); }

  // Does on *stream what enqueue() does, which enqueues on *stream; what it does besides is left
  // out where a graph is launched. The status of enqueue(), or CUDA_ERROR.
  template <typename Enqueue>
  Status Run(const cuda::CudaOps& ops, const Tensors& tensors, cuda::Stream* stream,
             const Enqueue& enqueue) {
    if (IsDue(ops, tensors)) Capture(stream, enqueue);
    return graph_ == nullptr ? enqueue() : Launch(*stream);
  }
  bool has_graph() const { return graph_ != nullptr; }

 private:
  // Notes the call; whether it is to be captured.
  bool IsDue(const cuda::CudaOps& ops, const Tensors& tensors);
  Status Launch(cuda::Stream stream) const;
  void Drop();
  // Leaves no graph where anything fails: enqueue() by itself then says why.
  template <typename Enqueue>
  void Capture(cuda::Stream* stream, const Enqueue& enqueue) {
    cuda::Stream captured = nullptr;
    if (ops_->begin_capture(&captured) != 0) return;
    std::swap(*stream, captured);
    const bool complete = enqueue().ok();
    std::swap(*stream, captured);
    const bool made = ops_->end_capture(captured, &graph_) == 0;
    if (!complete || !made) Drop();
  }

  const cuda::CudaOps* ops_ = nullptr;
  Tensors tensors_;
  int seen_ = 0;  // times in a row, up to one more than kSeen
  cuda::Graph graph_ = nullptr;
};

}  // namespace kvstrata
