// SPDX-License-Identifier: Apache-2.0
// Whom the attach loop lends a connection to, and how a connection ends. attach_server.h has the
// whole of it, "the life of a connection".
#pragma once

#include <atomic>
#include <functional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "server/attach/attach_state.h"

namespace kvstrata {

// ConnectionLending: what the attach loop has others do for a connection: frames that take longer
// than a quantum, and whatever has to wait for the store behind such a frame. A connection that is
// lent is that thread's alone until it is taken back.
//
// Ownership: connections stay the table's, which erases none that is lent. Thread-safety: the
// loop's; a thread that is done returns the connection under a lock of its own, a leaf.
class ConnectionLending {
 public:
  using Then = std::function<void()>;

  explicit ConnectionLending(AttachState* state) : state_(state) {}

  // Has another thread do `work` for the connection, and the loop `then` when it has it back.
  void Lend(AttachConnection* c, FairQueue::Length length, std::function<void()> work, Then then);
  // Does what was to be done next for those that have come back. Whether there were any.
  bool TakeBack();
  // An event of the kind came for one that is lent: it is not watched until it is back.
  void Mute(AttachConnection* c, EventPoll::Kind kind);

 private:
  void Unmute(AttachConnection* c);

  AttachState* const state_;
  std::atomic<bool> any_returned_{false};
  Mutex returned_mu_;
  // Always with room for all that are lent: releasing needs no memory.
  std::vector<AttachConnection*> returned_ KVS_GUARDED_BY(returned_mu_);
};

// ConnectionEnds: refused, detached, hung up or dead. Thread-safety: the loop's. The store ends a
// session in a thread that the connection is lent to.
class ConnectionEnds {
 public:
  ConnectionEnds(AttachState* state, ConnectionLending* lending)
      : state_(state), lending_(lending) {}

  void Refuse(AttachConnection* c, const Status& why);
  void OnDetach(AttachConnection* c);
  void EndDetached(AttachConnection* c);
  void HangUp(AttachConnection* c, std::string_view why);
  // Its process is gone.
  void EndDead(AttachConnection* c);

  // Closes what the client can see; the pidfd stays.
  void CloseChannels(AttachConnection* c);
  void Erase(AttachConnection* c);

 private:
  // Ends the connection's session in the store, tells it as `event` and does `then`. why: "": none.
  void EndSession(AttachConnection* c, SessionEnd how, std::string_view event, std::string_view why,
                  ConnectionLending::Then then);
  void DropSocket(AttachConnection* c);

  AttachState* const state_;
  ConnectionLending* const lending_;
};

}  // namespace kvstrata
