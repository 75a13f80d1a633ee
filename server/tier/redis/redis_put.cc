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
constexpr size_t kStripesAtOnce = 64;
constexpr uint64_t kBytesAtOnce = uint64_t{32} << 20;

class RedisPuts {
 public:
  RedisPuts(RedisTierParts* parts, std::span<TierPut> puts, const TierCall& call)
      : parts_(*parts), puts_(puts), call_(call), ops_(parts->threads.get(), call.cancel) {}

  // Every put has its status then.
  void Run() {
    Ask();
    while (!ops_.empty() || !ready_.empty() || !missing_.empty()) {
      const bool more = !ready_.empty() || !missing_.empty();
      const bool sends = more && ops_.size() < kStripesAtOnce && bytes_ < kBytesAtOnce;
      if (sends) SendNext();
      ops_.Handle(!sends);
    }
  }

 private:
  // A value on its way out: its stripes 1, 2, ... and, when those are there, the first.
  struct Write {
    size_t put;
    OutgoingValue value;
    uint32_t next = 1;
    uint32_t sent = 0;  // stripes without an answer
    Status status;
  };
  using WritePtr = std::shared_ptr<Write>;
  struct Stripe {
    OutgoingStripe out;
    std::unique_ptr<std::byte[]> room;
  };

  // Asks each shard what is there.
  void Ask();
  void NoteAnswer(std::span<const size_t> puts, const RedisOp& op);
  uint64_t BytesOf(size_t i) const;
  Result<OutgoingValue> Prepare(const TierPut& put) const;
  // Seals and sends a stripe, or prepares a value.
  void SendNext();
  void Sent(const WritePtr& write, uint64_t bytes, const RedisOp& op);
  void End(const Write& write);
  // How a write ended is noted of its server, which the status of one that failed names then.
  Status Noted(size_t i, const Status& status) const;
  void Settle(size_t i, const Status& status);

  RedisTierParts& parts_;
  const std::span<TierPut> puts_;
  const TierCall& call_;
  std::multimap<size_t, size_t> later_;  // puts of a key behind the first, by that one
  std::deque<size_t> missing_;           // not yet prepared
  std::deque<WritePtr> ready_;           // with a stripe that may go
  uint64_t bytes_ = 0;                   // on their way
  RedisOps ops_;                         // the first to end: handlers use the others
};

void RedisPuts::Ask() {
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
    names.push_back(parts_.format.NameOf(puts_[i].key, puts_[i].place));
  }
  for (const std::vector<size_t>& group :
       ByShard(parts_.threads->client().Topology().get(), names)) {
    RedisRequest request;
    std::vector<size_t> puts;
    for (const size_t i : group) {
      request.Add({"STRLEN", names[i]});
      puts.push_back(asked[i]);
    }
    auto op = NewRedisOp(Lane::kProbe, names[group.front()], call_, std::move(request));
    op->master_only = true;
    ops_.Submit(std::move(op),
                [this, puts = std::move(puts)](const RedisOp& ended) { NoteAnswer(puts, ended); });
  }
}

// A reply that is none, as of a slot that moved, means that the value is sent.
void RedisPuts::NoteAnswer(std::span<const size_t> puts, const RedisOp& op) {
  for (size_t n = 0; n < puts.size(); ++n) {
    const size_t i = puts[n];
    if (!op.status.ok()) {
      Settle(i, Noted(i, op.status));
      continue;
    }
    const uint64_t bytes = BytesOf(i);
    const uint64_t length = remote::kHeaderBytes + std::min(bytes, remote::kStripeBytes);
    const bool told = op.replies[n].kind == RespReply::Kind::kInteger && bytes != 0;
    if (told && op.replies[n].integer == static_cast<int64_t>(length)) {
      Settle(i, OkStatus());
    } else {
      missing_.push_back(i);
    }
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
      parts_.format.Prepare(put.key, put.buffers, std::chrono::system_clock::now()));
  const uint64_t least = parts_.threads->survey().least_capacity();
  if (least == 0 || value.bytes <= least / 2) return value;
  return ResourceExhausted("REDIS_FULL",
                           "a value of " + std::to_string(value.bytes) +
                               " bytes is more than half of what a server may hold (maxmemory)");
}

void RedisPuts::SendNext() {
  if (ready_.empty()) {
    const size_t i = missing_.front();
    missing_.pop_front();
    Result<OutgoingValue> value = Prepare(puts_[i]);
    if (!value.ok()) return Settle(i, Noted(i, value.status()));
    ready_.push_back(std::make_shared<Write>(Write{i, std::move(*value)}));
  }
  const WritePtr write = ready_.front();
  const OutgoingValue& value = write->value;
  const uint32_t stripe = write->next++ % value.stripes;
  if (write->next >= value.stripes) ready_.pop_front();
  const auto one = std::make_shared<Stripe>();
  const uint64_t bytes = remote::StripeBytes(value.bytes, stripe);
  const bool seals = parts_.format.needs_room();
  if (seals) one->room = std::make_unique_for_overwrite<std::byte[]>(bytes);
  one->out = parts_.format.Write(value, stripe, {one->room.get(), seals ? bytes : 0});
  std::vector<std::span<const std::byte>> all = {one->out.header};
  all.insert(all.end(), one->out.bytes.begin(), one->out.bytes.end());
  const TierPut& put = puts_[write->put];
  const std::string name = parts_.format.NameOf(put.key, put.place, stripe);
  ++write->sent;
  bytes_ += bytes;
  ops_.Submit(NewRedisOp(Lane::kWrite, name, call_,
                         RedisRequest::Set(name, std::move(all), parts_.options.ttl)),
              [this, write, one, bytes](const RedisOp& ended) { Sent(write, bytes, ended); });
}

void RedisPuts::Sent(const WritePtr& write, uint64_t bytes, const RedisOp& op) {
  bytes_ -= bytes;
  --write->sent;
  if (write->status.ok()) write->status = StatusOf(op, RespReply::Kind::kText);
  if (!write->status.ok()) std::erase(ready_, write);
  if (write->sent != 0) return;
  if (!write->status.ok() || write->next > write->value.stripes) return End(*write);
  if (write->next == write->value.stripes) ready_.push_front(write);
}

void RedisPuts::End(const Write& write) {
  if (write.status.ok()) parts_.known.Saw(puts_[write.put].key, write.value.sizes);
  Settle(write.put, Noted(write.put, write.status));
}

Status RedisPuts::Noted(size_t i, const Status& status) const {
  const std::string server = MasterOf(parts_, puts_[i].key, puts_[i].place);
  if (server.empty()) return status;
  parts_.writes.Note(server, status, std::chrono::steady_clock::now());
  const std::string why(status.message());
  if (status.ok() || why.find(server) != why.npos) return status;
  return {status.code(), status.reason(), server + ": " + why};
}

void RedisPuts::Settle(size_t i, const Status& status) {
  puts_[i].status = status;
  for (auto [it, end] = later_.equal_range(i); it != end; ++it) puts_[it->second].status = status;
  if (!status.ok()) return;
  MutexLock lock(parts_.mu);
  ++parts_.counted.puts;
}

}  // namespace

void RedisValueTier::Put(std::span<TierPut> puts, TierCall call) {
  if (!call.waits) return MakeLater(parts_, this, puts, std::move(call), &RedisValueTier::Put);
  if (const Status why = WhyNotNow(call); !why.ok()) {
    RefuseAll(puts, why);
  } else {
    RedisPuts(parts_.get(), puts, call).Run();
  }
  call.done();
}

}  // namespace kvstrata
