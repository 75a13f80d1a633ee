// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_door.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/descriptors.h"

namespace kvstrata {
namespace {

constexpr uint64_t kDescriptorsOfConnection = 2;  // its socket, and the process's pidfd
constexpr uint32_t kNoUser = ~uint32_t{0};
constexpr uint32_t kFirstUnnumbered = 1u << 31;                 // the kernel's numbers are smaller
constexpr auto kAwaitClosing = std::chrono::milliseconds(100);  // at the end, then others close

}  // namespace

bool ChunkLink::Send(std::vector<std::byte> packet) {
  if (waiting_.empty()) {
    const SendOutcome outcome = SendPacket(socket_.get(), std::span<const std::byte>(packet), {});
    if (outcome != SendOutcome::kFull) return outcome == SendOutcome::kSent;
  }
  waiting_bytes_ += packet.size();
  if (waiting_bytes_ > most_) return false;
  waiting_.push_back(std::move(packet));
  return true;
}

bool ChunkLink::SendWaiting() {
  while (!waiting_.empty()) {
    const SendOutcome outcome =
        SendPacket(socket_.get(), std::span<const std::byte>(waiting_.front()), {});
    if (outcome == SendOutcome::kGone) return false;
    if (outcome == SendOutcome::kFull) return true;
    waiting_bytes_ -= waiting_.front().size();
    waiting_.pop_front();
  }
  return true;
}

ChunkDoor::ChunkDoor(const ChunkDoorOptions& options, std::unique_ptr<UnixListener> listener,
                     EventPoll* events)
    : options_(options), listener_(std::move(listener)), events_(events) {}

void ChunkDoor::Close() {
  guests_.clear();
  if (listener_ == nullptr) return;
  Arm(false);
  listener_.reset();
}

ChunkDoor::~ChunkDoor() {
  Close();
  closer_.Await(Clock::now() + kAwaitClosing);
}

void ChunkDoor::Arm(bool on) {
  if (on == listening_) return;
  if (!on) events_->Unwatch(listener_->fd());
  listening_ = on && events_->Watch(listener_->fd(), EventPoll::kListener, 0, EPOLLIN);
}

void ChunkDoor::Accept() {
  const int error = listener_->Accept([this](UniqueFd socket) { Admit(std::move(socket)); });
  if (error == 0) return;
  uint64_t suppressed = 0;
  if (log_.Allow(&suppressed)) {
    LogEvent(LogLevel::kError, "accept_failed",
             {{"errno", error}, {"why", std::strerror(error)}, {"suppressed", suppressed}});
  }
  Arm(false);  // until the next tick
}

void ChunkDoor::Admit(UniqueFd socket) {
  auto guest = std::make_unique<ChunkGuest>(
      ++numbers_,
      ChunkLink(PassedFd(std::move(socket), &closer_, kNoUser), options_.backlog_bytes));
  guest->deadline = Clock::now() + options_.hello_timeout;
  guest->peer.uid = kNoUser;
  const Status status = Check(guest.get());
  ++connections_[guest->peer.uid];
  if (!status.ok()) return Refuse(std::move(guest), status);
  guests_[guest->number] = std::move(guest);
}

Status ChunkDoor::Check(ChunkGuest* guest) {
  KVS_ASSIGN_OR_RETURN(PeerProcess peer, PeerProcessOf(guest->link.fd()));
  guest->peer = peer.credentials;
  guest->pidfd = std::move(peer.pidfd);
  guest->process = guest->peer.pid != 0 ? guest->peer.pid : kFirstUnnumbered + unnumbered_++;
  const uint32_t user = guest->peer.uid;
  guest->link.SetUser(user);
  if (!closer_.MayTake(user)) {
    return ResourceExhausted("DESCRIPTORS_STUCK",
                             "descriptors that clients of user " + std::to_string(user) +
                                 " passed do not close; end who keeps them open");
  }
  KVS_RETURN_IF_ERROR(CheckDescriptors(kDescriptorsOfConnection));
  if (const auto its = connections_.find(user);
      its != connections_.end() && its->second >= options_.connections) {
    return ResourceExhausted("CONNECTIONS",
                             "user " + std::to_string(user) + " has " +
                                 std::to_string(options_.connections) +
                                 " connections to the chunk socket; end some of them");
  }
  if (!events_->Watch(guest->link.fd(), EventPoll::kSocket, guest->number, EPOLLIN | EPOLLRDHUP)) {
    return ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections");
  }
  return OkStatus();
}

std::unique_ptr<ChunkGuest> ChunkDoor::Take(uint64_t number) {
  auto node = guests_.extract(number);
  KVS_CHECK(!node.empty());
  return std::move(node.mapped());
}

void ChunkDoor::Left(const PeerCredentials& peer) {
  const auto its = connections_.find(peer.uid);
  KVS_CHECK(its != connections_.end());
  if (--its->second == 0) connections_.erase(its);
}

Status ChunkDoor::ReadHello(std::span<const std::byte> packet, ChunkGuest* guest) {
  chunks::Hello hello{};
  std::memcpy(&hello, packet.data(), std::min(packet.size(), sizeof(hello)));
  if (packet.size() < 3 * sizeof(uint32_t) || hello.type != chunks::Type::kHello ||
      hello.magic != chunks::kMagic) {
    return InvalidArgument("HELLO_MALFORMED", "the first packet is no HELLO of chunks (" +
                                                  std::to_string(packet.size()) +
                                                  " bytes); is this program an engine's adapter?");
  }
  if (hello.version != chunks::kVersion) {
    return FailedPrecondition("VERSION_MISMATCH",
                              "the client speaks chunk version " + std::to_string(hello.version) +
                                  ", this daemon " + std::to_string(chunks::kVersion) +
                                  "; use the adapter of the daemon's release");
  }
  const bool text =
      ReadText(hello.engine, &guest->hello.engine) && ReadText(hello.client_name, &guest->client);
  const bool role = hello.role == chunks::Role::kScheduler || hello.role == chunks::Role::kWorker;
  if (packet.size() != sizeof(hello) || !text || !role || guest->hello.engine.empty()) {
    return InvalidArgument("HELLO_MALFORMED",
                           "HELLO has " + std::to_string(packet.size()) + " bytes, role " +
                               std::to_string(static_cast<uint32_t>(hello.role)) +
                               "; needed: 152 bytes, role 0 or 1, engine and client_name with a "
                               "NUL in their 64 bytes, engine not empty");
  }
  guest->hello.connection = guest->number;
  guest->hello.process = guest->process;
  guest->hello.role = hello.role;
  guest->hello.row_bytes = hello.row_bytes;
  return OkStatus();
}

std::unique_ptr<ChunkGuest> ChunkDoor::OnSocket(uint64_t number) {
  std::array<std::byte, 2 * sizeof(chunks::Hello)> packet;
  size_t bytes = 0;
  ChunkGuest* const guest = guests_.at(number).get();
  const ReceiveOutcome outcome = guest->link.Receive(packet, &bytes);
  if (outcome == ReceiveOutcome::kNothing) return nullptr;
  std::unique_ptr<ChunkGuest> taken = Take(number);
  if (outcome != ReceiveOutcome::kPacket) {
    events_->Unwatch(taken->link.fd());
    Left(taken->peer);
    return nullptr;
  }
  const Status status = ReadHello(std::span(packet).first(bytes), taken.get());
  if (status.ok()) return taken;
  Refuse(std::move(taken), status);
  return nullptr;
}

void ChunkDoor::Refuse(std::unique_ptr<ChunkGuest> guest, const Status& why) {
  uint64_t suppressed = 0;
  if (log_.Allow(&suppressed)) {
    LogEvent(LogLevel::kWarn, "chunk_engine_refused",
             {{"reason", why.reason()},
              {"pid", guest->peer.pid},
              {"uid", guest->peer.uid},
              {"why", why.message()},
              {"suppressed", suppressed}});
  }
  chunks::Refused refused{};
  refused.type = chunks::Type::kRefused;
  refused.code = static_cast<int32_t>(why.code());
  CopyText(why.reason(), refused.reason);
  CopyText(why.message(), refused.message);
  (void)SendPacket(guest->link.fd(), refused);
  events_->Unwatch(guest->link.fd());
  Left(guest->peer);
}

void ChunkDoor::Tick() {
  Arm(true);
  closer_.Tick();
  const Clock::time_point now = Clock::now();
  std::vector<uint64_t> late;
  for (const auto& [number, guest] : guests_) {
    if (now >= guest->deadline) late.push_back(number);
  }
  for (const uint64_t number : late) {
    Refuse(Take(number), {Code::kDeadlineExceeded, "HELLO_TIMEOUT", "no HELLO packet in time"});
  }
}

bool ChunkProcesses::Add(uint32_t process, UniqueFd pidfd) {
  if (watched_.contains(process)) return true;
  const uint64_t number = ++numbers_;
  if (!events_->Watch(pidfd.get(), EventPoll::kPidfd, number, EPOLLIN)) return false;
  watched_[process] = {std::move(pidfd), number};
  return true;
}

bool ChunkProcesses::IsStale(uint32_t process) const {
  const auto found = watched_.find(process);
  if (found == watched_.end()) return false;
  pollfd dead{found->second.pidfd.get(), POLLIN, 0};
  return poll(&dead, 1, 0) != 0;
}

std::optional<uint32_t> ChunkProcesses::ProcessOf(uint64_t number) const {
  const auto found = std::ranges::find_if(
      watched_, [number](const auto& entry) { return entry.second.number == number; });
  return found == watched_.end() ? std::nullopt : std::optional(found->first);
}

void ChunkProcesses::Remove(uint32_t process) {
  const auto found = watched_.find(process);
  if (found == watched_.end()) return;
  events_->Unwatch(found->second.pidfd.get());
  watched_.erase(found);
}

void ChunkProcesses::RemoveUnless(const std::function<bool(uint32_t process)>& wanted) {
  std::erase_if(watched_, [&](const auto& entry) {
    if (wanted(entry.first)) return false;
    events_->Unwatch(entry.second.pidfd.get());
    return true;
  });
}

}  // namespace kvstrata
