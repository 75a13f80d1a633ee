// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/memory/repeated_call.h"

#include "kernels/cuda/device_buffer.h"

namespace kvstrata {

RepeatedCall::RepeatedCall(RepeatedCall&& other) noexcept
    : ops_(other.ops_),
      tensors_(other.tensors_),
      seen_(other.seen_),
      graph_(std::exchange(other.graph_, nullptr)) {}

bool RepeatedCall::IsDue(const cuda::CudaOps& ops, const Tensors& tensors) {
  ops_ = &ops;
  if (tensors != tensors_) {
    Drop();
    tensors_ = tensors;
    seen_ = 0;
  }
  if (seen_ > kSeen) return false;
  return ++seen_ > kSeen;
}

Status RepeatedCall::Launch(cuda::Stream stream) const {
  return CudaStatus(*ops_, ops_->launch_graph(graph_, stream), "launching the graph of a call");
}

void RepeatedCall::Drop() {
  if (graph_ != nullptr) (void)ops_->destroy_graph(graph_);
  graph_ = nullptr;
}

}  // namespace kvstrata
