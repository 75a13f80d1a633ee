#include "server/attach/descriptor_inbox.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/ring_messages.h"

namespace kvstrata {

bool DescriptorInbox::Receive() {
  for (bool more = true; sound_ && more;) sound_ = ReceiveOne(&more);
  return sound_;
}

bool DescriptorInbox::ReceiveOne(bool* more) {
  *more = false;
  // One byte more than a packet, to tell a longer one; room for one descriptor: the kernel closes
  // others.
  struct {
    shm::Descriptor packet;
    std::byte beyond;
  } in{};
  iovec part{&in, sizeof(in.packet) + 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = recvmsg(socket_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && errno == EINTR) return *more = true;
  if (n <= 0) return true;  // nothing there, or the end, which the socket's owner sees
  UniqueFd fd;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd.Reset(received);
  }
  if (n != sizeof(in.packet) || in.packet.type != shm::kDescriptor || !fd ||
      waiting_.size() == kMaxWaiting) {
    return false;
  }
  return *more = waiting_.emplace(in.packet.number, std::move(fd)).second;
}

UniqueFd DescriptorInbox::Take(uint32_t number) {
  (void)Receive();
  const auto found = waiting_.find(number);
  if (found == waiting_.end()) return UniqueFd();
  UniqueFd fd = std::move(found->second);
  waiting_.erase(found);
  return fd;
}

}  // namespace kvstrata
