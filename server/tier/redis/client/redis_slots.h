// SPDX-License-Identifier: Apache-2.0
// Which servers of a Redis or Valkey cluster have a key: the hash of names, the map that CLUSTER
// SLOTS gives, and what MOVED and ASK say. Thread-safety: values and functions without state.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/tier/redis/client/resp_reader.h"

namespace kvstrata::redis {

inline constexpr uint16_t kSlots = 16384;

// CRC16 (XMODEM) of the name, or of what stands in its first {} if that is not empty.
uint16_t SlotOf(std::string_view name);

struct RedisAddress {
  std::string host;  // a name or an address, without brackets
  uint16_t port = 0;
  std::string ToString() const;  // "host:port", "[::1]:port"
  auto operator<=>(const RedisAddress&) const = default;
};
// "host", "host:port", "[v6]:port"; 6379 where there is no port. Not OK: INVALID_ARGUMENT
// REDIS_ADDRESS.
Result<RedisAddress> ParseRedisAddress(std::string_view text);

// A master and what replicates it.
struct RedisShard {
  RedisAddress master;
  std::vector<RedisAddress> replicas;
};

struct SlotMap {
  static constexpr uint16_t kNobody = 0xFFFF;

  std::vector<RedisShard> shards;  // in the order of their slots
  std::array<uint16_t, kSlots> shard_of;
  bool clustered = false;

  SlotMap() { shard_of.fill(kNobody); }
  // One server that has everything.
  static SlotMap Single(const RedisAddress& server);
  // A reply of CLUSTER SLOTS that `asked` gave, which stands for addresses it leaves empty. Slots
  // that nobody serves stay so. Not OK: UNAVAILABLE REDIS_PROTOCOL.
  static Result<SlotMap> Parse(const RespReply& slots, const RedisAddress& asked);
  const RedisShard* Find(uint16_t slot) const;
};

// "MOVED 3999 127.0.0.1:6381" and "ASK ...".
struct Redirection {
  bool ask = false;
  uint16_t slot = 0;
  RedisAddress to;
};
// Nothing: the reply is no redirection. `asked` as above.
std::optional<Redirection> RedirectionOf(const RespReply& reply, const RedisAddress& asked);

}  // namespace kvstrata::redis
