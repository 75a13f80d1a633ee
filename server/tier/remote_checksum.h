// SPDX-License-Identifier: Apache-2.0
// XXH3-128, canonical order (big-endian), of bytes that lie in several places: equal to that of
// their concatenation, however they are cut.
//
// Pure function, any thread. Cost: memory speed; one place alone is some faster than several.
#ifndef KVSTRATA_SERVER_TIER_REMOTE_CHECKSUM_H_
#define KVSTRATA_SERVER_TIER_REMOTE_CHECKSUM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvstrata::remote {

using Checksum = std::array<uint8_t, 16>;

Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts);

}  // namespace kvstrata::remote

#endif  // KVSTRATA_SERVER_TIER_REMOTE_CHECKSUM_H_
