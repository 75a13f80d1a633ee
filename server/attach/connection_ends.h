// SPDX-License-Identifier: Apache-2.0
// ConnectionEnds: how a connection of the attach server ends (attach_server.h, "the life of a
// connection"): refused, detached, hung up or dead. Thread-safety: the loop's. The store ends a
// session in a thread that the connection is lent to.
#ifndef KVSTRATA_SERVER_ATTACH_CONNECTION_ENDS_H_
#define KVSTRATA_SERVER_ATTACH_CONNECTION_ENDS_H_

#include <string_view>

#include "base/status.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_lending.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SERVER_ATTACH_CONNECTION_ENDS_H_
