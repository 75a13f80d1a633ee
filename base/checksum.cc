// SPDX-License-Identifier: Apache-2.0
#include "base/checksum.h"

#include <algorithm>
#include <bit>

#include "base/checksum_kernels.h"

namespace kvstrata {
namespace {

constexpr size_t kPiece = size_t{512} << 10;  // a part of a core's own cache

constexpr ChecksumKernels kBaseline = {XXH3_64bits,  XXH3_64bits_update,  XXH3_64bits_digest,
                                       XXH3_128bits, XXH3_128bits_update, XXH3_128bits_digest};

const ChecksumKernels& Kernels() {
#ifdef __x86_64__
  static const ChecksumKernels& widest = __builtin_cpu_supports("avx512f") ? kAvx512Checksums
                                         : __builtin_cpu_supports("avx2")  ? kAvx2Checksums
                                                                           : kBaseline;
  return widest;
#else
  return kBaseline;  // which has what the compiler's target has
#endif
}

Checksum Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::bit_cast<Checksum>(canonical);
}

}  // namespace

Checksum ChecksumOf(std::span<const std::byte> bytes) {
  return Canonical(Kernels().sum128(bytes.data(), bytes.size()));
}

Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts) {
  if (parts.size() == 1) return ChecksumOf(parts[0]);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const std::span<const std::byte> part : parts) {
    Kernels().update128(&state, part.data(), part.size());
  }
  return Canonical(Kernels().digest128(&state));
}

uint64_t ShortChecksumOf(std::span<const std::byte> bytes) {
  return Kernels().sum64(bytes.data(), bytes.size());
}

uint64_t ShortChecksumOf(std::span<const std::byte> bytes,
                         const std::function<void(std::span<const std::byte>)>& piece) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  while (!bytes.empty()) {
    const auto next = bytes.first(std::min(bytes.size(), kPiece));
    Kernels().update64(&state, next.data(), next.size());
    piece(next);
    bytes = bytes.subspan(next.size());
  }
  return Kernels().digest64(&state);
}

}  // namespace kvstrata
