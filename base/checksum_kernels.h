// SPDX-License-Identifier: Apache-2.0
// ChecksumKernels: XXH3 as one instruction set computes it. A source that includes this compiles
// all of xxhash.h for the target that its own options name (base/CMakeLists.txt), so public
// functions of the library are enough. Such a source includes nothing else: the linker would take
// inline functions of other headers from any source, for CPUs that lack the instructions, too.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvstrata {

struct ChecksumKernels {
  decltype(&XXH3_64bits) sum64;
  decltype(&XXH3_64bits_update) update64;
  decltype(&XXH3_64bits_digest) digest64;
  decltype(&XXH3_128bits) sum128;
  decltype(&XXH3_128bits_update) update128;
  decltype(&XXH3_128bits_digest) digest128;
};

// For CPUs that have AVX2, and AVX-512F.
extern const ChecksumKernels kAvx2Checksums, kAvx512Checksums;

}  // namespace kvstrata
