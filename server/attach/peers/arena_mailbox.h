// SPDX-License-Identifier: Apache-2.0
// ArenaMailbox: passes arena descriptors to one client, from whatever thread grants them.
//
// The store calls Put under its own lock, so nothing here blocks or calls the store: what the
// socket does not take now waits (with a duplicate of its descriptor) until Flush. A client that
// finds an arena in a table before its packet waits for the packet.
//
// Ownership: shared by the session's sink and the attach server; holds its own duplicate of the
// socket, so a late Put never meets a reused descriptor number.
// Thread-safety: any thread; one lock, after the store's, never around a call that blocks.
#ifndef KVSTRATA_SERVER_ATTACH_PEERS_ARENA_MAILBOX_H_
#define KVSTRATA_SERVER_ATTACH_PEERS_ARENA_MAILBOX_H_

#include <deque>

#include "base/sync.h"
#include "base/unique_fd.h"
#include "proto/attach_messages.h"
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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_PEERS_ARENA_MAILBOX_H_
