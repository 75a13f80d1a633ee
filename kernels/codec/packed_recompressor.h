// The writing side of codec packed (spec/mosaickv.md, "Growing"). Private to kernels/codec.
#ifndef KVSTRATA_KERNELS_CODEC_PACKED_RECOMPRESSOR_H_
#define KVSTRATA_KERNELS_CODEC_PACKED_RECOMPRESSOR_H_

#include <memory>

#include "kernels/codec/codec.h"

namespace kvstrata {

// What an extent may weigh, unless 64 tokens weigh more: an arena must have room for it, and a
// worker holds one at a time. A longer segment is several extents.
inline constexpr int64_t kPackedExtentBytes = int64_t{128} << 20;

std::unique_ptr<Recompressor> NewPackedRecompressor(const Plan& plan, const Geometry& geometry,
                                                    int64_t extent_bytes = kPackedExtentBytes);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_PACKED_RECOMPRESSOR_H_
