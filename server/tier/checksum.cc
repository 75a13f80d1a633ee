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

Checksum Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::bit_cast<Checksum>(canonical);
}

}  // namespace

struct RunningChecksum::State {
  XXH3_state_t xxh;
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {}
RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::Begin() { XXH3_128bits_reset(&state_->xxh); }

void RunningChecksum::Add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->xxh, bytes.data(), bytes.size());
}

Checksum RunningChecksum::Value() const { return Canonical(XXH3_128bits_digest(&state_->xxh)); }

Checksum ChecksumOf(std::span<const std::byte> bytes) {
  return Canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts) {
  if (parts.size() == 1) return ChecksumOf(parts[0]);
  RunningChecksum sum;
  sum.Begin();
  for (const std::span<const std::byte> part : parts) sum.Add(part);
  return sum.Value();
}

}  // namespace kvstrata
