// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/descriptor_inbox.h"

#include <utility>
#include <vector>

#include "proto/attach_messages.h"
#include "server/sockets/packet.h"

namespace kvstrata {

bool DescriptorInbox::Receive() {
  for (bool more = true; sound_ && more;) sound_ = ReceiveOne(&more);
  return sound_;
}

bool DescriptorInbox::ReceiveOne(bool* more) {
  *more = false;
  // One byte more than a packet, to tell a longer one.
  struct {
    shm::Descriptor packet;
    std::byte beyond;
  } in{};
  constexpr size_t kRoom = sizeof(in.packet) + 1;
  if (!closer_->MayTake(user_)) return false;
  size_t bytes = 0;
  std::vector<UniqueFd> received;
  const ReceiveOutcome outcome =
      ReceivePassed(socket_, {reinterpret_cast<std::byte*>(&in), kRoom}, &bytes, &received);
  std::vector<PassedFd> fds;
  for (UniqueFd& fd : received) fds.emplace_back(std::move(fd), closer_, user_);
  if (outcome == ReceiveOutcome::kDescriptors) return false;
  if (outcome != ReceiveOutcome::kPacket) return true;  // the end is the socket's owner's to see
  if (bytes != sizeof(in.packet) || in.packet.type != shm::kDescriptor || fds.size() != 1 ||
      waiting_.size() == kMaxWaiting) {
    return false;
  }
  return *more = waiting_.emplace(in.packet.number, std::move(fds.front())).second;
}

PassedFd DescriptorInbox::Take(uint32_t number) {
  (void)Receive();
  const auto found = waiting_.find(number);
  if (found == waiting_.end()) return {};
  PassedFd fd = std::move(found->second);
  waiting_.erase(found);
  return fd;
}

}  // namespace kvstrata
