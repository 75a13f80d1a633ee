// SPDX-License-Identifier: Apache-2.0
// Handshake: a connection's first packet, and what opens its session: Hello, the session of the
// store, its ring, Welcome. One that redeems a token goes to TokenPassing.
//
// Thread-safety: the loop's. A session is opened by a thread that the connection is lent to.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"
#include "proto/attach_messages.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"

namespace kvstrata {

// TokenPassing: connections that redeem a token (attach_tokens.h) instead of saying Hello: a
// process without the library fetches descriptors of a session of gRPC's. It has no ring and says
// nothing more; arenas that the session is granted later follow as they do on a session's own
// connection.
//
// Thread-safety: the loop's. A token is redeemed by a thread that the connection is lent to.
class TokenPassing {
 public:
  TokenPassing(AttachState* state, ConnectionLending* lending, ConnectionEnds* ends)
      : state_(state), lending_(lending), ends_(ends) {}

  void OnRedeem(AttachConnection* c, const shm::Redeem& redeem, size_t bytes);
  void EndPassing(AttachConnection* c, std::string_view why);
  // Ends those that the store grants nothing more.
  void EndPassedOver();
  // The process that could write is gone.
  void EndWriter(AttachConnection* c);

 private:
  // Runs in another thread.
  Status PassDescriptors(AttachConnection* c, const AttachToken& token);
  Status SendTables(AttachConnection* c, const PassedTables& tables);
  void OnPassed(AttachConnection* c, const Status& status);

  AttachState* const state_;
  ConnectionLending* const lending_;
  ConnectionEnds* const ends_;
};

class Handshake {
 public:
  Handshake(AttachState* state, ConnectionLending* lending, ConnectionEnds* ends,
            TokenPassing* passing)
      : state_(state), lending_(lending), ends_(ends), passing_(passing) {}

  void OnFirstPacket(AttachConnection* c);

 private:
  void OnHello(AttachConnection* c, const shm::Hello& hello, size_t bytes);
  // Runs in another thread.
  Status OpenSession(AttachConnection* c, const std::string& name, const std::string& uuid);
  Status SendWelcome(AttachConnection* c, const SessionSegments& segments);
  void OnWelcomed(AttachConnection* c, const std::string& name, const Status& status);

  AttachState* const state_;
  ConnectionLending* const lending_;
  ConnectionEnds* const ends_;
  TokenPassing* const passing_;
};

}  // namespace kvstrata
