// SPDX-License-Identifier: Apache-2.0
// Checksums of what leaves this process's memory, on disk and on other machines: XXH3, by the
// widest vectors that the CPU has. They find what broke, not who forged it.
//
// Pure functions, any thread. Cost on a Xeon's core, out of a cache and out of memory: with AVX-512
// 31 and 10 GB/s, with AVX2 24 and 9, else 9 and 8.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace kvstrata {

// XXH3-128 in canonical order (big-endian).
using Checksum = std::array<uint8_t, 16>;

Checksum ChecksumOf(std::span<const std::byte> bytes);
// That of their concatenation, however it is cut.
Checksum ChecksumOf(std::span<const std::span<const std::byte>> parts);

// XXH3-64, as extents have it (docs/extents.md).
uint64_t ShortChecksumOf(std::span<const std::byte> bytes);

// The same. Hands on piece by piece what is summed, in order: whoever copies it reads from a cache.
uint64_t ShortChecksumOf(std::span<const std::byte> bytes,
                         const std::function<void(std::span<const std::byte>)>& piece);

}  // namespace kvstrata
