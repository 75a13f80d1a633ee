// VoteBuffers: what a workspace keeps for selector vote (TokenSelect): votes of every token, the
// scratch that they take, lists of a step's selections. Private to CudaWorkspace and CudaStep.
//
// Threads, growth and addresses as CudaWorkspace. Cost: of each sequence that one launch serves, 2
// bytes a token and query head, and 4 a token.
#ifndef KVSTRATA_KERNELS_STEP_VOTE_BUFFERS_H_
#define KVSTRATA_KERNELS_STEP_VOTE_BUFFERS_H_

#include "kernels/cuda/device_buffer.h"
#include "kernels/page_view.h"

namespace kvstrata {

struct VoteBuffers {
  struct Capacity {
    int32_t batch = 0;   // sequences that one launch serves
    int32_t lists = 0;   // of a step: one a decoding sequence, one a prompt chunk
    int32_t tokens = 0;  // of a sequence: its candidates
    int32_t chunk_lists =
        0;  // entries of a prompt chunk's list; a sequence has its own in its cache
    bool operator==(const Capacity&) const = default;

    // Room for this and for `need`, generously where sequences grow.
    Capacity Grown(const Capacity& need) const;
  };

  Status Fit(const cuda::CudaOps& ops, const Geometry& geometry, const Capacity& c);

  // Of one launch.
  DeviceBuffer votes;    // float [batch][tokens]
  DeviceBuffer scratch;  // of op vote
  DeviceBuffer pick;     // scratch of op pick
  DeviceBuffer mean;     // float [query_heads][head_dim], of a prompt chunk
  // By list: what op reuse writes, and the selection.
  DeviceBuffer voting, lists, counts, sink_end, recent_begin;
  DeviceBuffer units;  // int32_t [lists][chunk_lists]
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_VOTE_BUFFERS_H_
