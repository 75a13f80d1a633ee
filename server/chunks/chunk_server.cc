// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_server.h"

#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "server/chunks/chunk_loop.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr int kTickMs = 100;              // while something may be late
constexpr int kPacketsPerIteration = 16;  // of one client, before others are served
constexpr auto kAwaitClosing = std::chrono::milliseconds(100);  // at the end, then others close
constexpr uint32_t kReadable = EPOLLIN | EPOLLRDHUP;

Status StartError(const char* what) {
  return Internal("CHUNKS_START", std::string("cannot start the chunk server: ") + what + ": " +
                                      std::strerror(errno));
}

}  // namespace

// -- start and stop

ChunkServer::Loop::Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener)
    : options_(options), listener_(std::move(listener)) {}

Status ChunkServer::Loop::Start() {
  const bool opened = events_.Open();
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!opened || !stop_event_) return StartError("descriptors");
  if (!events_.Watch(stop_event_.get(), EventPoll::kStop, 0, EPOLLIN) || !events_.WatchWake()) {
    return StartError("epoll");
  }
  inbox_ = std::make_shared<ChunkInbox>(events_.waker());
  tiers_ = std::make_unique<ChunkTiers>(options_.tiers, inbox_);
  Listen(true);
  PutNumbers();
  try {
    sums_ = std::make_unique<ChunkSums>(inbox_);
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what());
  }
  pthread_setname_np(thread_.native_handle(), "kvs-chunks");
  return OkStatus();
}

void ChunkServer::Loop::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KVS_CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
  tiers_.reset();
  sums_.reset();
  connections_.clear();
  listener_.reset();
  closer_.Await(Clock::now() + kAwaitClosing);
}

ChunkNumbers ChunkServer::Loop::Numbers() const {
  MutexLock lock(mu_);
  return numbers_;
}

void ChunkServer::Loop::PutNumbers() {
  ChunkNumbers numbers;
  if (room_ != nullptr) numbers = room_->Numbers();
  numbers.capacity_bytes = options_.bytes;
  numbers.counters = counters_;
  MutexLock lock(mu_);
  numbers_ = numbers;
}

bool ChunkServer::Loop::MayLog(uint64_t* suppressed) {
  const auto now = Clock::now().time_since_epoch();
  return log_.Allow(std::chrono::duration_cast<std::chrono::seconds>(now).count(), suppressed);
}

// -- the loop

void ChunkServer::Loop::Run() {
  WarmUpAllocator();
  while (!stopping_) {
    Survive("kvs-chunks", [this] { RunIteration(); });
  }
}

void ChunkServer::Loop::RunIteration() {
  std::array<epoll_event, 64> events;
  const bool late = !listening_ || std::ranges::any_of(connections_, [](const auto& entry) {
    return !entry.second->joined;
  });
  const int n = events_.Wait(events, late ? kTickMs : -1);
  const LoopIteration iteration(&beat_);
  for (int i = 0; i < n; ++i) OnEvent(events[i]);
  if (late) Tick();
  closer_.Tick();
  Flush();
  PutNumbers();
}

void ChunkServer::Loop::OnEvent(const epoll_event& event) {
  using enum EventPoll::Kind;
  const EventPoll::Kind kind = EventPoll::KindOf(event);
  if (kind == kStop) {
    stopping_ = true;
  } else if (kind == kListener) {
    Accept();
  } else if (kind == kPidfd) {
    if (const auto process = processes_.ProcessOf(EventPoll::NumberOf(event))) OnDead(*process);
  } else if (kind == kSocket) {
    const auto c = connections_.find(EventPoll::NumberOf(event));
    if (c != connections_.end()) OnSocket(c->second.get(), event.events);
  }  // kWake only wakes us
}

void ChunkServer::Loop::OnSocket(Connection* c, uint32_t events) {
  const uint64_t number = c->number;
  if ((events & EPOLLOUT) != 0) {
    if (!c->link.SendWaiting()) return End(number, "eof");
    if (!c->link.has_waiting()) {
      c->writable = false;
      events_.Rewatch(c->link.fd(), EventPoll::kSocket, number, kReadable);
    }
  }
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0) return;
  for (int i = 0; i < kPacketsPerIteration; ++i) {
    size_t bytes = 0;
    switch (c->link.Receive(packet_, &bytes)) {
      case ReceiveOutcome::kNothing:
        return;
      case ReceiveOutcome::kEnd:
        return End(number, "eof");
      case ReceiveOutcome::kDescriptors:
        return End(number, "a packet that passes descriptors");
      case ReceiveOutcome::kPacket:
        c->joined ? OnPacket(c, bytes) : OnHello(c, bytes);
    }
    if (!connections_.contains(number)) return;
  }
}

void ChunkServer::Loop::OnPacket(Connection* c, size_t bytes) {
  Status status = MalformedPacket("it has more than 65536 bytes");
  if (bytes <= chunks::kMostChunkPacket) {
    status = room_->OnPacket(c->number, std::span(packet_).first(bytes));
  }
  if (status.ok()) return;
  uint64_t suppressed = 0;
  if (MayLog(&suppressed)) {
    LogEvent(LogLevel::kWarn, "chunk_client_malformed",
             {{"engine", c->engine},
              {"pid", c->peer.pid},
              {"uid", c->peer.uid},
              {"why", status.message()},
              {"suppressed", suppressed}});
  }
  End(c->number, "malformed packet");
}

void ChunkServer::Loop::OnDead(uint32_t process) {
  std::vector<uint64_t> its;
  for (const auto& [number, c] : connections_) {
    if (c->joined && c->process == process) its.push_back(number);
  }
  for (const uint64_t number : its) End(number, "died");
  processes_.Remove(process);
  if (room_ != nullptr) room_->OnDead(process);
}

void ChunkServer::Loop::End(uint64_t connection, std::string_view why) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  const std::unique_ptr<Connection> c = std::move(found->second);
  connections_.erase(found);
  events_.Unwatch(c->link.fd());
  if (!c->joined) return;
  room_->Leave(connection);
  processes_.RemoveUnless([this](uint32_t process) { return room_->Awaits(process); });
  LogEvent(LogLevel::kInfo, "chunk_engine_left",
           {{"engine", c->engine}, {"pid", c->peer.pid}, {"uid", c->peer.uid}, {"why", why}});
}

void ChunkServer::Loop::Tick() {
  if (!listening_) Listen(true);
  const Clock::time_point now = Clock::now();
  std::vector<Connection*> late;
  for (const auto& [number, c] : connections_) {
    if (!c->joined && now >= c->deadline) late.push_back(c.get());
  }
  for (Connection* c : late) {
    Refuse(c, {Code::kDeadlineExceeded, "HELLO_TIMEOUT", "no HELLO packet in time"});
  }
}

// -- what goes out

void ChunkServer::Loop::Flush() {
  if (room_ == nullptr) return;
  for (const ChunkDone& done : inbox_->TakeAll()) room_->OnDone(done);
  for (;;) {
    std::vector<ChunkPacket> packets = room_->TakePackets();
    std::vector<ChunkWork> work = room_->TakeWork();
    if (packets.empty() && work.empty()) return;
    for (ChunkPacket& packet : packets) Send(packet.connection, std::move(packet.bytes));
    Dispatch(std::move(work));
  }
}

void ChunkServer::Loop::Dispatch(std::vector<ChunkWork> work) {
  std::vector<ChunkWork> below;
  for (ChunkWork& one : work) {
    const bool sum = one.kind == ChunkWork::Kind::kSum || one.kind == ChunkWork::Kind::kVerify;
    sum ? sums_->Add(std::move(one)) : below.push_back(std::move(one));
  }
  if (!below.empty()) tiers_->Start(std::move(below));
}

void ChunkServer::Loop::Send(uint64_t connection, std::vector<std::byte> packet) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  Connection* const c = found->second.get();
  if (!c->link.Send(std::move(packet))) return End(connection, "its packets are not read");
  if (!c->link.has_waiting() || c->writable) return;
  c->writable = true;
  events_.Rewatch(c->link.fd(), EventPoll::kSocket, connection, kReadable | EPOLLOUT);
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
void ChunkServer::Stop() { loop_->Stop(); }
ChunkNumbers ChunkServer::Numbers() const { return loop_->Numbers(); }

}  // namespace kvstrata
