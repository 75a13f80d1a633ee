// SPDX-License-Identifier: Apache-2.0
// What may come of a remote tier instead of what was put, and a battery of such attacks, each with
// the guard that stands against it (docs/remote_format.md, "What guards what").
#pragma once

#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "server/tier/guard.h"
#include "server/tier/remote/remote_format.h"

namespace kvstrata::remote {

// KVS_TEST_SEED, or a fresh one; prints it.
uint32_t TestSeed();

inline constexpr std::string_view kTestSecret = "0123456789abcdef0123456789abcdef";
inline WallTime At(uint64_t seconds) { return WallTime(std::chrono::seconds(seconds)); }
inline const WallTime kNow = At(1700000000);

RemoteFormat TestFormat(Seal seal, std::string_view tenant = "uid:1000",
                        std::string_view secret = kTestSecret);

// Digits of what is bytes.
template <typename Bytes>
std::string ToHex(const Bytes& bytes) {
  std::string hex;
  for (const auto byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(byte) & 255);
    hex += two;
  }
  return hex;
}

using Buffers = std::vector<std::vector<std::byte>>;
Buffers RandomBuffers(std::mt19937_64* random, const std::vector<uint64_t>& sizes);

// An object of the servers': header and bytes.
using Object = std::vector<std::byte>;
std::vector<Object> Put(const RemoteFormat& format, std::string_view key, const Buffers& buffers,
                        WallTime now = kNow);
// Into buffers of those sizes, all 0xEE before. OK: `*got` is what came.
Status Get(const RemoteFormat& format, std::string_view key, const std::vector<uint64_t>& sizes,
           std::span<const Object> objects, Buffers* got, WallTime now = kNow);

struct Attack {
  const char* name;
  Guard guard;
  const char* reason;
  std::vector<Seal> seals;  // for which that guard is what stands against it
  // What a get of what came says. OK: it succeeded.
  Status (*of)(Seal seal, std::mt19937_64* random);
};
std::span<const Attack> Attacks();

}  // namespace kvstrata::remote
