// SPDX-License-Identifier: Apache-2.0
// TokenPassing: connections that redeem a token (attach_tokens.h) instead of saying Hello: a
// process without the library fetches descriptors of a session of gRPC's. It has no ring and says
// nothing more; arenas that the session is granted later follow as they do on a session's own
// connection.
//
// Thread-safety: the loop's. A token is redeemed by a thread that the connection is lent to.
#ifndef KVSTRATA_SERVER_ATTACH_TOKEN_PASSING_H_
#define KVSTRATA_SERVER_ATTACH_TOKEN_PASSING_H_

#include <cstddef>
#include <string_view>

#include "base/status.h"
#include "proto/attach_messages.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"
#include "server/attach/connection_lending.h"

namespace kvstrata {

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_TOKEN_PASSING_H_
