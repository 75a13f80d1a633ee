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
    uint64_t found = 0;
    for (size_t i = 0; i < probes_.size(); ++i) {
      const auto head = HeadOf(parts_->format, probes_[i].key, replies_[i]);
      probes_[i].sizes = head ? head->sizes : ValueSizes();
      if (head) parts_->known.Saw(probes_[i].key, head->sizes);
      found += head.has_value();
      if (!head && IsValue(replies_[i])) {
        parts_->threads->client().NoteDamaged(servers_[i], Lane::kProbe);
      }
      replies_[i] = {};
    }
    {
      MutexLock lock(parts_->mu);
      parts_->counters.probed += probes_.size();
      parts_->counters.found += found;
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

}  // namespace

void RedisValueTier::Probe(std::span<TierProbe> probes, TierCall call) {
  if (WhyNotNow(call).ok()) {
    std::make_shared<RedisProbes>(parts_, probes, std::move(call))->Begin();
    return;
  }
  for (TierProbe& probe : probes) probe.sizes = parts_->known.Find(probe.key);
  call.done();
}

// The header tells how many stripes there are.
void RedisValueTier::Forget(std::span<TierForget> keys, TierCall call) {
  const RedisParts& parts = parts_;
  const Status why = WhyNotNow(call);
  const auto end = std::make_shared<RedisCallEnd>(parts, std::move(call), keys.size() + 1);
  const auto settle = [parts, end](TierForget* forget, Status status) {
    forget->status = std::move(status);
    if (!forget->status.ok()) CountFailure(parts.get(), forget->status);
    parts->threads->Later([end] { end->Settled(); });
  };
  for (TierForget& forget : keys) {
    if (!why.ok()) {
      settle(&forget, why);
      continue;
    }
    parts->known.Lost(forget.key);
    const std::string name = parts->format.NameOf(forget.key, forget.place);
    RedisRequest request;
    AddHeaderCommand(name, &request);
    auto op = NewRedisOp(Lane::kProbe, name, end->terms(), std::move(request));
    op->master_only = true;
    op->done = [parts, end, settle, one = &forget](RedisOp& ended) {
      const Status told = StatusOf(ended, RespReply::Kind::kBulk);
      if (!told.ok()) return settle(one, told);
      const auto head = HeadOf(parts->format, one->key, ended.replies.front());
      UnlinkStripes(parts, one->key, one->place, head ? head->stripes : 1, end->terms().deadline,
                    [settle, one](const RedisOp& unlinked) {
                      settle(one, StatusOf(unlinked, RespReply::Kind::kInteger));
                    });
    };
    parts->threads->client().Submit(std::move(op));
  }
  parts->threads->Later([end] { end->Settled(); });
}

}  // namespace kvstrata
