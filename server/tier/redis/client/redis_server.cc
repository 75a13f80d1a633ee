// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_server.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

namespace kvstrata::redis {
namespace {

constexpr uint32_t kFailures = 3;  // timeouts in a row that open the breaker
constexpr std::chrono::milliseconds kFirstPause{100}, kLongestPause{3000};
// In flight on a connection: of values enough to hide a round trip, and of probes any call's.
constexpr std::array<size_t, kLanes> kDepths = {64, 4, 4};

}  // namespace

RedisServer::RedisServer(uint32_t number, RedisAddress address, const RedisClientOptions* options,
                         int epoll, RedisResolver* resolver)
    : number_(number),
      address_(std::move(address)),
      options_(*options),
      epoll_(epoll),
      resolver_(resolver),
      breaker_(kFailures, kFirstPause, kLongestPause) {
  stats_.address = address_;
}

void RedisServer::Add(RedisOp* op, Time now) {
  std::list<RedisOp*>& queue = queues_[static_cast<size_t>(op->lane)];
  op->server_ = number_;
  op->link_ = 0;
  op->asked_ = now;
  op->queued_ = true;
  op->place_ = queue.insert(queue.end(), op);
}

bool RedisServer::TakeBack(RedisOp* op) {
  if (op->queued_) {
    queues_[static_cast<size_t>(op->lane)].erase(op->place_);
    op->queued_ = false;
  } else {
    const auto it = links_.find(op->link_);
    if (it == links_.end() || !it->second.connection->LetGo(op)) return false;
  }
  op->server_ = 0;
  op->link_ = 0;
  return true;
}

RedisServer::Links::iterator RedisServer::Choose(Lane lane, size_t* links, bool* connecting) {
  auto best = links_.end();
  *links = 0;
  *connecting = false;
  for (auto it = links_.begin(); it != links_.end(); ++it) {
    if (it->second.lane != lane) continue;
    ++*links;
    const RedisConnection& connection = *it->second.connection;
    *connecting |= !connection.ready();
    if (!connection.ready()) continue;
    if (best == links_.end() || connection.in_flight() < best->second.connection->in_flight()) {
      best = it;
    }
  }
  return best;
}

void RedisServer::Pump(Time now, ReturnedOps* returned) {
  for (size_t lane = 0; lane < kLanes; ++lane) PumpLane(static_cast<Lane>(lane), now, returned);
  stats_.connections = links_.size();
}

void RedisServer::PumpLane(Lane lane, Time now, ReturnedOps* returned) {
  std::list<RedisOp*>& queue = queues_[static_cast<size_t>(lane)];
  while (!queue.empty()) {
    size_t links = 0;
    bool connecting = false;
    const auto link = Choose(lane, &links, &connecting);
    const size_t in_flight = link == links_.end() ? SIZE_MAX : link->second.connection->in_flight();
    if (in_flight != 0 && links < options_.connections && !connecting) {
      const Status begun = Connect(lane, now);
      if (!begun.ok() && links == 0) {
        Blame(true, now);
        return ReturnQueue(lane, begun, returned);
      }
    }
    if (in_flight >= kDepths[static_cast<size_t>(lane)]) return;
    RedisOp* const op = queue.front();
    queue.pop_front();
    op->queued_ = false;
    Send(link, op, now);
  }
}

Status RedisServer::Connect(Lane lane, Time now) {
  std::optional<Result<SocketAddress>> address = resolver_->Find(address_);
  if (!address) return OkStatus();  // the next Pump knows
  KVS_RETURN_IF_ERROR(address->status());
  KVS_ASSIGN_OR_RETURN(RedisSocket socket,
                       RedisSocket::Connect(**address, options_.tls.get(), address_.host));
  const uint64_t id = uint64_t{number_} << 32 | ++last_link_;
  Link& link = links_[id];
  link = {lane, now,
          std::make_unique<RedisConnection>(std::move(socket), options_.login, lane != Lane::kWrite,
                                            now)};
  epoll_event event{};
  event.events = link.events = EPOLLIN | EPOLLOUT;
  event.data.u64 = id;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, link.connection->fd(), &event) == 0) return OkStatus();
  links_.erase(id);
  return Unavailable("REDIS_CONNECT", "no memory to poll one more connection");
}

void RedisServer::Send(Links::iterator link, RedisOp* op, Time now) {
  auto exchange = std::make_unique<RedisExchange>();
  exchange->request = op->asking_ != nullptr ? op->asking_ : op->request;
  exchange->target = op->target;
  exchange->to_target = op->to_target;
  exchange->owner = op;
  op->link_ = link->first;
  op->begun_ = true;
  op->asked_ = now;
  ++stats_.requests;
  link->second.connection->Send(std::move(exchange), now);
  Watch(link->first, &link->second);
}

void RedisServer::Watch(uint64_t id, Link* link) {
  const uint32_t events = EPOLLIN | (link->connection->wants_write() ? EPOLLOUT : 0U);
  if (events == link->events) return;
  epoll_event event{};
  event.events = link->events = events;
  event.data.u64 = id;
  (void)epoll_ctl(epoll_, EPOLL_CTL_MOD, link->connection->fd(), &event);
}

void RedisServer::Move(uint64_t id, Time now, ReturnedOps* returned) {
  const auto it = links_.find(id);
  if (it == links_.end()) return;
  Link& link = it->second;
  RedisConnection::Exchanges ended;
  const Status moved = link.connection->Move(now, &ended);
  const RedisConnection::Traffic traffic = link.connection->TakeTraffic();
  stats_.sent += traffic.sent;
  stats_.received += traffic.received;
  heard_ = std::max(heard_, link.connection->heard());
  if (!ended.empty()) {  // a connection alone says nothing: the kernel of a stopped server makes it
    breaker_.Succeeded();
    stats_.last_error.clear();
  }
  for (std::unique_ptr<RedisExchange>& exchange : ended) {
    auto* const op = static_cast<RedisOp*>(exchange->owner);
    if (op == nullptr) continue;
    op->replies = std::move(exchange->replies);
    Count(*op, true, now);
    op->answered_by = address_;
    op->server_ = 0;
    op->link_ = 0;
    returned->push_back({op, OkStatus()});
  }
  if (!moved.ok()) {
    const bool refused = !link.connection->ready() || moved.reason() == "REDIS_LOGIN";
    return End(it, moved, refused ? Cause::kServer : Cause::kCut, now, returned);
  }
  Watch(id, &link);
}

void RedisServer::End(Links::iterator it, const Status& why, Cause cause, Time now,
                      ReturnedOps* returned) {
  const Link link = std::move(it->second);
  links_.erase(it);  // the descriptor goes with `link`
  const bool owed = link.connection->in_flight() != 0;
  const bool connected = link.connection->ready();
  const bool blameless = cause == Cause::kDeadline || cause == Cause::kSilence;
  for (std::unique_ptr<RedisExchange>& exchange : link.connection->TakeUnanswered()) {
    auto* const op = static_cast<RedisOp*>(exchange->owner);
    op->server_ = 0;
    op->link_ = 0;
    Count(*op, false, now);
    returned->push_back({op, why, blameless && op->deadline > now});
  }
  // The server closed one that was not in use.
  if (connected && !owed && cause != Cause::kServer) return;
  ++stats_.failures;
  stats_.last_error = why.ToString();
  if (cause != Cause::kDeadline) Blame(cause == Cause::kServer, now);
  if (!breaker_.open()) return;
  for (size_t lane = 0; lane < kLanes; ++lane) ReturnQueue(static_cast<Lane>(lane), why, returned);
}

void RedisServer::Blame(bool for_sure, Time now) {
  const bool was_open = breaker_.open();
  for_sure ? breaker_.FailedForSure(now) : breaker_.Failed(now);
  stats_.openings += !was_open && breaker_.open();
}

void RedisServer::Count(const RedisOp& op, bool answered, Time now) {
  if (answered) stats_.times.Add(std::max(now, op.asked_) - op.asked_);
  const bool read = op.lane == Lane::kRead;
  // Questions to one server, such as a PING, and those before a value is put are no look for one.
  const bool asks_one = op.at && op.asking_ == nullptr;
  const bool probe = op.lane == Lane::kProbe && !op.master_only && !asks_one;
  if (!read && !probe) return;
  RedisAnswers& answers = read ? stats_.reads : stats_.probes;
  if (!answered) {
    (op.deadline > now ? answers.lost : answers.late) += op.request->commands();
    return;
  }
  // The first is that of ASKING.
  for (size_t i = op.asking_ != nullptr; i < op.replies.size(); ++i) {
    const RespReply& reply = op.replies[i];
    const bool error = reply.kind == RespReply::Kind::kError;
    const bool there = reply.kind == RespReply::Kind::kBulk && reply.integer != 0;
    ++(error ? answers.refused : there ? answers.hits : answers.absent);
  }
}

void RedisServer::ReturnQueue(Lane lane, const Status& why, ReturnedOps* returned) {
  for (RedisOp* const op : queues_[static_cast<size_t>(lane)]) {
    op->queued_ = false;
    op->server_ = 0;
    returned->push_back({op, why});
  }
  queues_[static_cast<size_t>(lane)].clear();
  stats_.last_error = why.ToString();
}

void RedisServer::Close(const RedisOp* op, Time now, ReturnedOps* returned) {
  const auto it = links_.find(op->link_);
  if (it == links_.end()) return;
  ++stats_.timeouts;
  const bool silent = it->second.connection->heard() < op->asked_;
  End(it, Unavailable("REDIS_SLOW", "the server did not answer in time"),
      silent ? Cause::kSilence : Cause::kDeadline, now, returned);
}

void RedisServer::CloseAll(const Status& why, Time now, ReturnedOps* returned) {
  for (size_t lane = 0; lane < kLanes; ++lane) ReturnQueue(static_cast<Lane>(lane), why, returned);
  while (!links_.empty()) End(links_.begin(), why, Cause::kServer, now, returned);
}

RedisServer::Time RedisServer::StallOf(const Link& link) const {
  if (!link.connection->ready()) return link.begun + options_.connect_timeout;
  if (link.connection->in_flight() == 0) return Time::max();
  return link.connection->progress() + options_.stall_timeout;
}

RedisServer::Time RedisServer::next_stall() const {
  Time next = Time::max();
  for (const auto& [id, link] : links_) next = std::min(next, StallOf(link));
  return next;
}

void RedisServer::CloseStalled(Time now, ReturnedOps* returned) {
  for (bool found = true; found;) {
    const auto late =
        std::ranges::find_if(links_, [&](const auto& link) { return StallOf(link.second) <= now; });
    found = late != links_.end();
    if (!found) continue;
    ++stats_.timeouts;
    End(late, Unavailable("REDIS_SLOW", "the server is silent"), Cause::kServer, now, returned);
  }
}

bool RedisServer::idle() const {
  return std::ranges::all_of(queues_, [](const auto& queue) { return queue.empty(); }) &&
         std::ranges::all_of(
             links_, [](const auto& link) { return link.second.connection->in_flight() == 0; });
}

}  // namespace kvstrata::redis
