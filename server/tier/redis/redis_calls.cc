// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_calls.h"

#include <algorithm>
#include <map>
#include <utility>

namespace kvstrata {

using redis::Lane;
using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;

RedisCallEnd::RedisCallEnd(RedisParts parts, TierCall call, size_t requests)
    : parts_(std::move(parts)), call_(std::move(call)), left_(requests) {
  {
    MutexLock lock(parts_->mu);
    ++parts_->calls;
  }
  if (call_.cancel.stop_possible()) {
    on_cancel_.emplace(call_.cancel, Wake{&parts_->threads->client()});
  }
}

void RedisCallEnd::Settled(size_t requests) {
  if (left_.fetch_sub(requests) != requests) return;
  on_cancel_.reset();
  call_.done();
  MutexLock lock(parts_->mu);
  --parts_->calls;
  parts_->ended.notify_all();
}

std::unique_ptr<RedisOp> NewRedisOp(Lane lane, std::string_view name, const TierCall& call,
                                    RedisRequest request) {
  auto op = std::make_unique<RedisOp>();
  op->lane = lane;
  op->slot = redis::SlotOf(name);
  op->deadline = call.deadline;
  op->cancel = call.cancel;
  op->request = std::make_shared<const RedisRequest>(std::move(request));
  return op;
}

void AddHeaderCommand(std::string_view name, RedisRequest* request) {
  static const std::string last = std::to_string(remote::kHeaderBytes - 1);
  request->Add({"GETRANGE", name, "0", last});
}

namespace {

Status StatusOfError(const RespReply& error, const redis::RedisAddress& server) {
  const std::string text = server.ToString() + " says: " + error.text.substr(0, 200);
  if (ErrorIs(error, "OOM")) return ResourceExhausted("REDIS_FULL", text);
  const bool login = ErrorIs(error, "NOAUTH") || ErrorIs(error, "NOPERM");
  return Unavailable(login ? "REDIS_LOGIN" : "REDIS_REFUSED", text);
}

}  // namespace

Status StatusOf(const RedisOp& op, RespReply::Kind wanted) {
  KVS_RETURN_IF_ERROR(op.status);
  const RespReply& reply = op.replies.front();
  if (reply.kind == RespReply::Kind::kError) return StatusOfError(reply, op.answered_by);
  if (reply.kind == wanted || reply.kind == RespReply::Kind::kNone) return OkStatus();
  return Unavailable("REDIS_PROTOCOL", "the server's reply is of another kind than was asked for");
}

std::string MasterOf(const RedisTierParts& parts, std::string_view key, std::string_view place) {
  const auto map = parts.threads->client().Topology();
  if (map == nullptr) return "";
  const redis::RedisShard* const shard = map->Find(redis::SlotOf(parts.format.NameOf(key, place)));
  return shard == nullptr ? "" : shard->master.ToString();
}

std::unique_ptr<RedisOp> NewUnlink(const RedisTierParts& parts, std::string_view key,
                                   std::string_view place, uint32_t stripes, Deadline deadline) {
  std::vector<std::string> words = {"UNLINK"};
  for (uint32_t i = 0; i < stripes; ++i) words.push_back(parts.format.NameOf(key, place, i));
  const std::vector<std::string_view> views(words.begin(), words.end());
  RedisRequest request;
  request.Add(views);
  return NewRedisOp(Lane::kWrite, words[1], {deadline, {}, nullptr}, std::move(request));
}

std::vector<std::vector<size_t>> ByShard(const redis::SlotMap* map,
                                         std::span<const std::string> names) {
  constexpr size_t kMost = 4096;
  std::map<uint16_t, std::vector<size_t>> open;
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < names.size(); ++i) {
    const uint16_t shard = map == nullptr ? 0 : map->shard_of[redis::SlotOf(names[i])];
    std::vector<size_t>& group = open[shard];
    group.push_back(i);
    if (group.size() == kMost) groups.push_back(std::exchange(group, {}));
  }
  for (auto& [shard, group] : open) {
    if (!group.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace kvstrata
