// SPDX-License-Identifier: Apache-2.0
// What an attach socket passes both ways: descriptors of arenas to the client, of lent memory from
// it.
//
// ArenaMailbox: passes arena descriptors to one client, from whatever thread grants them.
//
// The store calls Put under its own lock, so nothing here blocks or calls the store: what the
// socket does not take now waits (with a duplicate of its descriptor) until Flush. A client that
// finds an arena in a table before its packet waits for the packet.
//
// Ownership: shared by the session's sink and the attach server; holds its own duplicate of the
// socket, so a late Put never meets a reused descriptor number.
// Thread-safety: any thread; one lock, after the store's, never around a call that blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>

#include "base/sync.h"
#include "base/unique_fd.h"
#include "proto/attach_messages.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/store.h"

namespace kvstrata {

class ArenaMailbox {
 public:
  explicit ArenaMailbox(UniqueFd socket) : socket_(std::move(socket)) {}

  void Put(const ArenaGrant& grant);
  // The Welcome packet is out: packets may follow it. Sends what has waited.
  void Open();
  // Sends what waits, as far as the socket takes it. False when the client cannot be served any
  // more: a descriptor could not be duplicated, or too many wait.
  bool Flush();
  // The session is over: forgets everything.
  void Close();

 private:
  struct Waiting {
    shm::Arena packet;
    UniqueFd fd;
  };
  void FlushLocked() KVS_REQUIRES(mu_);

  Mutex mu_;
  UniqueFd socket_ KVS_GUARDED_BY(mu_);
  std::deque<Waiting> waiting_ KVS_GUARDED_BY(mu_);
  bool open_ KVS_GUARDED_BY(mu_) = false;
  bool lost_ KVS_GUARDED_BY(mu_) = false;  // a grant was dropped
};

// DescriptorInbox: descriptors that a client sent over its attach socket after its Hello
// (shm::Descriptor), until a request of its ring names them.
//
// A client sends the packet before it writes the request, so whoever handles the request finds the
// packet in the socket at the latest: Take looks there. Nothing here blocks, and nothing that was
// passed is closed here: a DescriptorCloser does, also what came in a packet that is refused.
// Thread-safety: one thread at a time. Ownership: borrows the socket and the closer.
class DescriptorInbox {
 public:
  static constexpr size_t kMaxWaiting = 64;  // that no request has named yet

  DescriptorInbox(int socket, DescriptorCloser* closer, uint32_t user)
      : socket_(socket), closer_(closer), user_(user) {}

  // Takes what has arrived. False, for good: a packet of another kind or without exactly one
  // descriptor, one with a number that waits already, too many wait, or what the user passed before
  // does not close. The client is to be disconnected.
  bool Receive();
  // The descriptor of that number; -1 if it has not come.
  PassedFd Take(uint32_t number);

 private:
  bool ReceiveOne(bool* more);

  const int socket_;
  DescriptorCloser* const closer_;
  const uint32_t user_;
  bool sound_ = true;
  std::map<uint32_t, PassedFd> waiting_;
};

}  // namespace kvstrata
