// Makes kPackedSegment extents: rows packed with given plans, or neighbouring temporary extents
// joined without touching a row. Private to kernels/codec.
#ifndef KVSTRATA_KERNELS_CODEC_PACKED_WRITER_H_
#define KVSTRATA_KERNELS_CODEC_PACKED_WRITER_H_

#include <span>
#include <vector>

#include "kernels/codec/packed_plans.h"

namespace kvstrata {

// What is to be packed: `info` says where the segment and its plans are, and `info.loss` what the
// segment's rows before these have lost. A temporary extent is one flush.
struct PackedRange {
  Run tokens;
  bool final = false;
  PackedInfo info = {};
};

struct PackedBytes {
  std::vector<std::byte> bytes;
  PackedInfo info = {};  // with `loss` up to the end of these rows
};

// ABORTED when cancelled; FAILED_PRECONDITION when raw rows are missing. Parallel over heads.
// `recent` of what came before these rows: what closing by drift averages over (temporary only).
Result<PackedBytes> PackRange(const RecompressInput& input, const Geometry& geometry,
                              const Plan& plan, const SegmentPlans& plans, const PackedRange& range,
                              std::span<const double> recent);

// Extents of one temporary segment that follow each other, as one.
std::vector<std::byte> JoinPieces(const Geometry& geometry, std::span<const PackedExtent> pieces);

// Packed bytes of a token with its share of the block keys, all heads together, rounded up.
int64_t PackedBytesPerToken(const Geometry& geometry, const Plan& plan, const SegmentPlans& plans);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_PACKED_WRITER_H_
