// SPDX-License-Identifier: Apache-2.0
// Admission: the listener of the attach server, and how a connection begins: accepted, with its
// peer's credentials from the kernel, before a byte of it is read.
//
// Ownership: owns the listener. Thread-safety: the loop's.
#ifndef KVSTRATA_SERVER_ATTACH_ADMISSION_H_
#define KVSTRATA_SERVER_ATTACH_ADMISSION_H_

#include <memory>
#include <utility>

#include "base/unique_fd.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"
#include "server/sockets/unix_listener.h"

namespace kvstrata {

class Admission {
 public:
  Admission(AttachState* state, ConnectionEnds* ends, std::unique_ptr<UnixListener> listener)
      : state_(state), ends_(ends), listener_(std::move(listener)) {}

  // Has the loop told of new connections, unless it is. Accept stops that when the daemon is out of
  // descriptors or memory.
  void Listen() {
    if (!listening_) Arm(true);
  }
  void Accept();
  void Close() { listener_.reset(); }

 private:
  void Arm(bool on);
  void AdmitSocket(UniqueFd socket);

  AttachState* const state_;
  ConnectionEnds* const ends_;
  std::unique_ptr<UnixListener> listener_;
  bool listening_ = false;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ADMISSION_H_
