// SPDX-License-Identifier: Apache-2.0
// The calls of a RedisValueTier, each in a file of its own, and what they share.
//
// A call is cut into ops for the client. Ends of ops of a Get or Probe are handed to workers at
// once; a request of such a call is settled once, and with the last one the call ends. The others
// wait for their ops, in their caller's thread or in one for that. Thread-safety: any thread.
// Ownership: ops hold the parts and the call's end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>

#include "base/sync.h"
#include "server/tier/redis/client/redis_op.h"
#include "server/tier/redis/redis_threads.h"
#include "server/tier/redis/redis_value_tier.h"
#include "server/tier/redis/write_health.h"
#include "server/tier/remote/known_values.h"
#include "server/tier/remote/remote_format.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct RedisTierParts {
  RedisTierParts(std::shared_ptr<RedisThreads> shared, const RedisTierOptions& all,
                 remote::RemoteFormat its)
      : threads(std::move(shared)), options(all), format(std::move(its)), known(all.known_for) {}

  const std::shared_ptr<RedisThreads> threads;
  const RedisTierOptions options;
  const remote::RemoteFormat format;
  KnownValues known;
  WriteHealth writes;

  Mutex mu;
  std::condition_variable ended;
  TierStats counted KVS_GUARDED_BY(mu);   // puts, hits, misses, damaged; a failure is no miss
  uint64_t calls KVS_GUARDED_BY(mu) = 0;  // that have not ended
};
using RedisParts = std::shared_ptr<RedisTierParts>;

// The end of a call of `requests` requests. Destroyed by its last holder, when the call has ended.
class RedisCallEnd {
 public:
  RedisCallEnd(RedisParts parts, TierCall call, size_t requests);

  const TierCall& terms() const { return call_; }
  // One more is settled. The last one calls `done`.
  void Settled(size_t requests = 1);

 private:
  struct Wake {
    redis::RedisClient* client;
    void operator()() const { client->WakeUp(); }
  };

  const RedisParts parts_;
  TierCall call_;
  std::atomic<size_t> left_;
  std::optional<std::stop_callback<Wake>> on_cancel_;
};
using RedisEnd = std::shared_ptr<RedisCallEnd>;

// An op on the key of that name, with the call's deadline and cancel.
std::unique_ptr<redis::RedisOp> NewRedisOp(redis::Lane lane, std::string_view name,
                                           const TierCall& call, redis::RedisRequest request);
// Asks for the header of the stripe of that name.
void AddHeaderCommand(std::string_view name, redis::RedisRequest* request);
// What the op's one reply means if it is an error, or what became of the op. `wanted`: the kind
// that is an answer; kNone is OK, too.
Status StatusOf(const redis::RedisOp& op, redis::RespReply::Kind wanted);
// The master that a value belongs to, "host:port"; "": not known.
std::string MasterOf(const RedisTierParts& parts, std::string_view key, std::string_view place);
// UNLINK of all stripes.
std::unique_ptr<redis::RedisOp> NewUnlink(const RedisTierParts& parts, std::string_view key,
                                          std::string_view place, uint32_t stripes,
                                          Deadline deadline);

// All end with `why`.
template <typename Request>
void RefuseAll(std::span<Request> requests, const Status& why) {
  for (Request& request : requests) request.status = why;
}

inline void RefuseAll(TierWalk* walk, const Status& why) { walk->status = why; }

// Has a thread for such calls make the call, which waits for its ops.
template <typename Requests>
void MakeLater(const RedisParts& parts, RedisValueTier* tier, Requests requests, TierCall call,
               void (RedisValueTier::*make)(Requests, TierCall)) {
  const auto end = std::make_shared<RedisCallEnd>(parts, std::move(call), 1);
  const auto run = [tier, requests, make](TierCall terms) {
    terms.waits = true;
    terms.done = [] {};  // the queue calls it
    (tier->*make)(requests, std::move(terms));
  };
  const auto refuse = [requests](const Status& why) { RefuseAll(requests, why); };
  parts->threads->calls().Add(
      0, {{end->terms().deadline, end->terms().cancel, [end] { end->Settled(); }}, run, refuse});
}

// For at most 4096 keys of one shard each, the indices of `names`; all in one where shards are not
// known yet.
std::vector<std::vector<size_t>> ByShard(const redis::SlotMap* map,
                                         std::span<const std::string> names);

}  // namespace kvstrata
