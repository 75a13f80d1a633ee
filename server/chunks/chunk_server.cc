// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_server.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <latch>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "server/chunks/chunk_door.h"
#include "server/chunks/chunk_tiers.h"
#include "server/chunks/room/chunk_room.h"
#include "server/chunks/room/chunk_work.h"
#include "server/sockets/event_poll.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

// ChunkBoard: the numbers of chunks as of the last time that something happened, for whoever asks;
// and the log's line when engines begin to get no credits (event=chunks_full).
//
// Thread-safety: Put is the loop's; Get from any thread. Cost: a lock, and a copy.
class ChunkBoard {
 public:
  void Put(const ChunkNumbers& numbers) KVS_EXCLUDES(mu_) {
    TellFull(numbers);
    MutexLock lock(mu_);
    numbers_ = numbers;
  }
  ChunkNumbers Get() const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return numbers_;
  }

 private:
  void TellFull(const ChunkNumbers& now) {
    const bool was = std::exchange(full_, now.starved > 0);
    uint64_t suppressed = 0;
    if (was || !full_ || !log_.Allow(&suppressed)) return;
    LogEvent(LogLevel::kWarn, "chunks_full",
             {{"leased_bytes", now.leased.bytes},
              {"credited_bytes", now.of(ChunkState::kCredited).bytes},
              {"suppressed", suppressed}});
  }

  LogLimiter log_{1};
  bool full_ = false;
  mutable Mutex mu_;
  ChunkNumbers numbers_ KVS_GUARDED_BY(mu_);
};

// ChunkWorkers: whoever does the room's work: the thread of sums, and the tiers below.
//
// Thread-safety: any thread. Nothing blocks but the end, which waits for the chunk that is being
// summed.
class ChunkWorkers {
 public:
  // `wake`: called when something is done; for as long as a tier has a call of this.
  ChunkWorkers(const ChunkTiersOptions& tiers, std::function<void()> wake)
      : inbox_(std::make_shared<ChunkInbox>(std::move(wake))),
        tiers_(tiers, inbox_),
        sums_(inbox_) {}

  const ChunkTiers& tiers() const { return tiers_; }
  void Start(std::vector<ChunkWork> work) {
    std::vector<ChunkWork> below;
    for (ChunkWork& one : work) {
      const bool sum = one.kind == ChunkWork::Kind::kSum || one.kind == ChunkWork::Kind::kVerify;
      sum ? sums_.Add(std::move(one)) : below.push_back(std::move(one));
    }
    if (!below.empty()) tiers_.Start(std::move(below));
  }
  std::vector<ChunkDone> TakeDone() { return inbox_->TakeAll(); }

 private:
  const std::shared_ptr<ChunkInbox> inbox_;
  const ChunkTiers tiers_;
  ChunkSums sums_;
};

constexpr int kTickMs = 100;              // while something may be late
constexpr int kPacketsPerIteration = 16;  // packets of one client, before others are served
constexpr uint32_t kReadable = EPOLLIN | EPOLLRDHUP;

Status StartError(const char* what) {
  return Internal("CHUNKS_START", std::string("cannot start the chunk server: ") + what + ": " +
                                      std::strerror(errno));
}

}  // namespace

// ChunkServer::Loop: the thread that serves the chunk socket. For chunk_server.cc alone.
//
// Thread-safety: what is public, from any thread; the rest is the loop's. It has the lock but while
// it sleeps, so that whoever looks at the room sees it between two iterations.
class ChunkServer::Loop {
 public:
  Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener);
  ~Loop() { Stop(); }
  Status Start();
  void EndServing();
  void Stop();
  ChunkNumbers Numbers() const { return board_.Get(); }
  // What `look` says of the room; it is given null when no engine has come yet.
  template <typename F>
  auto Look(const F& look) const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return look(room_.get());
  }

 private:
  struct Connection {
    std::unique_ptr<ChunkGuest> who;
    bool writable = false;  // it is watched for room
  };

  void Run();
  void RunIteration() KVS_EXCLUDES(mu_);
  void OnEvent(const epoll_event& event) KVS_REQUIRES(mu_);
  void OnSocket(uint64_t number, uint32_t events) KVS_REQUIRES(mu_);
  void OnPacket(Connection* c, size_t bytes) KVS_REQUIRES(mu_);
  void OnDead(uint32_t process) KVS_REQUIRES(mu_);
  // Who has said HELLO is welcome, or refused.
  void Receive(std::unique_ptr<ChunkGuest> guest) KVS_REQUIRES(mu_);
  Status Join(ChunkGuest* guest) KVS_REQUIRES(mu_);
  // A room of that user's, made if need be.
  Status TakeRoom(uint32_t user) KVS_REQUIRES(mu_);
  // What came of work, and what goes out; until nothing does.
  void Flush() KVS_REQUIRES(mu_);
  void Send(uint64_t connection, std::vector<std::byte> packet) KVS_REQUIRES(mu_);
  void End(uint64_t connection, std::string_view why) KVS_REQUIRES(mu_);
  // The same, behind what it has sent.
  void EndBehindPackets(uint64_t connection, std::string_view why) KVS_REQUIRES(mu_);

  const ChunkServerOptions options_;
  EventPoll events_;
  UniqueFd stop_event_;
  std::unique_ptr<ChunkDoor> door_;
  LogLimiter log_{10};
  ChunkBoard board_;
  Heartbeat beat_{"kvs-chunks"};
  std::unique_ptr<ChunkWorkers> workers_;

  ChunkCounters counters_;
  mutable Mutex mu_;
  std::unique_ptr<ChunkRoom> room_ KVS_GUARDED_BY(mu_);  // null: no engine has come yet
  uint64_t rooms_ = 0;
  std::map<uint64_t, Connection> connections_;
  ChunkProcesses processes_{&events_};
  std::array<std::byte, chunks::kMostChunkPacket + 1> packet_;
  bool ending_ = false;  // it serves nobody any more
  std::latch ended_{1};  // and that is done
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

// -- start and stop

ChunkServer::Loop::Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener)
    : options_(options),
      door_(std::make_unique<ChunkDoor>(options.door, std::move(listener), &events_)) {}

Status ChunkServer::Loop::Start() {
  const bool opened = events_.Open();
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!opened || !stop_event_) return StartError("descriptors");
  if (!events_.Watch(stop_event_.get(), EventPoll::kStop, 0, EPOLLIN) || !events_.WatchWake()) {
    return StartError("epoll");
  }
  door_->Listen();
  ChunkNumbers none;
  none.capacity_bytes = options_.bytes;
  board_.Put(none);
  try {
    workers_ = std::make_unique<ChunkWorkers>(options_.tiers, events_.waker());
    thread_ = StartThread("kvs-chunks", [this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what());
  }
  return OkStatus();
}

void ChunkServer::Loop::EndServing() {
  if (!thread_.joinable()) return;
  KVS_CHECK(eventfd_write(stop_event_.get(), 1) == 0);
  ended_.wait();
}

void ChunkServer::Loop::Stop() {
  if (!thread_.joinable()) return;
  EndServing();
  stopping_ = true;
  events_.Wake();
  thread_.join();
  workers_.reset();
  connections_.clear();
  door_.reset();
}

// -- the loop

void ChunkServer::Loop::Run() {
  while (!stopping_) {
    Survive("kvs-chunks", [this] { RunIteration(); });
    if (ending_ && !ended_.try_wait()) ended_.count_down();
  }
}

void ChunkServer::Loop::RunIteration() {
  std::array<epoll_event, 64> events;
  const int n = events_.Wait(events, !ending_ && door_->waits() ? kTickMs : -1);
  MutexLock lock(mu_);
  const LoopIteration iteration(&beat_);
  for (int i = 0; i < n; ++i) OnEvent(events[i]);
  if (!ending_) door_->Tick();
  Flush();
  ChunkNumbers numbers;
  if (room_ != nullptr) numbers = room_->Numbers();
  numbers.capacity_bytes = options_.bytes;
  numbers.counters = counters_;
  board_.Put(numbers);
}

void ChunkServer::Loop::OnEvent(const epoll_event& event) {
  using enum EventPoll::Kind;
  const EventPoll::Kind kind = EventPoll::KindOf(event);
  const uint64_t number = EventPoll::NumberOf(event);
  if (kind == kStop) {
    ending_ = true;
    events_.Unwatch(stop_event_.get());
    while (!connections_.empty()) EndBehindPackets(connections_.begin()->first, "the daemon stops");
    door_->Close();
  } else if (kind == kListener) {
    if (!ending_) door_->Accept();
  } else if (kind == kPidfd) {
    if (const auto process = processes_.ProcessOf(number)) OnDead(*process);
  } else if (kind == kSocket) {
    if (connections_.contains(number)) return OnSocket(number, event.events);
    if (!door_->has(number)) return;  // ended by an earlier event of this iteration
    if (auto guest = door_->OnSocket(number)) Receive(std::move(guest));
  }  // kWake only wakes us
}

void ChunkServer::Loop::OnSocket(uint64_t number, uint32_t events) {
  Connection* const c = &connections_.at(number);
  ChunkLink* const link = &c->who->link;
  if ((events & EPOLLOUT) != 0) {
    if (!link->SendWaiting()) return End(number, "eof");
    if (!link->has_waiting()) {
      c->writable = false;
      events_.Rewatch(link->fd(), EventPoll::kSocket, number, kReadable);
    }
  }
  if ((events & ~uint32_t{EPOLLOUT}) == 0) return;
  for (int i = 0; i < kPacketsPerIteration; ++i) {
    size_t bytes = 0;
    switch (link->Receive(packet_, &bytes)) {
      case ReceiveOutcome::kNothing:
        return;
      case ReceiveOutcome::kEnd:
        return End(number, "eof");
      case ReceiveOutcome::kDescriptors:
        return End(number, "a packet that passes descriptors");
      case ReceiveOutcome::kPacket:
        OnPacket(c, bytes);
    }
    if (!connections_.contains(number)) return;
  }
}

void ChunkServer::Loop::OnPacket(Connection* c, size_t bytes) {
  const uint64_t number = c->who->number;
  Status status = MalformedPacket("it has more than 65536 bytes");
  if (bytes <= chunks::kMostChunkPacket) {
    status = room_->OnPacket(number, std::span(packet_).first(bytes));
  }
  if (status.ok()) return;
  uint64_t suppressed = 0;
  if (log_.Allow(&suppressed)) {
    LogEvent(LogLevel::kWarn, "chunk_client_malformed",
             {{"engine", c->who->hello.engine},
              {"pid", c->who->peer.pid},
              {"uid", c->who->peer.uid},
              {"why", status.message()},
              {"suppressed", suppressed}});
  }
  End(number, "malformed packet");
}

void ChunkServer::Loop::OnDead(uint32_t process) {
  std::vector<uint64_t> its;
  for (const auto& [number, c] : connections_) {
    if (c.who->process == process) its.push_back(number);
  }
  for (const uint64_t number : its) EndBehindPackets(number, "died");
  processes_.Remove(process);
  if (room_ != nullptr) room_->OnDead(process);
}

void ChunkServer::Loop::End(uint64_t connection, std::string_view why) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  const std::unique_ptr<ChunkGuest> who = std::move(found->second.who);
  connections_.erase(found);
  events_.Unwatch(who->link.fd());
  door_->Left(who->peer);
  room_->Leave(connection);
  processes_.RemoveUnless([room = room_.get()](uint32_t p) { return room->Awaits(p); });
  LogEvent(LogLevel::kInfo, "chunk_engine_left",
           {{"engine", who->hello.engine},
            {"pid", who->peer.pid},
            {"uid", who->peer.uid},
            {"why", why}});
}

// What it said to be stored is, although it is gone, or we are.
void ChunkServer::Loop::EndBehindPackets(uint64_t connection, std::string_view why) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  const ChunkLink* const link = &found->second.who->link;
  shutdown(link->fd(), SHUT_RD);  // nothing more comes
  size_t bytes = 0;
  while (connections_.contains(connection)) {
    if (link->Receive(packet_, &bytes) != ReceiveOutcome::kPacket) return End(connection, why);
    OnPacket(&found->second, bytes);
  }
}

// -- who comes

Status ChunkServer::Loop::TakeRoom(uint32_t user) {
  if (options_.bytes == 0) {
    return Unavailable("CHUNKS_OFF",
                       "chunks.bytes is 0, so this daemon keeps no chunks; set it (--set "
                       "chunks.bytes=8GiB) and restart the daemon, or switch the offload off");
  }
  if (room_ != nullptr && room_->user() == user) return OkStatus();
  if (room_ != nullptr && room_->in_use()) {
    return ResourceExhausted(
        "CHUNKS_FULL", "all of chunks.bytes (" + std::to_string(options_.bytes) + ") is user " +
                           std::to_string(room_->user()) +
                           "'s, whose engines are still there; end them, or run a daemon of "
                           "your own (--socket PATH)");
  }
  ChunkRoomOptions options;
  options.serial = ++rooms_;
  options.user = user;
  options.bytes = options_.bytes;
  options.layout_percent = options_.layout_percent;
  options.write_shown = options_.tiers.write_shown;
  options.write_reused = options_.tiers.write_reused;
  options.counters = &counters_;
  options.recalls = options_.recalls;
  if (workers_->tiers().any()) {
    options.find = [this](std::span<ChunkFind> finds) { workers_->tiers().Find(finds); };
  }
  room_.reset();  // its memory first
  KVS_ASSIGN_OR_RETURN(room_, ChunkRoom::Make(options));
  LogEvent(LogLevel::kInfo, "chunk_region",
           {{"uid", user},
            {"bytes", options_.bytes},
            {"slab_bytes", ChunkRegion::SlabBytes(options_.bytes)}});
  return OkStatus();
}

Status ChunkServer::Loop::Join(ChunkGuest* guest) {
  if (options_.bytes != 0) {
    KVS_RETURN_IF_ERROR(ChunkRoom::CheckRow(guest->hello.row_bytes, options_.bytes));
  }
  if (processes_.IsStale(guest->process)) OnDead(guest->process);
  KVS_RETURN_IF_ERROR(TakeRoom(guest->peer.uid));
  if (!processes_.Add(guest->process, std::move(guest->pidfd))) {
    return ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more processes");
  }
  return room_->Join(guest->hello);
}

void ChunkServer::Loop::Receive(std::unique_ptr<ChunkGuest> guest) {
  if (const Status status = Join(guest.get()); !status.ok()) {
    return door_->Refuse(std::move(guest), status);
  }
  const uint64_t number = guest->number;
  guest->hello.engine = Printable(guest->hello.engine);
  LogEvent(LogLevel::kInfo, "chunk_engine_attached",
           {{"engine", guest->hello.engine},
            {"client", Printable(guest->client)},
            {"pid", guest->peer.pid},
            {"uid", guest->peer.uid},
            {"role", guest->hello.role == chunks::Role::kWorker ? "worker" : "scheduler"},
            {"row_bytes", guest->hello.row_bytes}});
  const chunks::Welcome welcome{chunks::Type::kWelcome, chunks::kVersion, options_.daemon_epoch,
                                room_->bytes(), guest->hello.row_bytes};
  const int region = room_->fd();
  const bool sent = SendPacket(guest->link.fd(), welcome, {&region, 1}) == SendOutcome::kSent;
  connections_[number].who = std::move(guest);
  if (!sent) End(number, "its packets are not read");
}

// -- what goes out

void ChunkServer::Loop::Flush() {
  if (room_ == nullptr) return;
  for (const ChunkDone& done : workers_->TakeDone()) room_->OnDone(done);
  for (;;) {
    std::vector<ChunkPacket> packets = room_->TakePackets();
    std::vector<ChunkWork> work = room_->TakeWork();
    if (packets.empty() && work.empty()) return;
    for (ChunkPacket& packet : packets) Send(packet.connection, std::move(packet.bytes));
    workers_->Start(std::move(work));
  }
}

void ChunkServer::Loop::Send(uint64_t connection, std::vector<std::byte> packet) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  ChunkLink* const link = &found->second.who->link;
  if (!link->Send(std::move(packet))) {
    return EndBehindPackets(connection, "its packets are not read");
  }
  if (!link->has_waiting() || found->second.writable) return;
  found->second.writable = true;
  events_.Rewatch(link->fd(), EventPoll::kSocket, connection, kReadable | EPOLLOUT);
}

// -- the public class

Result<std::unique_ptr<ChunkServer>> ChunkServer::Start(const ChunkServerOptions& options,
                                                        std::unique_ptr<UnixListener> listener) {
  auto loop = std::make_unique<Loop>(options, std::move(listener));
  KVS_RETURN_IF_ERROR(loop->Start());
  return std::unique_ptr<ChunkServer>(new ChunkServer(std::move(loop)));
}

ChunkServer::ChunkServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
ChunkServer::~ChunkServer() = default;
void ChunkServer::EndServing() { loop_->EndServing(); }
void ChunkServer::Stop() { loop_->Stop(); }
ChunkNumbers ChunkServer::Numbers() const { return loop_->Numbers(); }

bool ChunkServer::Saves() const {
  return loop_->Look([](const ChunkRoom* room) { return room != nullptr && room->saves(); });
}

ChunkAmount ChunkServer::Unwritten() const {
  return loop_->Look(
      [](const ChunkRoom* room) { return room == nullptr ? ChunkAmount() : room->Unwritten(); });
}

std::vector<ChunkServer::Listed> ChunkServer::List(uint64_t* at, size_t n) const {
  return loop_->Look([at, n](const ChunkRoom* room) {
    std::vector<Listed> listed;
    const uint64_t bytes = room == nullptr ? 0 : room->bytes();
    if (*at < bytes) {
      for (const ShownChunk& chunk : room->List(at, n)) {
        listed.push_back({chunk.key, chunk.bytes.size()});
      }
    }
    if (*at >= bytes) *at = kNoMore;
    return listed;
  });
}

bool ChunkServer::Has(const ChunkKey& key) const {
  return loop_->Look([&key](const ChunkRoom* room) { return room != nullptr && room->Shown(key); });
}

std::optional<std::vector<std::byte>> ChunkServer::Copy(const ChunkKey& key) const {
  const auto look = [&key](const ChunkRoom* room) {
    return room == nullptr ? std::nullopt : room->Shown(key);
  };
  const std::optional<ShownChunk> chunk = loop_->Look(look);
  if (!chunk) return std::nullopt;
  std::vector<std::byte> bytes(chunk->bytes.begin(), chunk->bytes.end());
  const std::optional<ShownChunk> still = loop_->Look(look);
  if (!still || still->bytes.data() != chunk->bytes.data()) return std::nullopt;
  return bytes;
}

}  // namespace kvstrata
