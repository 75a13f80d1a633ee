// SPDX-License-Identifier: Apache-2.0
// ChunkLink: one client's socket: its packets as they come, and those that it has not read yet.
//
// Nothing here blocks. What a socket does not take waits in order; more of that than `most` bytes
// and the client is one that does not read. A socket may hold descriptors that its peer passed, so
// a DescriptorCloser closes it (server/sockets/descriptor_closer.h).
//
// Thread-safety: none; the loop's. Cost: a system call a packet.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_LINK_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/sockets/descriptor_closer.h"
#include "server/sockets/packet.h"

namespace kvstrata {

class ChunkLink {
 public:
  ChunkLink(PassedFd socket, uint64_t most) : socket_(std::move(socket)), most_(most) {}

  int fd() const { return socket_.get(); }
  void SetUser(uint32_t user) { socket_.set_user(user); }

  ReceiveOutcome Receive(std::span<std::byte> packet, size_t* bytes) const {
    return ReceivePlain(socket_.get(), packet, bytes);
  }
  // False: the peer is gone, or does not read.
  bool Send(std::vector<std::byte> packet);
  // When the socket takes more. False: the peer is gone.
  bool SendWaiting();
  bool has_waiting() const { return !waiting_.empty(); }

 private:
  PassedFd socket_;
  const uint64_t most_;
  std::deque<std::vector<std::byte>> waiting_;
  uint64_t waiting_bytes_ = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_LINK_H_
