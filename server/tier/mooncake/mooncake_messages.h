// SPDX-License-Identifier: Apache-2.0
// What the daemon and its Mooncake agent send each other over a SOCK_SEQPACKET (docs/mooncake.md,
// "Messages"): a batch is one message, its answer another, in any order. Little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvstrata::mooncake {

static_assert(std::endian::native == std::endian::little);

enum class Kind : uint32_t {
  kReady = 0,   // the agent's first message; its `call` is kVersion
  kExist = 1,   // 1: it is there, 0: it is not
  kGet = 2,     // its bytes, which are at `offset` then
  kPut = 3,     // 0; what is there stays as it is
  kRemove = 4,  // 0
};
inline constexpr uint64_t kVersion = 1;
inline constexpr size_t kMostEntries = 512;
inline constexpr size_t kNameBytes = 64;  // behind a name zeros

struct Request {
  Kind kind;
  uint32_t entries;
  uint64_t call;
  int64_t deadline_ns;  // by CLOCK_MONOTONIC; what has not begun by then answers kLate
};
struct RequestEntry {
  uint64_t offset, bytes;  // in the memory that both have
  char name[kNameBytes];
};
struct Reply {
  Kind kind;
  uint32_t entries;
  uint64_t call;
  // An int64_t for each entry follows: not negative, or one of the codes below, or another.
};
static_assert(sizeof(Request) == 24 && sizeof(RequestEntry) == 80 && sizeof(Reply) == 16);

// Codes of Mooncake's, and two of the agent's.
inline constexpr int64_t kNoRoom = -200, kTooSmall = -600, kNotWhole = -703, kMiss = -704;
inline constexpr int64_t kLate = -1'000'001, kFailed = -1'000'002;

}  // namespace kvstrata::mooncake
