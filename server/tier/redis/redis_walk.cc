// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::Walk: SCAN of one master after the other, and the headers of what it names.
//
// A SCAN may name more than was asked for. Names go out in the order of a hash, and the walk's
// cursor says where the next call goes on: shard (8 bits), the first hash that has not been (16),
// the server's cursor (40), with which the same names come again.
#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "server/tier/redis/redis_calls.h"

namespace kvstrata {
namespace {

using redis::Lane;
using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;

struct Place {
  uint64_t shard = 0, hash = 0, scan = 0;

  static Place Of(uint64_t cursor) {
    return {cursor >> 56, cursor >> 40 & 0xFFFF, cursor & 0xFFFFFFFFFF};
  }
  uint64_t cursor() const { return shard << 56 | hash << 40 | scan; }
};

uint64_t HashOf(std::string_view name) {  // FNV-1a, folded
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return (hash >> 48 ^ hash) & 0xFFFF;
}

class RedisWalk {
 public:
  RedisWalk(RedisTierParts* parts, TierWalk* walk, const TierCall& call)
      : parts_(*parts),
        walk_(*walk),
        call_(call),
        ops_(parts->threads.get(), call.cancel),
        at_(Place::Of(walk->cursor)) {}

  // Asks the shard that is next, without those that do not answer.
  Status Run() {
    for (;; at_ = {at_.shard + 1, 0, 0}) {
      const auto map = parts_.threads->client().Topology();
      if (map == nullptr) {
        return Unavailable("REDIS_DOWN", "no server of the cluster has answered yet");
      }
      if (at_.shard >= map->shards.size()) {
        walk_.cursor = kWalkEnd;
        return OkStatus();
      }
      const std::string most = std::to_string(std::max<size_t>(walk_.most, 1));
      RedisOp scan = Ask(map->shards[at_.shard].master,
                         RedisRequest({"SCAN", std::to_string(at_.scan), "MATCH",
                                       remote::kFirstStripes, "COUNT", most}));
      const bool stopped = scan.status.reason() == TierStopped().reason();
      if (scan.status.code() == Code::kUnavailable && !stopped) continue;
      KVS_RETURN_IF_ERROR(scan.status);
      if (scan.replies.front().kind != RespReply::Kind::kError)
        return Take(scan, map->shards.size());
    }
  }

 private:
  RedisOp Ask(const redis::RedisAddress& server, RedisRequest request) {
    auto op = NewRedisOp(Lane::kProbe, "", call_, std::move(request));
    op->at = server;
    return ops_.Ask(std::move(op));
  }

  // [cursor, [names]]
  Status Take(RedisOp& scan, size_t shards) {
    RespReply& reply = scan.replies.front();
    uint64_t next = 0;
    const bool sound = reply.items.size() == 2 && reply.items[1].kind == RespReply::Kind::kList;
    if (sound) {
      const std::string& text = reply.items[0].text;
      (void)std::from_chars(text.data(), text.data() + text.size(), next);
    }
    if (!sound || next >> 40 != 0) {
      return Unavailable("REDIS_PROTOCOL", "SCAN: no cursor and names");
    }
    Place next_place;
    RedisRequest request;
    for (const std::string& name : Choose(&reply.items[1].items, next, &next_place)) {
      AddHeaderCommand(name, &request);
    }
    if (request.commands() != 0) {
      const RedisOp headers = Ask(scan.answered_by, std::move(request));
      KVS_RETURN_IF_ERROR(headers.status);
      Add(headers.replies);
    }
    walk_.cursor = next_place.shard >= shards ? kWalkEnd : next_place.cursor();
    return OkStatus();
  }

  // The names that go out now, and where the next call goes on.
  std::vector<std::string> Choose(std::vector<RespReply>* found, uint64_t next_scan, Place* next) {
    std::vector<std::pair<uint64_t, std::string>> named;
    for (RespReply& name : *found) {
      const uint64_t hash = HashOf(name.text);
      if (hash >= at_.hash) named.emplace_back(hash, std::move(name.text));
    }
    std::ranges::sort(named);
    size_t taken = std::min(std::max<size_t>(walk_.most, 1), named.size());
    while (taken < named.size() && named[taken].first == named[taken - 1].first) ++taken;
    if (taken < named.size()) {
      *next = {at_.shard, named[taken].first, at_.scan};
    } else if (next_scan != 0) {
      *next = {at_.shard, 0, next_scan};
    } else {
      *next = {at_.shard + 1, 0, 0};
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < taken; ++i) names.push_back(std::move(named[i].second));
    return names;
  }

  void Add(const std::vector<RespReply>& headers) {
    for (const RespReply& reply : headers) {
      if (reply.kind != RespReply::Kind::kBulk) continue;
      Result<remote::RemoteHead> head = parts_.format.Inspect(std::as_bytes(std::span(reply.text)),
                                                              std::chrono::system_clock::now());
      if (!head.ok() || head->stripe != 0) continue;  // another tenant's, or left meanwhile
      const auto sizes = head->sizes.all();
      walk_.values.push_back({std::move(head->key), {sizes.begin(), sizes.end()}});
    }
  }

  RedisTierParts& parts_;
  TierWalk& walk_;
  const TierCall& call_;
  RedisOps ops_;
  Place at_;
};

}  // namespace

void RedisValueTier::Walk(TierWalk* walk, TierCall call) {
  walk->values.clear();
  walk->status = WhyNotNow(call);
  if (walk->status.ok() && !call.waits) {
    return MakeLater(parts_, this, walk, std::move(call), &RedisValueTier::Walk);
  }
  if (walk->status.ok()) walk->status = RedisWalk(parts_.get(), walk, call).Run();
  call.done();
}

}  // namespace kvstrata
