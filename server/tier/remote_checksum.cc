// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote_checksum.h"

#include <bit>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvstrata::remote {
namespace {

XXH128_hash_t HashOf(std::span<const std::span<const std::byte>> parts) {
  if (parts.size() == 1) return XXH3_128bits(parts[0].data(), parts[0].size());
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const std::span<const std::byte> part : parts) {
    XXH3_128bits_update(&state, part.data(), part.size());
  }
  return XXH3_128bits_digest(&state);
}

}  // namespace

Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, HashOf(parts));
  return std::bit_cast<Checksum>(canonical);
}

}  // namespace kvstrata::remote
