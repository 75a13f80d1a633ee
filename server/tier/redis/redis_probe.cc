// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::Probe and Forget. A probe reads headers, by pipelines to all shards at once; what
// was redirected, or whose servers failed, is asked for once more.
#include <utility>
#include <vector>

#include "server/tier/redis/redis_calls.h"

namespace kvstrata {
namespace {

using redis::Lane;
using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;

// A server answers with a value of no bytes for what is not there.
bool IsValue(const RespReply& reply) {
  return reply.kind == RespReply::Kind::kBulk && !reply.text.empty();
}

// Nothing: it is no header of the key's value.
std::optional<remote::RemoteHead> HeadOf(const remote::RemoteFormat& format, std::string_view key,
                                         const RespReply& reply) {
  if (reply.kind != RespReply::Kind::kBulk) return std::nullopt;
  return format.HeadOf(key, std::as_bytes(std::span(reply.text)), std::chrono::system_clock::now());
}

class RedisProbes : public std::enable_shared_from_this<RedisProbes> {
 public:
  RedisProbes(RedisParts parts, std::span<TierProbe> probes, TierCall call)
      : parts_(std::move(parts)),
        probes_(probes),
        replies_(probes.size()),
        servers_(probes.size()),
        end_(std::make_shared<RedisCallEnd>(parts_, std::move(call), 1)) {}

  void Begin() {
    for (const TierProbe& probe : probes_) {
      names_.push_back(parts_->format.NameOf(probe.key, probe.place));
    }
    std::vector<size_t> all(probes_.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    Ask(all);
  }

 private:
  void Ask(const std::vector<size_t>& which) {
    std::vector<std::string> names;
    for (const size_t i : which) names.push_back(names_[i]);
    std::vector<std::unique_ptr<RedisOp>> ops;
    for (const auto& group : ByShard(parts_->threads->client().Topology().get(), names)) {
      RedisRequest request;
      std::vector<size_t> asked;
      for (const size_t i : group) {
        AddHeaderCommand(names[i], &request);
        asked.push_back(which[i]);
      }
      ops.push_back(
          NewRedisOp(Lane::kProbe, names[group.front()], end_->terms(), std::move(request)));
      ops.back()->done = [self = shared_from_this(), asked](RedisOp& ended) {
        self->Came(asked, ended);
      };
    }
    left_ = ops.size() + 1;
    for (std::unique_ptr<RedisOp>& op : ops) parts_->threads->client().Submit(std::move(op));
    Ended();
  }

  void Came(const std::vector<size_t>& asked, RedisOp& op) {
    for (size_t i = 0; i < asked.size(); ++i) {
      replies_[asked[i]] = op.status.ok() ? std::move(op.replies[i]) : RespReply{};
      servers_[asked[i]] = op.answered_by;
    }
    Ended();
  }

  void Ended() {
    if (left_.fetch_sub(1) != 1) return;
    parts_->threads->Later([self = shared_from_this()] { self->Check(); });
  }

  void Check() {
    std::vector<size_t> again;
    for (size_t i = 0; i < probes_.size(); ++i) {
      if (replies_[i].kind == RespReply::Kind::kError) again.push_back(i);
    }
    if (!again.empty() && !second_ && WhyNotNow(end_->terms()).ok()) {
      second_ = true;
      return Ask(again);
    }
    for (size_t i = 0; i < probes_.size(); ++i) {
      const auto head = HeadOf(parts_->format, probes_[i].key, replies_[i]);
      probes_[i].sizes = head ? head->sizes : ValueSizes();
      if (head) parts_->known.Saw(probes_[i].key, head->sizes);
      if (!head && IsValue(replies_[i])) {
        parts_->threads->client().NoteDamaged(servers_[i], Lane::kProbe);
      }
      replies_[i] = {};
    }
    end_->Settled();
  }

  const RedisParts parts_;
  const std::span<TierProbe> probes_;
  std::vector<std::string> names_;
  std::vector<RespReply> replies_;            // each written by one op
  std::vector<redis::RedisAddress> servers_;  // that gave them
  const RedisEnd end_;
  std::atomic<size_t> left_ = 0;
  bool second_ = false;
};

// The header tells how many stripes there are.
void ForgetHere(RedisTierParts* parts, std::span<TierForget> keys, const TierCall& call) {
  RedisOps ops(parts->threads.get(), call.cancel);
  for (TierForget& forget : keys) {
    parts->known.Lost(forget.key);
    const std::string name = parts->format.NameOf(forget.key, forget.place);
    RedisRequest request;
    AddHeaderCommand(name, &request);
    auto op = NewRedisOp(Lane::kProbe, name, call, std::move(request));
    op->master_only = true;
    ops.Submit(std::move(op), [&](const RedisOp& told) {
      forget.status = StatusOf(told, RespReply::Kind::kBulk);
      if (!forget.status.ok()) return;
      const auto head = HeadOf(parts->format, forget.key, told.replies.front());
      const uint32_t stripes = head ? head->stripes : 1;
      ops.Submit(NewUnlink(*parts, forget.key, forget.place, stripes, call.deadline),
                 [&forget](const RedisOp& unlinked) {
                   forget.status = StatusOf(unlinked, RespReply::Kind::kInteger);
                 });
    });
  }
  while (!ops.empty()) ops.Handle(true);
}

}  // namespace

void RedisValueTier::Probe(std::span<TierProbe> probes, TierCall call) {
  if (WhyNotNow(call).ok()) {
    std::make_shared<RedisProbes>(parts_, probes, std::move(call))->Begin();
    return;
  }
  for (TierProbe& probe : probes) probe.sizes = parts_->known.Find(probe.key);
  call.done();
}

void RedisValueTier::Forget(std::span<TierForget> keys, TierCall call) {
  if (!call.waits) return MakeLater(parts_, this, keys, std::move(call), &RedisValueTier::Forget);
  if (const Status why = WhyNotNow(call); !why.ok()) {
    RefuseAll(keys, why);
  } else {
    ForgetHere(parts_.get(), keys, call);
  }
  call.done();
}

}  // namespace kvstrata
