// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_client.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "server/tier/redis/client/slot_watch.h"
#include "server/tier/value_tier.h"

namespace kvstrata::redis {
namespace {

using Clock = std::chrono::steady_clock;
using Time = RedisOp::Time;

constexpr uint32_t kMostFailures = 3;
constexpr uint32_t kMostRedirections = 4;
constexpr std::chrono::milliseconds kPublish{100};
constexpr int kEvents = 64;

void Ring(const UniqueFd& event) {
  const uint64_t one = 1;
  (void)!::write(event.get(), &one, sizeof(one));
}

// Errors of a server that cannot serve a slot now, where another one may.
bool Elsewhere(const RespReply& reply) {
  constexpr std::array<std::string_view, 6> words = {"CLUSTERDOWN", "LOADING",  "MASTERDOWN",
                                                     "TRYAGAIN",    "READONLY", "BUSY"};
  return std::ranges::any_of(words, [&](std::string_view word) { return ErrorIs(reply, word); });
}

// The same commands behind an ASKING.
std::shared_ptr<const RedisRequest> Asking(const RedisRequest& request) {
  auto asking = std::make_shared<RedisRequest>(request);
  asking->PutBefore({"ASKING"});
  return asking;
}

// Not null: a replica alone said that there is no value, and may be behind its master. Whoever
// reads was told that the value is there.
const RedisAddress* MasterOfWhatLacksIt(const RedisOp& op, const SlotMap* map) {
  const bool missed = op.replies.size() == 1 && op.replies.front().kind == RespReply::Kind::kNone;
  if (!missed || op.lane != Lane::kRead || op.at || map == nullptr) return nullptr;
  const RedisShard* const shard = map->Find(op.slot);
  const bool replica = shard != nullptr && std::ranges::count(shard->replicas, op.answered_by) != 0;
  return replica ? &shard->master : nullptr;
}

}  // namespace

class RedisClient::Loop {
 public:
  explicit Loop(RedisClient* client)
      : client_(*client),
        options_(client->options_),
        resolver_([wake = client->wake_] { Ring(*wake); }),
        watch_(&client->options_) {}

  void Wait(Time until);
  void Work() KVS_EXCLUDES(client_.mu_);
  bool empty() const { return timers_.empty(); }

 private:
  // -- ops
  void Route(RedisOp* op);
  RedisServer* Choose(RedisOp* op, Status* why);
  void Handle();
  void HandleAnswer(RedisOp* op);
  void Redirect(RedisOp* op, const Redirection& to);
  void Retry(RedisOp* op, const Status& why, bool blameless);
  void Finish(RedisOp* op, Status status);
  void SetTimer(RedisOp* op);
  void RunTimers();
  void Hedge(RedisOp* op);
  void Expire(RedisOp* op);
  void EndCancelled();
  void EndAll();
  // -- servers
  RedisServer* ServerAt(const RedisAddress& address);
  RedisServer* Numbered(uint32_t number);
  std::unique_ptr<RedisOp> Question(const RedisAddress& server, RedisRequest request);
  void RefreshIfDue();
  void Refreshed(const RedisOp& op);
  void PingIfDue(RedisServer* server);
  void DropServers();
  Time NextEvent() const;
  void Publish() KVS_EXCLUDES(client_.mu_);

  RedisClient& client_;
  const RedisClientOptions& options_;
  RedisResolver resolver_;
  SlotWatch watch_;
  std::map<RedisAddress, std::unique_ptr<RedisServer>> servers_;
  std::map<uint32_t, RedisServer*> by_number_;
  std::set<std::pair<Time, RedisOp*>> timers_;  // each op once
  std::vector<RedisOp*> unrouted_;              // until there is a map
  ReturnedOps returned_;
  std::set<RedisServer*> pinged_;
  uint32_t last_number_ = 0;
  Time now_ = Clock::now(), published_{};
  std::vector<epoll_event> events_;  // that happened
};

// -- the face

RedisClient::RedisClient(RedisClientOptions options)
    : options_(std::move(options)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(std::make_shared<UniqueFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      loop_(std::make_unique<Loop>(this)) {
  KVS_CHECK(!options_.servers.empty());
  KVS_CHECK(epoll_.get() >= 0 && wake_->get() >= 0);
  epoll_event event{};
  event.events = EPOLLIN;
  KVS_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_->get(), &event) == 0);
}

RedisClient::~RedisClient() = default;

void RedisClient::Submit(std::unique_ptr<RedisOp> op) {
  {
    MutexLock lock(mu_);
    if (!stopped_) {
      ++ops_;
      inbox_.push_back(std::move(op));
      if (inbox_.size() == 1) Ring(*wake_);
      return;
    }
  }
  op->status = TierStopped();
  op->done(*op);
}

std::shared_ptr<const SlotMap> RedisClient::Topology() const {
  MutexLock lock(mu_);
  return map_;
}

std::vector<RedisServerStats> RedisClient::Servers() const {
  MutexLock lock(mu_);
  std::vector<RedisServerStats> servers = servers_;
  for (RedisServerStats& server : servers) {
    const auto damaged = damaged_.find(server.address);
    if (damaged == damaged_.end()) continue;
    server.probes.damaged = damaged->second.probes;
    server.reads.damaged = damaged->second.reads;
  }
  return servers;
}

void RedisClient::NoteDamaged(const RedisAddress& server, Lane lane) {
  MutexLock lock(mu_);
  Damaged& damaged = damaged_[server];
  ++(lane == Lane::kRead ? damaged.reads : damaged.probes);
}

std::string RedisClient::Illness() const {
  MutexLock lock(mu_);
  return illness_;
}

void RedisClient::WakeUp() { Ring(*wake_); }

void RedisClient::Stop() {
  {
    MutexLock lock(mu_);
    stopped_ = true;
  }
  WakeUp();
}

bool RedisClient::Wait(Time until) {
  {
    MutexLock lock(mu_);
    if (stopped_ && inbox_.empty() && loop_->empty()) return false;
  }
  loop_->Wait(until);
  return true;
}

void RedisClient::Work() { loop_->Work(); }

// -- the loop

Time RedisClient::Loop::NextEvent() const {
  Time next = std::min(watch_.due(), now_ + std::chrono::seconds(1));
  if (!timers_.empty()) next = std::min(next, timers_.begin()->first);
  for (const auto& [address, server] : servers_) {
    next = std::min(next, server->next_stall());
    if (server->breaker().open()) next = std::min(next, server->breaker().next_try());
  }
  return next;
}

void RedisClient::Loop::Wait(Time until) {
  const auto wait =
      std::chrono::ceil<std::chrono::milliseconds>(std::min(NextEvent(), until) - Clock::now());
  const int timeout = static_cast<int>(std::max<int64_t>(wait.count(), 0));
  events_.resize(kEvents);
  const int happened = epoll_wait(client_.epoll_.get(), events_.data(), kEvents, timeout);
  events_.resize(static_cast<size_t>(std::max(happened, 0)));
}

void RedisClient::Loop::Work() {
  now_ = Clock::now();
  std::vector<std::unique_ptr<RedisOp>> inbox;
  bool stopped = false, rung = false;
  for (const epoll_event& event : events_) {
    const uint64_t link = event.data.u64;
    if (link == 0) {
      uint64_t rings = 0;
      (void)!::read(client_.wake_->get(), &rings, sizeof(rings));
      rung = true;
    } else if (RedisServer* const server = Numbered(static_cast<uint32_t>(link >> 32))) {
      server->Move(link, now_, &returned_);
    }
  }
  Handle();
  {
    MutexLock lock(client_.mu_);
    inbox.swap(client_.inbox_);
    stopped = client_.stopped_;
  }
  for (std::unique_ptr<RedisOp>& op : inbox) {
    SetTimer(op.get());
    Route(op.release());
  }
  if (stopped) return EndAll();
  RefreshIfDue();
  for (const auto& [address, server] : servers_) {
    PingIfDue(server.get());
    server->CloseStalled(now_, &returned_);
  }
  Handle();
  RunTimers();
  if (rung) EndCancelled();
  for (bool again = true; again;) {  // what one server gives back another may get
    for (const auto& [address, server] : servers_) server->Pump(now_, &returned_);
    again = !returned_.empty();
    Handle();
  }
  if (now_ - published_ >= kPublish) Publish();
}

// -- ops

void RedisClient::Loop::SetTimer(RedisOp* op) {
  timers_.erase({op->wake_, op});
  op->wake_ = op->deadline;
  if (op->server_ != 0 && !op->hedged_) {
    op->wake_ = std::min(op->wake_, op->asked_ + options_.hedge_after);
  }
  timers_.insert({op->wake_, op});
}

void RedisClient::Loop::Route(RedisOp* op) {
  if (op->cancel.stop_requested() && !op->begun_) return Finish(op, TierCancelled());
  if (op->deadline <= now_) return Finish(op, TierLate());
  if (!op->at && watch_.map() == nullptr) {
    if (watch_.down()) return Finish(op, Unavailable("REDIS_DOWN", watch_.why().message()));
    unrouted_.push_back(op);
    return;
  }
  Status why;
  RedisServer* const server = Choose(op, &why);
  if (server == nullptr) return Finish(op, why);
  server->Add(op, now_);
  SetTimer(op);
}

RedisServer* RedisClient::Loop::Choose(RedisOp* op, Status* why) {
  if (op->at) {
    op->hedged_ = true;
    return ServerAt(*op->at);
  }
  const RedisShard* const shard = watch_.map()->Find(op->slot);
  if (shard == nullptr) {
    *why = Unavailable("REDIS_SLOT", "no server of the cluster has the key's slot now");
    watch_.Soon(now_);
    return nullptr;
  }
  const bool replicas = options_.replica_reads && op->lane != Lane::kWrite && !op->master_only;
  const size_t servers = 1 + (replicas ? shard->replicas.size() : 0);
  for (size_t i = 0; i < servers; ++i) {
    const size_t n = (op->next_ + i) % servers;
    RedisServer* const server = ServerAt(n == 0 ? shard->master : shard->replicas[n - 1]);
    if (server->breaker().open()) continue;
    op->next_ = n;
    op->hedged_ |= servers == 1;
    return server;
  }
  *why = Unavailable("REDIS_LEFT_ALONE", "the key's servers failed and are left alone for a while");
  watch_.Soon(now_);
  return nullptr;
}

void RedisClient::Loop::Handle() {
  while (!returned_.empty()) {
    ReturnedOps returned;
    returned.swap(returned_);
    for (ReturnedOp& one : returned) {
      if (one.status.ok()) {
        HandleAnswer(one.op);
      } else {
        Retry(one.op, one.status, one.blameless);
      }
    }
  }
}

void RedisClient::Loop::Retry(RedisOp* op, const Status& why, bool blameless) {
  if (op->deadline <= now_) {
    return Finish(op, {Code::kDeadlineExceeded, "REDIS_SLOW", "no answer came by its deadline"});
  }
  if (!blameless) {
    ++op->failures_;
    ++op->next_;
    watch_.Soon(now_);
  }
  if (op->failures_ >= kMostFailures || (op->at && op->failures_ != 0)) return Finish(op, why);
  op->replies.clear();
  Route(op);
}

void RedisClient::Loop::HandleAnswer(RedisOp* op) {
  if (op->asking_ != nullptr) op->replies.erase(op->replies.begin());  // ASKING's own
  for (const RespReply& reply : op->replies) {
    if (reply.kind != RespReply::Kind::kError) continue;
    if (const auto to = RedirectionOf(reply, op->answered_by)) {
      if (op->replies.size() == 1) return Redirect(op, *to);
      if (!to->ask) watch_.Learn(*to);
      watch_.Soon(now_);
    } else if (Elsewhere(reply)) {
      watch_.Soon(now_);
      if (op->replies.size() == 1 && !op->at && op->failures_ + 1 < kMostFailures) {
        return Retry(op, Unavailable("REDIS_REFUSED", reply.text.substr(0, 200)), false);
      }
    }
  }
  const RedisAddress* const master = MasterOfWhatLacksIt(*op, watch_.map().get());
  if (master != nullptr && !ServerAt(*master)->breaker().open()) {
    op->replies.clear();
    op->next_ = 0;
    return Route(op);
  }
  Finish(op, OkStatus());
}

void RedisClient::Loop::Redirect(RedisOp* op, const Redirection& to) {
  if (++op->redirections_ > kMostRedirections) {
    return Finish(op, Unavailable("REDIS_REDIRECTED", "servers send each other the same request"));
  }
  watch_.Soon(now_);
  op->replies.clear();
  op->next_ = 0;
  if (to.ask) {
    op->at = to.to;
    op->asking_ = Asking(*op->request);
  } else {
    op->at.reset();
    op->asking_.reset();
    watch_.Learn(to);
  }
  Route(op);
}

void RedisClient::Loop::Finish(RedisOp* op, Status status) {
  timers_.erase({op->wake_, op});
  --client_.ops_;
  const std::unique_ptr<RedisOp> owned(op);
  op->status = std::move(status);
  op->done(*op);
}

void RedisClient::Loop::RunTimers() {
  while (!timers_.empty() && timers_.begin()->first <= now_) {
    RedisOp* const op = timers_.begin()->second;
    if (op->deadline <= now_) {
      Expire(op);
    } else {
      Hedge(op);
    }
    Handle();
  }
}

void RedisClient::Loop::Hedge(RedisOp* op) {
  RedisServer* const slow = Numbered(op->server_);
  if (slow != nullptr && slow->heard() + options_.hedge_after > now_) {  // busy, not silent
    op->asked_ = std::max(op->asked_, slow->heard());
    return SetTimer(op);
  }
  op->hedged_ = true;  // once
  if (slow != nullptr && slow->TakeBack(op)) {
    ++slow->stats().hedges;
    ++op->next_;
    return Route(op);
  }
  SetTimer(op);
}

void RedisClient::Loop::Expire(RedisOp* op) {
  RedisServer* const server = Numbered(op->server_);
  if (server == nullptr) {
    std::erase(unrouted_, op);
  } else if (op->link_ != 0) {
    return server->Close(op, now_, &returned_);  // gives it back among the others
  } else {
    (void)server->TakeBack(op);
  }
  Finish(op, TierLate());
}

void RedisClient::Loop::EndCancelled() {
  std::vector<RedisOp*> cancelled;
  for (const auto& [wake, op] : timers_) {
    if (!op->begun_ && op->cancel.stop_requested()) cancelled.push_back(op);
  }
  for (RedisOp* const op : cancelled) {
    if (RedisServer* const server = Numbered(op->server_)) (void)server->TakeBack(op);
    std::erase(unrouted_, op);
    Finish(op, TierCancelled());
  }
}

void RedisClient::Loop::EndAll() {
  ReturnedOps all;
  for (const auto& [address, server] : servers_) server->CloseAll(TierStopped(), now_, &all);
  servers_.clear();
  by_number_.clear();
  unrouted_.clear();
  while (!timers_.empty()) Finish(timers_.begin()->second, TierStopped());
}

// -- servers

RedisServer* RedisClient::Loop::ServerAt(const RedisAddress& address) {
  std::unique_ptr<RedisServer>& server = servers_[address];
  if (server == nullptr) {
    server = std::make_unique<RedisServer>(++last_number_, address, &options_, client_.epoll_.get(),
                                           &resolver_);
    by_number_[last_number_] = server.get();
  }
  return server.get();
}

RedisServer* RedisClient::Loop::Numbered(uint32_t number) {
  const auto it = by_number_.find(number);
  return it == by_number_.end() ? nullptr : it->second;
}

std::unique_ptr<RedisOp> RedisClient::Loop::Question(const RedisAddress& server,
                                                     RedisRequest request) {
  auto op = std::make_unique<RedisOp>();
  ++client_.ops_;
  op->request = std::make_shared<const RedisRequest>(std::move(request));
  op->at = server;
  op->deadline = now_ + options_.connect_timeout;
  return op;
}

void RedisClient::Loop::RefreshIfDue() {
  if (watch_.due() > now_) return;
  std::unique_ptr<RedisOp> op = Question(watch_.Begin(now_), RedisRequest({"CLUSTER", "SLOTS"}));
  op->done = [this](RedisOp& ended) { Refreshed(ended); };
  SetTimer(op.get());
  Route(op.release());
}

void RedisClient::Loop::Refreshed(const RedisOp& op) {
  if (op.status.reason() == TierStopped().reason()) return;
  const bool was_down = watch_.down();
  if (!watch_.End(op, now_) && !watch_.down()) return;
  if (was_down != watch_.down()) published_ = {};
  if (!watch_.down()) DropServers();
  Publish();  // first: whoever waited for a map sees it when its op ends
  std::vector<RedisOp*> unrouted;
  unrouted.swap(unrouted_);
  for (RedisOp* const waiting : unrouted) Route(waiting);
}

void RedisClient::Loop::PingIfDue(RedisServer* server) {
  if (!server->breaker().open() || pinged_.contains(server)) return;
  if (!server->breaker().Allow(now_)) return;
  pinged_.insert(server);
  std::unique_ptr<RedisOp> op = Question(server->address(), RedisRequest({"PING"}));
  op->done = [this, server](RedisOp&) { pinged_.erase(server); };
  SetTimer(op.get());
  Route(op.release());
}

void RedisClient::Loop::DropServers() {
  for (auto it = servers_.begin(); it != servers_.end();) {
    RedisServer* const server = it->second.get();
    if (watch_.Names(it->first) || !server->idle() || pinged_.contains(server)) {
      ++it;
      continue;
    }
    by_number_.erase(server->number());
    it = servers_.erase(it);
  }
}

void RedisClient::Loop::Publish() {
  std::vector<RedisServerStats> servers;
  std::string illness;
  for (const auto& [address, server] : servers_) {
    RedisServerStats stats = server->stats();
    stats.open = server->breaker().open();
    // One that fails and that the cluster does not list is none of it, whoever named it at the
    // start.
    if (stats.open && watch_.map() != nullptr && !watch_.down() && !watch_.Lists(address)) continue;
    if (stats.open && illness.empty() && watch_.IsMaster(address)) {
      illness = "server " + address.ToString() + " failed and is left alone: " + stats.last_error;
    }
    servers.push_back(std::move(stats));
  }
  if (const size_t slots = watch_.unserved(); slots != 0 && illness.empty()) {
    illness = "no server has " + std::to_string(slots) + " of the cluster's " +
              std::to_string(kSlots) + " slots";
  }
  if (watch_.down()) {
    illness = std::string(watch_.why().reason() == "REDIS_LOGIN" ? "the servers let nobody in: "
                                                                 : "no server answers: ") +
              watch_.why().ToString();
  }
  published_ = now_;
  MutexLock lock(client_.mu_);
  client_.servers_ = std::move(servers);
  client_.illness_ = std::move(illness);
  client_.map_ = watch_.map();
}

}  // namespace kvstrata::redis
