// SPDX-License-Identifier: Apache-2.0
// Handshake: a connection's first packet, and what opens its session: Hello, the session of the
// store, its ring, Welcome. One that redeems a token goes to TokenPassing.
//
// Thread-safety: the loop's. A session is opened by a thread that the connection is lent to.
#ifndef KVSTRATA_SERVER_ATTACH_HANDSHAKE_H_
#define KVSTRATA_SERVER_ATTACH_HANDSHAKE_H_

#include <cstddef>
#include <string>

#include "base/status.h"
#include "proto/attach_messages.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"
#include "server/attach/connection_lending.h"
#include "server/attach/token_passing.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SERVER_ATTACH_HANDSHAKE_H_
