// SPDX-License-Identifier: Apache-2.0
// DescriptorInbox: descriptors that a client sent over its attach socket after its Hello
// (shm::Descriptor), until a request of its ring names them.
//
// A client sends the packet before it writes the request, so whoever handles the request finds the
// packet in the socket at the latest: Take looks there. Nothing here blocks, and nothing that was
// passed is closed here: a DescriptorCloser does, also what came in a packet that is refused.
// Thread-safety: one thread at a time. Ownership: borrows the socket and the closer.
#ifndef KVSTRATA_SERVER_ATTACH_PEERS_DESCRIPTOR_INBOX_H_
#define KVSTRATA_SERVER_ATTACH_PEERS_DESCRIPTOR_INBOX_H_

#include <cstdint>
#include <map>

#include "server/sockets/descriptor_closer.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SERVER_ATTACH_PEERS_DESCRIPTOR_INBOX_H_
