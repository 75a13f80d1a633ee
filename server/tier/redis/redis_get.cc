// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::Get: stripes are read into place by ops, then checked by a worker.
#include <utility>
#include <vector>

#include "server/tier/redis/redis_calls.h"

namespace kvstrata {
namespace {

using redis::Lane;
using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;
using remote::IncomingValue;

// One value that is on its way here.
class RedisRead : public std::enable_shared_from_this<RedisRead> {
 public:
  RedisRead(RedisParts parts, RedisEnd end, TierGet* get, IncomingValue value)
      : parts_(std::move(parts)),
        end_(std::move(end)),
        get_(*get),
        value_(std::move(value)),
        stripes_(value_.stripes()),
        left_(value_.stripes()) {}

  void Begin() {
    for (uint32_t i = 0; i < stripes_.size(); ++i) {
      const std::string name = parts_->format.NameOf(get_.key, get_.place, i);
      auto op = NewRedisOp(Lane::kRead, name, end_->terms(), RedisRequest({"GET", name}));
      op->target = {stripes_[i].header, value_.parts(i)};
      op->to_target = true;
      op->done = [self = shared_from_this(), i](RedisOp& ended) { self->Came(i, ended); };
      parts_->threads->client().Submit(std::move(op));
    }
  }

 private:
  struct Stripe {
    remote::Header header;
    Status status;
    uint64_t length = 0;
    bool there = false;
    redis::RedisAddress server;  // that gave it
  };

  void Came(uint32_t i, const RedisOp& op) {
    Stripe& stripe = stripes_[i];
    stripe.status = StatusOf(op, RespReply::Kind::kBulk);
    stripe.there = stripe.status.ok() && op.replies.front().kind == RespReply::Kind::kBulk;
    if (stripe.there) stripe.server = op.answered_by;
    if (stripe.there) stripe.length = static_cast<uint64_t>(op.replies.front().integer);
    if (left_.fetch_sub(1) != 1) return;
    parts_->threads->Later([self = shared_from_this()] { self->Check(); });
  }

  // The stripe's failure, with the master that it belongs to: more than one may have been asked.
  Status WithServer(uint32_t i) const {
    const Status& why = stripes_[i].status;
    const auto map = parts_->threads->client().Topology();
    const redis::RedisShard* const shard =
        map == nullptr ? nullptr
                       : map->Find(redis::SlotOf(parts_->format.NameOf(get_.key, get_.place, i)));
    if (shard == nullptr) return why;
    return {why.code(), why.reason(), why.message() + "; master " + shard->master.ToString()};
  }

  Status Open() {
    for (uint32_t i = 0; i < stripes_.size(); ++i) {
      if (!stripes_[i].status.ok()) return WithServer(i);
    }
    const auto now = std::chrono::system_clock::now();
    for (uint32_t i = 0; i < stripes_.size(); ++i) {
      const Stripe& stripe = stripes_[i];
      if (!stripe.there) {
        // Its first stripe tells whether the value was put with other sizes.
        return NotFound("REDIS_MISS", "no server has the value");
      }
      const auto header =
          std::span(stripe.header).first(std::min<uint64_t>(stripe.length, remote::kHeaderBytes));
      const Status opened = parts_->format.Open(&value_, i, header, stripe.length, now);
      if (opened.code() == Code::kDataLoss) {
        parts_->threads->client().NoteDamaged(stripe.server, Lane::kRead);
      }
      KVS_RETURN_IF_ERROR(opened);
    }
    return OkStatus();
  }

  void Check() {
    get_.status = Open();
    const Status& status = get_.status;
    const bool missed = status.code() == Code::kNotFound;
    const bool damaged = status.code() == Code::kDataLoss;
    if (status.ok()) parts_->known.Saw(get_.key, ValueSizes::Of(get_.buffers));
    if (missed || damaged) parts_->known.Lost(get_.key);
    {
      MutexLock lock(parts_->mu);
      parts_->counted.hits += status.ok();
      parts_->counted.misses += missed;
      parts_->counted.damaged += damaged;
    }
    if (!damaged) return end_->Settled();
    auto unlink =
        NewUnlink(*parts_, get_.key, get_.place, value_.stripes(), end_->terms().deadline);
    unlink->done = [self = shared_from_this()](const RedisOp&) {
      self->parts_->threads->Later([self] { self->end_->Settled(); });
    };
    parts_->threads->client().Submit(std::move(unlink));
  }

  const RedisParts parts_;
  const RedisEnd end_;
  TierGet& get_;
  IncomingValue value_;
  std::vector<Stripe> stripes_;
  std::atomic<uint32_t> left_;
};

}  // namespace

void RedisValueTier::Get(std::span<TierGet> gets, TierCall call) {
  const Status why = WhyNotNow(call);
  const auto end = std::make_shared<RedisCallEnd>(parts_, std::move(call), gets.size() + 1);
  size_t refused = 1;
  for (TierGet& get : gets) {
    get.status = why;
    if (why.ok()) {
      Result<IncomingValue> value = parts_->format.Expect(get.key, get.buffers);
      get.status = value.status();
      if (value.ok()) {
        std::make_shared<RedisRead>(parts_, end, &get, std::move(*value))->Begin();
        continue;
      }
    }
    ++refused;
  }
  parts_->threads->Later([end, refused] { end->Settled(refused); });
}

}  // namespace kvstrata
