// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/reply_ring.h"

#include <utility>

#include "proto/ring_messages.h"
#include "server/sockets/packet.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {

void ReplyRing::Answer(uint64_t id, const Status& status, std::span<const std::byte> head,
                       std::span<const std::byte> tail) {
  if (!status.ok()) NoteRefusal(status, client_);
  shm::ErrorReply reply{};
  reply.code = static_cast<int32_t>(status.code());
  reply.payload_bytes = static_cast<uint32_t>(head.size() + tail.size());
  CopyText(status.reason(), reply.reason);
  CopyText(status.message(), reply.message);
  if (backlog_.empty() && TryPush(id, BytesOf(reply), head, tail)) return;
  NoteReplyWaits();
  Waiting waiting{id, {}};
  for (const auto part : {BytesOf(reply), head, tail}) {
    waiting.bytes.insert(waiting.bytes.end(), part.begin(), part.end());
  }
  backlog_used_ += waiting.bytes.size();
  backlog_.push_back(std::move(waiting));
}

bool ReplyRing::TryPush(uint64_t id, std::span<const std::byte> reply,
                        std::span<const std::byte> head, std::span<const std::byte> tail) {
  if (!ring_.Push(shm::kReply, id, {reply, head, tail})) return false;
  if (ring_.ConsumerSleeps()) ring_.FutexWake();
  return true;
}

void ReplyRing::Flush() {
  while (!backlog_.empty() && TryPush(backlog_.front().id, backlog_.front().bytes, {}, {})) {
    backlog_used_ -= backlog_.front().bytes.size();
    backlog_.pop_front();
  }
}

}  // namespace kvstrata
