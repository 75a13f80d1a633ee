// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/descriptor_passing.h"

#include <fcntl.h>

#include <utility>
#include <vector>

#include "server/sockets/packet.h"

namespace kvstrata {
namespace {

// Each waiting packet holds a descriptor of the daemon's.
constexpr size_t kMaxWaitingArenas = 1024;

shm::Arena PacketOf(const ArenaGrant& grant) {
  shm::Arena packet{};
  packet.type = shm::kArena;
  packet.arena = grant.arena;
  packet.bytes = grant.bytes;
  packet.tier = static_cast<uint16_t>(grant.tier);
  packet.writable = grant.writable ? 1 : 0;
  packet.memory = static_cast<uint16_t>(grant.handle_type);
  return packet;
}

}  // namespace

void ArenaMailbox::Put(const ArenaGrant& grant) {
  MutexLock lock(mu_);
  if (!socket_) return;
  if (open_) FlushLocked();
  const shm::Arena packet = PacketOf(grant);
  if (open_ && waiting_.empty()) {
    const int fd = grant.fd;
    if (SendPacket(socket_.get(), packet, std::span(&fd, 1)) != SendOutcome::kFull) return;
  }
  UniqueFd copy(fcntl(grant.fd, F_DUPFD_CLOEXEC, 0));
  if (!copy || waiting_.size() == kMaxWaitingArenas) {
    lost_ = true;
    return;
  }
  waiting_.push_back({packet, std::move(copy)});
}

void ArenaMailbox::Open() {
  MutexLock lock(mu_);
  open_ = true;
  FlushLocked();
}

bool ArenaMailbox::Flush() {
  MutexLock lock(mu_);
  if (open_) FlushLocked();
  return !lost_;
}

void ArenaMailbox::Close() {
  MutexLock lock(mu_);
  socket_.Reset();
  waiting_.clear();
}

void ArenaMailbox::FlushLocked() {
  while (socket_ && !waiting_.empty()) {
    const int fd = waiting_.front().fd.get();
    if (SendPacket(socket_.get(), waiting_.front().packet, std::span(&fd, 1)) ==
        SendOutcome::kFull) {
      return;
    }
    waiting_.pop_front();  // sent, or the peer is gone and EOF ends the session
  }
}

bool DescriptorInbox::Receive() {
  for (bool more = true; sound_ && more;) sound_ = ReceiveOne(&more);
  return sound_;
}

bool DescriptorInbox::ReceiveOne(bool* more) {
  *more = false;
  // One byte more than a packet, to tell a longer one.
  struct {
    shm::Descriptor packet;
    std::byte beyond;
  } in{};
  constexpr size_t kRoom = sizeof(in.packet) + 1;
  if (!closer_->MayTake(user_)) return false;
  size_t bytes = 0;
  std::vector<UniqueFd> received;
  const ReceiveOutcome outcome =
      ReceivePassed(socket_, {reinterpret_cast<std::byte*>(&in), kRoom}, &bytes, &received);
  std::vector<PassedFd> fds;
  for (UniqueFd& fd : received) fds.emplace_back(std::move(fd), closer_, user_);
  if (outcome == ReceiveOutcome::kDescriptors) return false;
  if (outcome != ReceiveOutcome::kPacket) return true;  // the end is the socket's owner's to see
  if (bytes != sizeof(in.packet) || in.packet.type != shm::kDescriptor || fds.size() != 1 ||
      waiting_.size() == kMaxWaiting) {
    return false;
  }
  return *more = waiting_.emplace(in.packet.number, std::move(fds.front())).second;
}

PassedFd DescriptorInbox::Take(uint32_t number) {
  (void)Receive();
  const auto found = waiting_.find(number);
  if (found == waiting_.end()) return {};
  PassedFd fd = std::move(found->second);
  waiting_.erase(found);
  return fd;
}

}  // namespace kvstrata
