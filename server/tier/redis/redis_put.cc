// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::Put: asks which values are there with the right length, and sends the others,
// some at a time; of a value the first stripe last, since that is what says that it is there.
#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "server/tier/redis/redis_calls.h"

namespace kvstrata {
namespace {

using redis::Lane;
using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;
using remote::OutgoingStripe;
using remote::OutgoingValue;

// On their way at a time: of small values so many that no server waits for the next one.
constexpr size_t kValuesAtOnce = 64;
constexpr uint64_t kBytesAtOnce = uint64_t{32} << 20;  // a larger value goes alone
constexpr size_t kStripesAtOnce = 4;                   // stripes of a value

class RedisWrite;

class RedisPuts : public std::enable_shared_from_this<RedisPuts> {
 public:
  RedisPuts(RedisParts parts, std::span<TierPut> puts, TierCall call)
      : parts_(std::move(parts)),
        puts_(puts),
        end_(std::make_shared<RedisCallEnd>(parts_, std::move(call), puts.size())) {}

  const RedisParts& parts() const { return parts_; }
  const TierCall& terms() const { return end_->terms(); }

  // None may begin: all end with `why`.
  void Refuse(const Status& why);
  // An op for each shard, which asks what is there; once it has ended, what is not is sent.
  std::vector<std::unique_ptr<RedisOp>> Questions();
  // A value that was being sent has its status.
  void Sent(size_t i);

 private:
  void NoteAnswer(std::span<const size_t> puts, const Status& status,
                  std::span<const RespReply> replies) KVS_EXCLUDES(mu_);
  void SendMore() KVS_EXCLUDES(mu_);
  uint64_t BytesOf(size_t i) const;
  Result<OutgoingValue> Prepare(const TierPut& put) const;
  // How a write ended is noted of its server, which the status of one that failed names then.
  Status Noted(size_t i, const Status& status) const;
  void Settle(size_t i, Status status);

  const RedisParts parts_;
  const std::span<TierPut> puts_;
  const RedisEnd end_;
  std::multimap<size_t, size_t> later_;  // puts of a key behind the first, by that one
  Mutex mu_;
  std::deque<size_t> missing_ KVS_GUARDED_BY(mu_);  // not yet sent
  size_t sending_ KVS_GUARDED_BY(mu_) = 0;
  uint64_t sending_bytes_ KVS_GUARDED_BY(mu_) = 0;
};

// One value on its way out.
class RedisWrite : public std::enable_shared_from_this<RedisWrite> {
 public:
  RedisWrite(std::shared_ptr<RedisPuts> puts, size_t i, TierPut* put, OutgoingValue value)
      : puts_(std::move(puts)), i_(i), put_(*put), value_(std::move(value)) {}

  // Sends the next stripes, or the first one, or is at its end. In a worker.
  void Continue() {
    if (!status_.ok() || next_ > value_.stripes) return End(status_);
    const uint32_t begin = next_;
    // 1, 2, ... and then 0.
    next_ = begin == value_.stripes ? begin + 1
                                    : std::min<uint32_t>(value_.stripes, begin + kStripesAtOnce);
    left_ = next_ - begin;
    stripes_.clear();
    std::vector<std::unique_ptr<RedisOp>> ops;
    for (uint32_t i = begin; i < next_; ++i) ops.push_back(Write(i % value_.stripes));
    for (std::unique_ptr<RedisOp>& op : ops) parts().threads->client().Submit(std::move(op));
  }

 private:
  struct Stripe {
    OutgoingStripe out;
    std::unique_ptr<std::byte[]> room;
  };

  RedisTierParts& parts() { return *puts_->parts(); }

  std::unique_ptr<RedisOp> Write(uint32_t stripe) {
    auto one = std::make_unique<Stripe>();
    std::span<std::byte> room;
    if (parts().format.needs_room()) {
      const uint64_t bytes = remote::StripeBytes(value_.bytes, stripe);
      one->room = std::make_unique_for_overwrite<std::byte[]>(bytes);
      room = {one->room.get(), bytes};
    }
    one->out = parts().format.Write(value_, stripe, room);
    std::vector<std::span<const std::byte>> bytes = {one->out.header};
    bytes.insert(bytes.end(), one->out.bytes.begin(), one->out.bytes.end());
    const std::string name = parts().format.NameOf(put_.key, put_.place, stripe);
    auto op = NewRedisOp(Lane::kWrite, name, puts_->terms(),
                         RedisRequest::Set(name, std::move(bytes), parts().options.ttl));
    op->done = [self = shared_from_this()](RedisOp& ended) { self->Written(ended); };
    stripes_.push_back(std::move(one));
    return op;
  }

  void Written(const RedisOp& op) {
    {
      MutexLock lock(mu_);
      if (status_.ok()) status_ = StatusOf(op, RespReply::Kind::kText);
    }
    if (left_.fetch_sub(1) != 1) return;
    puts_->parts()->threads->Later([self = shared_from_this()] { self->Continue(); });
  }

  void End(Status status) {
    put_.status = std::move(status);
    stripes_.clear();
    if (put_.status.ok()) {
      parts().known.Saw(put_.key, value_.sizes);
      MutexLock lock(parts().mu);
      parts().counters.put_bytes += value_.bytes;
    }
    puts_->Sent(i_);
  }

  const std::shared_ptr<RedisPuts> puts_;
  const size_t i_;
  TierPut& put_;
  const OutgoingValue value_;
  std::vector<std::unique_ptr<Stripe>> stripes_;
  uint32_t next_ = 1;
  std::atomic<uint32_t> left_ = 0;
  Mutex mu_;
  Status status_;  // written by the client's thread, read by workers after it
};

void RedisPuts::Refuse(const Status& why) {
  for (TierPut& put : puts_) put.status = why;
  for (size_t i = 0; i < puts_.size(); ++i) CountFailure(parts_.get(), why);
  parts_->threads->Later([self = shared_from_this()] { self->end_->Settled(self->puts_.size()); });
}

std::vector<std::unique_ptr<RedisOp>> RedisPuts::Questions() {
  std::map<std::string_view, size_t> firsts;
  std::vector<size_t> asked;
  std::vector<std::string> names;
  for (size_t i = 0; i < puts_.size(); ++i) {
    const auto [first, added] = firsts.emplace(puts_[i].key, i);
    if (!added) {
      later_.emplace(first->second, i);
      continue;
    }
    asked.push_back(i);
    names.push_back(parts_->format.NameOf(puts_[i].key, puts_[i].place));
  }
  std::vector<std::unique_ptr<RedisOp>> ops;
  for (const std::vector<size_t>& group :
       ByShard(parts_->threads->client().Topology().get(), names)) {
    RedisRequest request;
    std::vector<size_t> puts;
    for (const size_t i : group) {
      request.Add({"STRLEN", names[i]});
      puts.push_back(asked[i]);
    }
    ops.push_back(NewRedisOp(Lane::kProbe, names[group.front()], terms(), std::move(request)));
    ops.back()->master_only = true;
    ops.back()->done = [self = shared_from_this(), puts = std::move(puts)](RedisOp& ended) {
      self->parts_->threads->Later(
          [self, puts, status = ended.status, replies = std::move(ended.replies)] {
            self->NoteAnswer(puts, status, replies);
            self->SendMore();
          });
    };
  }
  return ops;
}

// A reply that is none, as of a slot that moved, means that the value is sent.
void RedisPuts::NoteAnswer(std::span<const size_t> puts, const Status& status,
                           std::span<const RespReply> replies) {
  for (size_t n = 0; n < puts.size(); ++n) {
    const size_t i = puts[n];
    if (!status.ok()) {
      Settle(i, Noted(i, status));
      continue;
    }
    const uint64_t bytes = BytesOf(i);
    const uint64_t length = remote::kHeaderBytes + std::min(bytes, remote::kStripeBytes);
    const bool told = replies[n].kind == RespReply::Kind::kInteger && bytes != 0;
    if (told && replies[n].integer == static_cast<int64_t>(length)) {
      Settle(i, OkStatus());
      continue;
    }
    MutexLock lock(mu_);
    missing_.push_back(i);
  }
}

uint64_t RedisPuts::BytesOf(size_t i) const {
  uint64_t bytes = 0;
  for (const auto& buffer : puts_[i].buffers) bytes += buffer.size();
  return bytes;
}

Result<OutgoingValue> RedisPuts::Prepare(const TierPut& put) const {
  KVS_ASSIGN_OR_RETURN(
      OutgoingValue value,
      parts_->format.Prepare(put.key, put.buffers, std::chrono::system_clock::now()));
  const uint64_t least = parts_->threads->survey().least_capacity();
  if (least == 0 || value.bytes <= least / 2) return value;
  return ResourceExhausted("REDIS_FULL",
                           "a value of " + std::to_string(value.bytes) +
                               " bytes is more than half of what a server may hold (maxmemory)");
}

void RedisPuts::SendMore() {
  for (;;) {
    size_t i = 0;
    {
      MutexLock lock(mu_);
      if (missing_.empty() || sending_ == kValuesAtOnce) return;
      i = missing_.front();
      const uint64_t bytes = BytesOf(i);
      if (sending_ != 0 && sending_bytes_ + bytes > kBytesAtOnce) return;
      ++sending_;
      sending_bytes_ += bytes;
      missing_.pop_front();
    }
    Result<OutgoingValue> value = Prepare(puts_[i]);
    if (value.ok()) {
      std::make_shared<RedisWrite>(shared_from_this(), i, &puts_[i], std::move(*value))->Continue();
    } else {
      puts_[i].status = value.status();
      Sent(i);
    }
  }
}

void RedisPuts::Sent(size_t i) {
  {
    MutexLock lock(mu_);
    --sending_;
    sending_bytes_ -= BytesOf(i);
  }
  Settle(i, Noted(i, puts_[i].status));
  parts_->threads->Later([self = shared_from_this()] { self->SendMore(); });
}

Status RedisPuts::Noted(size_t i, const Status& status) const {
  const std::string server = MasterOf(*parts_, puts_[i].key, puts_[i].place);
  if (server.empty()) return status;
  parts_->writes.Note(server, status, std::chrono::steady_clock::now());
  const std::string why(status.message());
  if (status.ok() || why.find(server) != why.npos) return status;
  return {status.code(), status.reason(), server + ": " + why};
}

void RedisPuts::Settle(size_t i, Status status) {
  if (!status.ok()) CountFailure(parts_.get(), status);
  size_t settled = 1;
  puts_[i].status = status;
  for (auto [it, end] = later_.equal_range(i); it != end; ++it, ++settled) {
    puts_[it->second].status = status;
  }
  if (status.ok()) {
    MutexLock lock(parts_->mu);
    ++parts_->counters.puts;
  }
  end_->Settled(settled);
}

}  // namespace

void RedisValueTier::Put(std::span<TierPut> puts, TierCall call) {
  const Status why = WhyNotNow(call);
  const auto all = std::make_shared<RedisPuts>(parts_, puts, std::move(call));
  if (!why.ok() || puts.empty()) return all->Refuse(why);
  for (std::unique_ptr<RedisOp>& op : all->Questions()) {
    parts_->threads->client().Submit(std::move(op));
  }
}

}  // namespace kvstrata
