// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_link.h"

namespace kvstrata {

bool ChunkLink::Send(std::vector<std::byte> packet) {
  if (waiting_.empty()) {
    const SendOutcome outcome = SendPacket(socket_.get(), std::span<const std::byte>(packet), {});
    if (outcome != SendOutcome::kFull) return outcome == SendOutcome::kSent;
  }
  waiting_bytes_ += packet.size();
  if (waiting_bytes_ > most_) return false;
  waiting_.push_back(std::move(packet));
  return true;
}

bool ChunkLink::SendWaiting() {
  while (!waiting_.empty()) {
    const SendOutcome outcome =
        SendPacket(socket_.get(), std::span<const std::byte>(waiting_.front()), {});
    if (outcome == SendOutcome::kGone) return false;
    if (outcome == SendOutcome::kFull) return true;
    waiting_bytes_ -= waiting_.front().size();
    waiting_.pop_front();
  }
  return true;
}

}  // namespace kvstrata
