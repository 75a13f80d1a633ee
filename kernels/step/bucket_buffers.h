// BucketBuffers: what a workspace keeps for selector bucket (SentenceKV): lists of a step's
// selections, and what the end of a prompt takes. Private to CudaWorkspace and CudaStep.
//
// Threads and addresses as CudaWorkspace; what a prompt's end takes no graph knows. Cost: 4 * tau
// bytes a sequence and KV head; at the end of a prompt up to kVoteBytes, and 8 a token and KV head.
#ifndef KVSTRATA_KERNELS_STEP_BUCKET_BUFFERS_H_
#define KVSTRATA_KERNELS_STEP_BUCKET_BUFFERS_H_

#include "kernels/cuda/device_buffer.h"
#include "kernels/page_view.h"

namespace kvstrata {

struct BucketBuffers {
  // Votes of several queries at a time, with the scratch that they take; one query may take more.
  static constexpr int64_t kVoteBytes = int64_t{256} << 20;
  static constexpr int32_t kMostItems = 32;  // queries at a time

  // Lists of `tau` tokens for `members` sequences.
  Status Fit(const cuda::CudaOps& ops, const Geometry& geometry, int32_t members, int32_t tau);
  // For a prompt of `tokens`. May wait for the GPU.
  Status FitPrompt(const cuda::CudaOps& ops, const Geometry& geometry, int32_t tokens);

  // A DeviceSelection, and the counters of op pick_buckets.
  DeviceBuffer units, counts, counters;

  int32_t stride = 0, items = 0;  // of the prompt's arrays
  DeviceBuffer votes;             // float [items][kv_heads][stride]
  DeviceBuffer scratch;           // of op vote
  DeviceBuffer sums, importance;  // float [kv_heads][stride]
  DeviceBuffer pick;              // scratch of op pick
  DeviceBuffer picked;            // int32_t [kv_heads + 2], what op pick says of its lists
  DeviceBuffer ints;              // sentence ends, lengths
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_BUCKET_BUFFERS_H_
