// SPDX-License-Identifier: Apache-2.0
// NodeList: which nodes of the cluster there are: those whose announcements lie in the servers of
// the remote tier; and this node's own, which is written anew while the daemon runs.
//
// A node has one of kNodeSeats names, all of one slot. It takes a free one (SET NX), and writes
// again every `renew` with a time to live of `ttl`. A node that is gone is listed until that is
// over. Nodes agree on nothing: where two took one name, the second to look finds the other there
// and takes another name. What does not have the cluster's tag is left out.
//
// Ownership: keeps the threads of the tier. Threads: one ("kvs-announce") if it announces.
// Thread-safety: Find from any thread; Start and Stop one thread. Cost of Find: at most one
// pipeline of 1024 GETs, a server's half a millisecond, in `fresh`.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/tier/redis/client/redis_op.h"
#include "server/tier/redis/redis_threads.h"
#include "server/tier/remote/node_announcement.h"

namespace kvstrata {

struct NodeListOptions {
  std::string address;  // address of this node; "": it announces nothing
  std::string release;
  std::chrono::milliseconds ttl{30000};
  std::chrono::milliseconds renew{10000};
  std::chrono::milliseconds retry{1000};  // after a failure
  std::chrono::milliseconds fresh{2000};  // a list so old is as good as a new one
};

struct ListedNodes {
  std::vector<remote::NodeAnnouncement> nodes;  // by address; of two with one, the newer
  uint32_t refused = 0;                         // announcements that no node of this cluster made
};

class NodeList {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Done = std::function<void(const Result<ListedNodes>&)>;

  NodeList(NodeListOptions options, const remote::NodeKeys& keys,
           std::shared_ptr<RedisThreads> threads);
  // Stop.
  ~NodeList();

  // From now on it announces itself. REQUIRES: an address.
  void Start();
  // Takes the announcement back and ends what waits: at once, or with servers that hang in 1.2 s.
  // Idempotent.
  void Stop() KVS_EXCLUDES(mu_);

  // Calls `done` once, by `deadline` and within a second, at once or in a thread of the tier's. A
  // list of at most `ttl` is better than none. Errors: those of RedisClient, and REDIS_REFUSED.
  void Find(Time deadline, Done done) KVS_EXCLUDES(mu_);

 private:
  // What lies at each seat; "": nothing.
  using Seats = std::vector<std::string>;
  // How an op ended, when it has.
  Status Await(std::unique_ptr<redis::RedisOp> op, std::vector<redis::RespReply>* replies);
  std::unique_ptr<redis::RedisOp> NewRead(Time deadline) const;
  static Result<Seats> SeatsOf(const redis::RedisOp& op);
  ListedNodes ListOf(const Seats& seats, std::optional<uint32_t>* own) const;
  void Read(const Result<Seats>& seats, const Done& done) KVS_EXCLUDES(mu_);
  // Keeps it for who asks next.
  void Keep(const ListedNodes& list) KVS_EXCLUDES(mu_);

  void Serve() KVS_EXCLUDES(mu_);
  Status Announce() KVS_EXCLUDES(mu_);
  Result<bool> Write(uint32_t seat, bool only_if_free);
  void TellOutcome(const Status& outcome);

  const NodeListOptions options_;
  const remote::NodeKeys keys_;
  const std::shared_ptr<RedisThreads> threads_;
  const uint64_t node_;
  std::stop_source stop_;
  std::optional<uint32_t> seat_;  // the thread's; then Stop's
  bool told_ = false, told_well_ = false;

  Mutex mu_;
  std::condition_variable stopped_;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  size_t reading_ KVS_GUARDED_BY(mu_) = 0;  // who waits for a list
  std::optional<ListedNodes> known_ KVS_GUARDED_BY(mu_);
  Time known_at_ KVS_GUARDED_BY(mu_){};
  std::thread thread_;
};

}  // namespace kvstrata
