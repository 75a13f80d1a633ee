// PackedBuffers: what a workspace keeps for selector block over codec packed (MosaicKV): scores and
// lists of blocks, partials of the raw rows, scratch. Private to CudaWorkspace and CudaStep.
//
// Threads, growth and addresses as CudaWorkspace. Cost: 4 bytes a block and KV head of each
// sequence, as much again for each block that may be chosen, and about 2 MB.
#ifndef KVSTRATA_KERNELS_STEP_PACKED_BUFFERS_H_
#define KVSTRATA_KERNELS_STEP_PACKED_BUFFERS_H_

#include "kernels/cuda/device_buffer.h"
#include "kernels/page_view.h"

namespace kvstrata {

struct PackedBuffers {
  // Extents that ops attend_packed and score_packed take of a sequence.
  static constexpr int32_t kSegmentsMax = 512;
  // Pieces that an open segment has, now more, now fewer: 7 each of 1, 8, 64 and 512 flushes.
  static constexpr int32_t kPiecesMax = 28;
  // Room for a sequence with `extents` of them, `final` of which stay: flushes and joins between
  // final segments make no graph stale.
  static int32_t SegmentsFor(int32_t final, int32_t extents);

  struct Capacity {
    int32_t batch = 0;     // sequences of a step
    int32_t segments = 0;  // extents of a sequence
    int32_t blocks = 0;    // of a KV head in all of them
    int32_t list = 0;      // blocks that are chosen of them
    int32_t keep = 0;      // elements of a vector, at most
    bool operator==(const Capacity&) const = default;

    // Room for this and for `need`, generously where sequences grow.
    Capacity Grown(const Capacity& need) const;
  };

  Status Fit(const cuda::CudaOps& ops, const Geometry& geometry, const Capacity& c);
  // uint64_t words of a sequence's segments in one layer.
  static int32_t SegmentWords(const Geometry& geometry, const Capacity& c) {
    return c.segments * geometry.kv_heads * static_cast<int32_t>(sizeof(cuda::PackedSegment) / 8);
  }

  DeviceBuffer scores;                                 // float [batch][kv_heads][blocks]
  DeviceBuffer units, counts, sink_end, recent_begin;  // a DeviceSelection of blocks
  DeviceBuffer pick;                                   // scratch of op pick
  DeviceBuffer partial;                                // m, l, o of the raw rows
  DeviceBuffer workspace;                              // of op attend_packed
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_PACKED_BUFFERS_H_
