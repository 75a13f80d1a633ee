// SPDX-License-Identifier: Apache-2.0
// The first packet of an attach socket's client, checked. Pure functions; any thread.
#ifndef KVSTRATA_SERVER_ATTACH_PEERS_HELLO_H_
#define KVSTRATA_SERVER_ATTACH_PEERS_HELLO_H_

#include <cstddef>

#include "base/status.h"
#include "proto/attach_messages.h"

namespace kvstrata {

// OK, or the Status that refuses a client: size, type, magic, version, texts. `bytes` is what recv
// returned.
Status CheckHello(const shm::Hello& hello, size_t bytes);
// As CheckHello, for whoever redeems a token: size, magic, version.
Status CheckRedeem(const shm::Redeem& redeem, size_t bytes);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_PEERS_HELLO_H_
