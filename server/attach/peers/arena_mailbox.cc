// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/arena_mailbox.h"

#include <fcntl.h>

#include "server/sockets/packet.h"

namespace kvstrata {
namespace {

// Each waiting packet holds a descriptor of the daemon's.
constexpr size_t kMaxWaiting = 1024;

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
  if (!copy || waiting_.size() == kMaxWaiting) {
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

}  // namespace kvstrata
