// SPDX-License-Identifier: Apache-2.0
// CudaVoteCache: TokenSelect's selection cache of one sequence on a GPU, what VoteSelector keeps on
// a CPU: of each layer the query and the tokens of the last re-selection (op reuse knows the
// layout). Kernels of the sequence's steps read and write it; it goes with the sequence, whatever
// batch, workspace or stream that is in.
//
// A fork shares it: from then on nobody writes it, and who steps next, parent or child, takes a
// copy of his own (CudaStep::Begin).
//
// Cost: 2 * layers * (4 * query_heads * head_dim + 4 * k) bytes: 1.6 MB with Llama-3.1-8B; one
// allocation, in the first step that selects.
#ifndef KVSTRATA_KERNELS_PLANS_TOKENSELECT_CUDA_VOTE_CACHE_H_
#define KVSTRATA_KERNELS_PLANS_TOKENSELECT_CUDA_VOTE_CACHE_H_

#include <atomic>
#include <memory>
#include <string>

#include "kernels/cuda/device_buffer.h"
#include "kernels/select/cuda_history.h"

namespace kvstrata {

struct CudaVoteCache final : CudaHistory, std::enable_shared_from_this<CudaVoteCache> {
  std::shared_ptr<CudaHistory> Fork() override {
    shared = true;
    return shared_from_this();
  }
  bool Truncate(int32_t) override { return false; }
  std::string StatusText(const Plan&, const SelectContext&) const override { return ""; }

  DeviceBuffer memory;
  std::atomic<bool> shared = false;  // forked: read only
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLANS_TOKENSELECT_CUDA_VOTE_CACHE_H_
