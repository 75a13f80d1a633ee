// SPDX-License-Identifier: Apache-2.0
// RefusedConnections: tells gRPC clients why their connection is refused, without gRPC. A closed
// connection would be a daemon that is gone to them. So each of the connection's calls is answered
// with the Status, in the few frames of HTTP/2 that this takes, for as long as kPatience; then it
// is closed.
//
// What the peer sends is skipped but for the frames' headers; one that passes descriptors, sends
// faster than it reads, or asks too often is closed at once. Beyond kMost connections, or
// kMostOfUser of one user's, a refused one is closed without a word.
//
// Ownership: the sockets; they are closed by the DescriptorCloser, which outlives this, or, where
// no descriptors can wait in them, at once: a flood would hold more and more of ours. Threads: one
// at a time; fd() may be polled meanwhile. Nothing blocks. Cost: a few system calls each; Serve
// reads at most 16 KiB of each connection.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/sockets/descriptor_closer.h"

namespace kvstrata {

class RefusedConnections {
 public:
  static constexpr size_t kMost = 16, kMostOfUser = 4;
  static constexpr std::chrono::milliseconds kPatience{1000};

  // `closer`: null where the listener takes no descriptors.
  explicit RefusedConnections(DescriptorCloser* closer) : closer_(closer) {}

  ~RefusedConnections();

  // GRPC_START (INTERNAL): the kernel gives no epoll set. Called once, first.
  Status Open();
  // Readable while Serve has something to do.
  int fd() const { return readable_.get(); }

  void Add(UniqueFd socket, uint32_t uid, const Status& why);
  void Serve();
  // Closes those whose time is over.
  void Expire(std::chrono::steady_clock::time_point now);

 private:
  struct Connection {
    UniqueFd socket;
    uint32_t uid = 0;
    std::chrono::steady_clock::time_point until;
    std::string answer;  // header block of every call's answer
    size_t answers = 0;  // so far
    uint64_t skip = 0;   // bytes until the next frame
    size_t filled = 0;   // bytes in `header`
    std::array<uint8_t, 9> header{};
  };

  // False: it is to be closed.
  bool Read(Connection* c);
  bool Take(Connection* c, std::span<const uint8_t> bytes);
  bool OnFrame(Connection* c);
  void Drop(int socket);
  void Close(UniqueFd socket, uint32_t uid);

  DescriptorCloser* const closer_;
  UniqueFd readable_;
  std::unordered_map<int, Connection> connections_;  // by the socket
};

}  // namespace kvstrata
