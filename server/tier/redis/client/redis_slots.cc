// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_slots.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

namespace kvstrata::redis {
namespace {

constexpr std::array<uint16_t, 256> CrcTable() {
  std::array<uint16_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? crc << 1 ^ 0x1021 : crc << 1;
    table[byte] = static_cast<uint16_t>(crc);
  }
  return table;
}
constexpr std::array<uint16_t, 256> kCrc = CrcTable();
constexpr uint16_t kDefaultPort = 6379;

template <typename T>
bool ParseNumber(std::string_view text, T* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

Status NoSlots(const std::string& what) {
  return Unavailable("REDIS_PROTOCOL", "CLUSTER SLOTS: " + what);
}

bool IsSlot(const RespReply& reply) {
  return reply.kind == RespReply::Kind::kInteger && reply.integer >= 0 && reply.integer < kSlots;
}

// [address, port, id, ...]; an empty or missing address is that of whoever was asked.
std::optional<RedisAddress> ServerOf(const RespReply& reply, const RedisAddress& asked) {
  using Kind = RespReply::Kind;
  if (reply.kind != Kind::kList || reply.items.size() < 2) return std::nullopt;
  const RespReply &host = reply.items[0], &port = reply.items[1];
  if (host.kind != Kind::kBulk && host.kind != Kind::kNone) return std::nullopt;
  if (port.kind != Kind::kInteger || port.integer < 1 || port.integer > 65535) return std::nullopt;
  const bool same = host.text.empty() || host.text == "?";
  return RedisAddress{same ? asked.host : host.text, static_cast<uint16_t>(port.integer)};
}

}  // namespace

uint16_t SlotOf(std::string_view name) {
  if (const size_t open = name.find('{'); open != std::string_view::npos) {
    const size_t close = name.find('}', open + 1);
    if (close != std::string_view::npos && close > open + 1) {
      name = name.substr(open + 1, close - open - 1);
    }
  }
  uint16_t crc = 0;
  for (const char c : name) {
    crc = static_cast<uint16_t>(crc << 8 ^ kCrc[(crc >> 8 ^ static_cast<uint8_t>(c)) & 0xFF]);
  }
  return crc % kSlots;
}

std::string RedisAddress::ToString() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Result<RedisAddress> ParseRedisAddress(std::string_view text) {
  std::string_view host = text, port;
  if (const size_t close = text.rfind(']'); text.starts_with('[') && close != text.npos) {
    host = text.substr(1, close - 1);
    port = text.substr(close + 1);
  } else if (const size_t colon = text.rfind(':'); colon != text.npos) {
    // MOVED writes an address of IPv6 without brackets.
    host = text.substr(0, colon);
    port = text.substr(colon);
  }
  RedisAddress address{std::string(host), kDefaultPort};
  const bool sound =
      port.empty() || (port.starts_with(':') && ParseNumber(port.substr(1), &address.port));
  if (!sound || host.empty() || host.size() > 255 || address.port == 0) {
    return InvalidArgument("REDIS_ADDRESS", "server '" + std::string(text.substr(0, 300)) +
                                                "' is no HOST:PORT; write 10.0.0.7:6379");
  }
  return address;
}

SlotMap SlotMap::Single(const RedisAddress& server) {
  SlotMap map;
  map.shards.push_back({server, {}});
  map.shard_of.fill(0);
  return map;
}

Result<SlotMap> SlotMap::Parse(const RespReply& slots, const RedisAddress& asked) {
  if (slots.kind != RespReply::Kind::kList) return NoSlots("no list");
  SlotMap map;
  map.clustered = true;
  std::map<RedisAddress, uint16_t> by_master;
  for (const RespReply& range : slots.items) {
    if (range.items.size() < 3 || !IsSlot(range.items[0]) || !IsSlot(range.items[1])) {
      return NoSlots("a range without slots or servers");
    }
    const std::optional<RedisAddress> master = ServerOf(range.items[2], asked);
    if (!master) return NoSlots("a master without an address");
    const auto [it, added] = by_master.emplace(*master, static_cast<uint16_t>(map.shards.size()));
    if (added) map.shards.push_back({*master, {}});
    RedisShard& shard = map.shards[it->second];
    for (size_t i = 3; i < range.items.size(); ++i) {
      const std::optional<RedisAddress> replica = ServerOf(range.items[i], asked);
      if (!replica || std::ranges::count(shard.replicas, *replica) != 0) continue;
      shard.replicas.push_back(*replica);
    }
    for (int64_t slot = range.items[0].integer; slot <= range.items[1].integer; ++slot) {
      map.shard_of[static_cast<size_t>(slot)] = it->second;
    }
  }
  if (map.shards.size() >= kNobody) return NoSlots("too many shards");
  return map;
}

const RedisShard* SlotMap::Find(uint16_t slot) const {
  const uint16_t shard = shard_of[slot % kSlots];
  return shard < shards.size() ? &shards[shard] : nullptr;
}

std::optional<Redirection> RedirectionOf(const RespReply& reply, const RedisAddress& asked) {
  const bool ask = ErrorIs(reply, "ASK");
  if (!ask && !ErrorIs(reply, "MOVED")) return std::nullopt;
  std::string_view rest = reply.text;
  rest.remove_prefix(ask ? 4 : 6);
  const size_t space = rest.find(' ');
  Redirection to;
  to.ask = ask;
  if (space == std::string_view::npos || !ParseNumber(rest.substr(0, space), &to.slot) ||
      to.slot >= kSlots) {
    return std::nullopt;
  }
  const std::string_view text = rest.substr(space + 1);
  Result<RedisAddress> address =
      ParseRedisAddress(text.rfind(':') == 0 ? asked.host + std::string(text) : std::string(text));
  if (!address.ok()) return std::nullopt;
  to.to = std::move(*address);
  return to;
}

}  // namespace kvstrata::redis
