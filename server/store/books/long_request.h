// SPDX-License-Identifier: Apache-2.0
// LongRequest: what grows with a request's tokens works in pieces.
//
// A request that takes, publishes or releases a page for every few tokens would keep the store's
// lock for as long as its peer likes. It makes a LongRequest, and calls LetOthersIn for the pages
// that it has been through: whoever waits for the lock has it after some kPiecePages of them. Until
// it ends, its session is its alone: FindSession and FindSequence wait in other threads, so nothing
// that it has found goes, and nothing of its sequences changes, while others have the lock.
// Snapshots and the audit do not wait: in between, references and pages are in order, and tables
// may be behind the sequence. What a table still names keeps its reference until it is published
// anew: others free what is retired.
//
// Ownership: borrows the catalog and the session. Thread-safety: made and destroyed under the
// store's lock, in one thread. Cost: what waits for the session is woken at its end.
#ifndef KVSTRATA_SERVER_STORE_BOOKS_LONG_REQUEST_H_
#define KVSTRATA_SERVER_STORE_BOOKS_LONG_REQUEST_H_

#include <cstdint>

#include "server/store/books/sequence.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class SessionCatalog;

// Some 200 us of taking, publishing or releasing.
inline constexpr uint32_t kPiecePages = 256;

class LongRequest {
 public:
  // REQUIRES: `session` was just found, hence no other request has it.
  LongRequest(SessionCatalog* catalog, Session* session) KVS_REQUIRES(store_lock);
  ~LongRequest() { End(); }
  LongRequest(const LongRequest&) = delete;
  LongRequest& operator=(const LongRequest&) = delete;

  // Called before the session goes. Idempotent.
  void End();

 private:
  SessionCatalog* const catalog_;
  Session* session_;
};

// A sequence that a long request has in no map, because it is about to enter (Enter ends it then)
// or has left: its references count all the same.
class Outside {
 public:
  Outside(Session* session, const Sequence* s) : session_(session) { session_->outside = s; }
  ~Outside() { session_->outside = nullptr; }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  Session* const session_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BOOKS_LONG_REQUEST_H_
