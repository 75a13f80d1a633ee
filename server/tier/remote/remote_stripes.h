// SPDX-License-Identifier: Apache-2.0
// How a value is cut for a remote tier (docs/remote_format.md, "Stripes"): the bytes of its buffers
// behind each other, every 4 MiB a stripe of its own, the last one shorter.
//
// Thread-safety: pure functions. Cost: a look at each buffer; StripeParts allocates its list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace kvstrata::remote {

inline constexpr uint64_t kStripeBytes = uint64_t{4} << 20;
inline constexpr uint64_t kMaxValueBytes = uint64_t{4} << 30;

// Bytes of all buffers. Saturates: sizes that a peer names may add up to more than 64 bits.
inline uint64_t BytesOf(std::span<const uint64_t> sizes) {
  uint64_t bytes = 0;
  for (const uint64_t size : sizes) bytes = bytes + size < bytes ? ~uint64_t{0} : bytes + size;
  return bytes;
}

// At least 1. REQUIRES: at most kMaxValueBytes.
inline uint32_t StripesOf(uint64_t value_bytes) {
  const uint64_t stripes = (value_bytes + kStripeBytes - 1) / kStripeBytes;
  return static_cast<uint32_t>(std::max<uint64_t>(stripes, 1));
}

// Bytes of the value that stripe `stripe` has. REQUIRES: stripe < StripesOf(value_bytes).
inline uint64_t StripeBytes(uint64_t value_bytes, uint32_t stripe) {
  return std::min(kStripeBytes, value_bytes - stripe * kStripeBytes);
}

// Where that stripe lies in the buffers, in order. Byte: std::byte or const std::byte.
template <typename Byte>
std::vector<std::span<Byte>> StripeParts(std::span<const std::span<Byte>> buffers,
                                         uint32_t stripe) {
  std::vector<std::span<Byte>> parts;
  uint64_t skip = stripe * kStripeBytes, left = kStripeBytes;
  for (std::span<Byte> buffer : buffers) {
    const uint64_t before = std::min<uint64_t>(skip, buffer.size());
    const uint64_t here = std::min<uint64_t>(left, buffer.size() - before);
    if (here > 0) parts.push_back(buffer.subspan(before, here));
    skip -= before;
    left -= here;
  }
  return parts;
}

}  // namespace kvstrata::remote
