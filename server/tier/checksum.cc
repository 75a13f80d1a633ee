// SPDX-License-Identifier: Apache-2.0
#include "server/tier/checksum.h"

#include <bit>

// Debian's library for x86 chooses among its vector kernels when it runs, under names that this
// header gives to the plain functions. Elsewhere the compiler's target decides.
#define XXH_STATIC_LINKING_ONLY  // the state, without its allocation
#ifdef KVS_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace kvstrata {
namespace {

#ifdef KVS_XXHASH_DISPATCH
// The library's kernels leave upper halves of vector registers in use. What comes next in the
// thread and uses lower halves alone, as OpenSSL's digests, is slower until they are not.
[[gnu::target("avx")]] void ClearUpperHalves() { __builtin_ia32_vzeroupper(); }
#endif

Checksum Canonical(XXH128_hash_t hash) {
#ifdef KVS_XXHASH_DISPATCH
  if (__builtin_cpu_supports("avx")) ClearUpperHalves();
#endif
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::bit_cast<Checksum>(canonical);
}

}  // namespace

Checksum ChecksumOf(std::span<const std::byte> bytes) {
  return Canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts) {
  if (parts.size() == 1) return ChecksumOf(parts[0]);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const std::span<const std::byte> part : parts) {
    XXH3_128bits_update(&state, part.data(), part.size());
  }
  return Canonical(XXH3_128bits_digest(&state));
}

}  // namespace kvstrata
