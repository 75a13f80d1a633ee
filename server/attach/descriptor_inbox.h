// DescriptorInbox: descriptors that a client sent over its attach socket after its Hello
// (shm::Descriptor), until a request of its ring names them.
//
// A client sends the packet before it writes the request, so whoever handles the request finds the
// packet in the socket at the latest: Take looks there. Nothing here blocks.
// Thread-safety: one thread (the attach server's). Ownership: borrows the socket.
#ifndef KVSTRATA_SERVER_ATTACH_DESCRIPTOR_INBOX_H_
#define KVSTRATA_SERVER_ATTACH_DESCRIPTOR_INBOX_H_

#include <cstdint>
#include <map>

#include "base/unique_fd.h"

namespace kvstrata {

class DescriptorInbox {
 public:
  static constexpr size_t kMaxWaiting = 64;  // that no request has named yet

  explicit DescriptorInbox(int socket) : socket_(socket) {}

  // Takes what has arrived. False, for good: a packet of another kind or without a descriptor, one
  // with a number that waits already, or too many wait. The client is to be disconnected.
  bool Receive();
  // The descriptor of that number; -1 if it has not come.
  UniqueFd Take(uint32_t number);

 private:
  bool ReceiveOne(bool* more);

  const int socket_;
  bool sound_ = true;
  std::map<uint32_t, UniqueFd> waiting_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_DESCRIPTOR_INBOX_H_
