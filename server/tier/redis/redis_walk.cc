// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::Walk: SCAN of one master after the other, and the headers of what it names.
//
// A SCAN may name more than was asked for. Names go out in the order of a hash, and the walk's
// cursor says where the next call goes on: shard (8 bits), the first hash that has not been (16),
// the server's cursor (40), with which the same names come again.
#include <algorithm>
#include <charconv>
#include <functional>
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

class RedisWalk : public std::enable_shared_from_this<RedisWalk> {
 public:
  RedisWalk(RedisParts parts, TierWalk* walk, TierCall call)
      : parts_(std::move(parts)),
        walk_(*walk),
        at_(Place::Of(walk->cursor)),
        end_(std::make_shared<RedisCallEnd>(parts_, std::move(call), 1)) {}

  // Asks the shard that is next.
  void Begin() {
    const auto map = parts_->threads->client().Topology();
    if (map == nullptr) {
      return End(Unavailable("REDIS_DOWN", "no server of the cluster has answered yet"));
    }
    if (at_.shard >= map->shards.size()) {
      walk_.cursor = kWalkEnd;
      return End(OkStatus());
    }
    const std::string most = std::to_string(std::max<size_t>(walk_.most, 1));
    auto op = NewRedisOp(Lane::kProbe, "", end_->terms(),
                         RedisRequest({"SCAN", std::to_string(at_.scan), "MATCH",
                                       remote::kFirstStripes, "COUNT", most}));
    op->at = map->shards[at_.shard].master;
    op->done = [self = shared_from_this()](RedisOp& ended) { self->Scanned(ended); };
    parts_->threads->client().Submit(std::move(op));
  }

 private:
  // [cursor, [names]]
  void Scanned(RedisOp& op) {
    if (op.status.code() == Code::kUnavailable && op.status.reason() != TierStopped().reason()) {
      return NextShard();
    }
    if (!op.status.ok()) return End(op.status);
    RespReply& reply = op.replies.front();
    if (reply.kind == RespReply::Kind::kError) return NextShard();
    uint64_t next = 0;
    const bool sound = reply.items.size() == 2 && reply.items[1].kind == RespReply::Kind::kList;
    if (sound) {
      const std::string& text = reply.items[0].text;
      (void)std::from_chars(text.data(), text.data() + text.size(), next);
    }
    if (!sound || next >> 40 != 0) {
      return End(Unavailable("REDIS_PROTOCOL", "SCAN: no cursor and names"));
    }
    Choose(&reply.items[1].items, next);
    if (names_.empty()) return Finish();
    RedisRequest request;
    for (const std::string& name : names_) AddHeaderCommand(name, &request);
    auto headers = NewRedisOp(Lane::kProbe, "", end_->terms(), std::move(request));
    headers->at = op.answered_by;
    headers->done = [self = shared_from_this()](RedisOp& ended) { self->Came(ended); };
    parts_->threads->client().Submit(std::move(headers));
  }

  // The names that go out now, and where the next call goes on.
  void Choose(std::vector<RespReply>* found, uint64_t next_scan) {
    std::vector<std::pair<uint64_t, std::string>> named;
    for (RespReply& name : *found) {
      const uint64_t hash = HashOf(name.text);
      if (hash >= at_.hash) named.emplace_back(hash, std::move(name.text));
    }
    std::ranges::sort(named);
    size_t taken = std::min(std::max<size_t>(walk_.most, 1), named.size());
    while (taken < named.size() && named[taken].first == named[taken - 1].first) ++taken;
    next_ = at_;
    if (taken < named.size()) {
      next_.hash = named[taken].first;
    } else if (next_scan != 0) {
      next_ = {at_.shard, 0, next_scan};
    } else {
      next_ = {at_.shard + 1, 0, 0};
    }
    for (size_t i = 0; i < taken; ++i) names_.push_back(std::move(named[i].second));
  }

  void Came(RedisOp& op) {
    if (!op.status.ok()) return End(op.status);
    for (const RespReply& reply : op.replies) {
      if (reply.kind != RespReply::Kind::kBulk) continue;
      Result<remote::RemoteHead> head = parts_->format.Inspect(std::as_bytes(std::span(reply.text)),
                                                               std::chrono::system_clock::now());
      if (!head.ok() || head->stripe != 0) continue;  // another tenant's, or left meanwhile
      const auto sizes = head->sizes.all();
      walk_.values.push_back({std::move(head->key), {sizes.begin(), sizes.end()}});
    }
    Finish();
  }

  void NextShard() {
    at_ = {at_.shard + 1, 0, 0};
    parts_->threads->Later([self = shared_from_this()] { self->Begin(); });
  }
  void Finish() {
    walk_.cursor = next_.cursor();
    const auto map = parts_->threads->client().Topology();
    if (map != nullptr && next_.shard >= map->shards.size()) walk_.cursor = kWalkEnd;
    End(OkStatus());
  }
  void End(Status status) {
    walk_.status = std::move(status);
    parts_->threads->Later([end = end_] { end->Settled(); });
  }

  const RedisParts parts_;
  TierWalk& walk_;
  Place at_, next_;
  const RedisEnd end_;
  std::vector<std::string> names_;
};

}  // namespace

void RedisValueTier::Walk(TierWalk* walk, TierCall call) {
  walk->values.clear();
  walk->status = WhyNotNow(call);
  if (!walk->status.ok()) return call.done();
  std::make_shared<RedisWalk>(parts_, walk, std::move(call))->Begin();
}

}  // namespace kvstrata
