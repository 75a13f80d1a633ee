// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/node_list.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"
#include "server/tier/remote/stripe_cipher.h"

namespace kvstrata {
namespace {

using redis::RedisOp;
using redis::RedisRequest;
using redis::RespReply;
using remote::kNodeSeats;
using remote::NodeAnnouncement;
using Clock = std::chrono::steady_clock;

constexpr const char* kAnnounceThread = "kvs-announce";
constexpr uint32_t kPatience = 10;  // it waits for servers, for kRequest each time
constexpr std::chrono::milliseconds kRequest{1000};
constexpr std::chrono::milliseconds kFarewell{200};

uint64_t RandomNode() {
  const auto salt = remote::RandomSalt();
  uint64_t node = 0;
  std::memcpy(&node, salt.data(), sizeof(node));
  return node;
}

Status Refused(const RespReply& error) {
  return Unavailable("REDIS_REFUSED", "the server says: " + error.text.substr(0, 200));
}

}  // namespace

NodeList::NodeList(NodeListOptions options, const remote::NodeKeys& keys,
                   std::shared_ptr<RedisThreads> threads)
    : options_(std::move(options)), keys_(keys), threads_(std::move(threads)), node_(RandomNode()) {
  threads_->Join();
}

NodeList::~NodeList() {
  Stop();
  threads_->Leave();
}

void NodeList::Start() {
  KVS_CHECK(!options_.address.empty());
  thread_ = StartThread(kAnnounceThread, [this] { Serve(); });
}

void NodeList::Stop() {
  {
    MutexLock lock(mu_);
    if (std::exchange(stopping_, true)) return;
    stopped_.notify_all();
  }
  stop_.request_stop();
  threads_->client().WakeUp();
  if (thread_.joinable()) thread_.join();
  {
    std::unique_lock<std::mutex> lock(mu_.native());
    stopped_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return reading_ == 0; });
  }
  if (!seat_) return;
  const std::string name = keys_.NameOf(*seat_);
  auto op = std::make_unique<RedisOp>();
  op->request =
      std::make_shared<const RedisRequest>(std::initializer_list<std::string_view>{"UNLINK", name});
  op->lane = redis::Lane::kWrite;
  op->slot = redis::SlotOf(name);
  op->deadline = Clock::now() + kFarewell;
  std::vector<RespReply> replies;
  (void)Await(std::move(op), &replies);  // else it is listed until its time is over
}

// --- the list ------------------------------------------------------------------------------------

std::unique_ptr<RedisOp> NodeList::NewRead(Time deadline) const {
  RedisRequest request;
  for (uint32_t seat = 0; seat < kNodeSeats; ++seat) request.Add({"GET", keys_.NameOf(seat)});
  auto op = std::make_unique<RedisOp>();
  op->request = std::make_shared<const RedisRequest>(std::move(request));
  op->slot = redis::SlotOf(keys_.NameOf(0));
  op->deadline = std::min(deadline, Clock::now() + kRequest);
  op->cancel = stop_.get_token();
  return op;
}

// While the slot moves, what cannot be told is nothing.
Result<NodeList::Seats> NodeList::SeatsOf(const RedisOp& op) {
  KVS_RETURN_IF_ERROR(op.status);
  Seats seats;
  size_t errors = 0;
  for (const RespReply& reply : op.replies) {
    errors += reply.kind == RespReply::Kind::kError;
    seats.push_back(reply.kind == RespReply::Kind::kBulk ? reply.text : std::string());
  }
  if (errors == seats.size()) return Refused(op.replies.front());
  return seats;
}

ListedNodes NodeList::ListOf(const Seats& seats, std::optional<uint32_t>* own) const {
  const auto now = std::chrono::system_clock::now();
  const auto age = std::chrono::duration_cast<std::chrono::seconds>(options_.ttl);
  ListedNodes list;
  std::map<std::string, NodeAnnouncement> by_address;
  for (uint32_t seat = 0; seat < seats.size(); ++seat) {
    if (seats[seat].empty()) continue;
    Result<NodeAnnouncement> node = keys_.Read(seats[seat], seat, now, age);
    if (!node.ok()) {
      ++list.refused;
      continue;
    }
    if (node->node == node_ && own != nullptr) *own = seat;
    const auto found = by_address.find(node->address);
    if (found != by_address.end() && found->second.written > node->written) continue;
    by_address[node->address] = std::move(*node);
  }
  for (auto& [address, node] : by_address) list.nodes.push_back(std::move(node));
  return list;
}

void NodeList::Keep(const ListedNodes& list) {
  MutexLock lock(mu_);
  known_ = list;
  known_at_ = Clock::now();
}

void NodeList::Find(Time deadline, Done done) {
  std::optional<ListedNodes> known;
  bool stopping = false;
  {
    MutexLock lock(mu_);
    const auto age = Clock::now() - known_at_;
    if (known_ && (age <= options_.fresh || (reading_ != 0 && age <= options_.ttl))) known = known_;
    stopping = stopping_;
    if (!known && !stopping) ++reading_;
  }
  if (known) return done(*known);
  if (stopping) return done(Unavailable("DAEMON_STOPPING", "the daemon is stopping"));
  auto op = NewRead(deadline);
  op->done = [this, done = std::move(done)](RedisOp& ended) {
    threads_->Later([this, done, seats = SeatsOf(ended)] { Read(seats, done); });
  };
  threads_->client().Submit(std::move(op));
}

// The list that was known before is better than none.
void NodeList::Read(const Result<Seats>& seats, const Done& done) {
  if (seats.ok()) Keep(ListOf(*seats, nullptr));
  std::optional<ListedNodes> known;
  {
    MutexLock lock(mu_);
    if (known_ && Clock::now() - known_at_ <= options_.ttl) known = known_;
  }
  Survive(kAnnounceThread, [&] { done(known ? Result<ListedNodes>(*known) : seats.status()); });
  MutexLock lock(mu_);
  --reading_;
  stopped_.notify_all();
}

// --- this node -----------------------------------------------------------------------------------

Status NodeList::Await(std::unique_ptr<RedisOp> op, std::vector<RespReply>* replies) {
  RedisOp ended = RedisOps(threads_.get()).Ask(std::move(op));
  *replies = std::move(ended.replies);
  return ended.status;
}

Result<bool> NodeList::Write(uint32_t seat, bool only_if_free) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  NodeAnnouncement node;
  node.seat = seat;
  node.node = node_;
  node.written =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  node.address = options_.address;
  node.release = options_.release.substr(0, remote::kMaxNodeReleaseBytes);
  const std::string name = keys_.NameOf(seat), value = keys_.Write(node);
  const std::string ttl = std::to_string(options_.ttl.count());
  RedisRequest request;
  if (only_if_free) {
    request.Add({"SET", name, value, "PX", ttl, "NX"});
  } else {
    request.Add({"SET", name, value, "PX", ttl});
  }
  auto op = std::make_unique<RedisOp>();
  op->request = std::make_shared<const RedisRequest>(std::move(request));
  op->lane = redis::Lane::kWrite;
  op->slot = redis::SlotOf(name);
  op->deadline = Clock::now() + kRequest;
  op->cancel = stop_.get_token();
  std::vector<RespReply> replies;
  KVS_RETURN_IF_ERROR(Await(std::move(op), &replies));
  if (replies.front().kind == RespReply::Kind::kError) return Refused(replies.front());
  return replies.front().kind == RespReply::Kind::kText;
}

// At the seat that it has, or at the first free one from a place of its own on.
Status NodeList::Announce() {
  auto read = NewRead(Clock::now() + kRequest);
  read->master_only = true;
  RedisOp ended;
  ended.status = Await(std::move(read), &ended.replies);
  KVS_ASSIGN_OR_RETURN(const Seats seats, SeatsOf(ended));
  std::optional<uint32_t> own;
  Keep(ListOf(seats, &own));
  if (own) {
    seat_ = own;
    return Write(*own, false).status();
  }
  for (uint32_t i = 0; i < seats.size(); ++i) {
    const auto seat = static_cast<uint32_t>((node_ + i) % kNodeSeats);
    if (!seats[seat].empty()) continue;
    KVS_ASSIGN_OR_RETURN(const bool taken, Write(seat, true));
    if (!taken) continue;  // by another node, since then
    seat_ = seat;
    return OkStatus();
  }
  return ResourceExhausted("NODES_FULL",
                           "1024 nodes have announced themselves already, or others "
                           "write under kv1:*; see who writes in the servers");
}

void NodeList::TellOutcome(const Status& outcome) {
  const bool changed = !told_ || told_well_ != outcome.ok();
  told_ = true;
  told_well_ = outcome.ok();
  if (!changed) return;
  if (outcome.ok()) {
    LogEvent(LogLevel::kInfo, "node_announced", {{"address", options_.address}, {"seat", *seat_}});
    return;
  }
  LogEvent(
      LogLevel::kWarn, "node_unannounced",
      {{"address", options_.address}, {"reason", outcome.reason()}, {"why", outcome.message()}});
}

void NodeList::Serve() {
  Heartbeat beat(kAnnounceThread, kPatience);
  for (;;) {
    Status outcome = Unavailable("MEMORY", "the daemon has no memory to announce itself");
    {
      const LoopIteration iteration(&beat);
      Survive(kAnnounceThread, [&] { outcome = Announce(); });
    }
    if (stop_.stop_requested()) return;
    Survive(kAnnounceThread, [&] { TellOutcome(outcome); });
    std::unique_lock<std::mutex> lock(mu_.native());
    const bool over =
        stopped_.wait_for(lock, outcome.ok() ? options_.renew : options_.retry,
                          [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_; });
    if (over) return;
  }
}

}  // namespace kvstrata
