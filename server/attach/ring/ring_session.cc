// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/ring_session.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvstrata {
namespace {

// The client has not got the segment yet: its header can still be believed.
shm::SessionHeader* HeaderOf(std::byte* base, uint64_t bytes) {
  auto* header = reinterpret_cast<shm::SessionHeader*>(base);
  KVS_CHECK(header->request_ring_offset + shm::kRequestRingBytes <= bytes);
  KVS_CHECK(header->reply_ring_offset + shm::kReplyRingBytes <= bytes);
  return header;
}

shm::RingConsumer RequestsOf(std::byte* base, uint64_t bytes) {
  shm::SessionHeader* const header = HeaderOf(base, bytes);
  return {&header->request, base + header->request_ring_offset, shm::kRequestRingBytes};
}

shm::RingProducer RepliesOf(std::byte* base, uint64_t bytes) {
  shm::SessionHeader* const header = HeaderOf(base, bytes);
  return {&header->reply, base + header->reply_ring_offset, shm::kReplyRingBytes};
}

}  // namespace

Result<std::unique_ptr<RingSession>> RingSession::Map(const SessionSegments& segments, Store* store,
                                                      RingOptions options) {
  void* base = mmap(nullptr, segments.session_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                    segments.session_fd, 0);
  if (base == MAP_FAILED) {
    return ResourceExhausted("SESSION_MAP", "cannot map a session segment of " +
                                                std::to_string(segments.session_bytes) +
                                                " bytes: " + std::strerror(errno));
  }
  return std::unique_ptr<RingSession>(
      new RingSession(static_cast<std::byte*>(base), segments, store, std::move(options)));
}

RingSession::RingSession(std::byte* base, const SessionSegments& segments, Store* store,
                         RingOptions options)
    : base_(base),
      bytes_(segments.session_bytes),
      requests_(RequestsOf(base_, bytes_)),
      state_{.store = store,
             .session = segments.session,
             .box = std::make_shared<AnswerBox>(std::move(options.wake)),
             .replies = {RepliesOf(base_, bytes_),
                         options.backlog_bytes,
                         {"ring", options.peer.uid, options.peer.pid, segments.session, ""}},
             .awaited = AwaitedRequests(options.settle_timeout),
             .sequences = OpenSequences(segments.session),
             .tensors = {std::move(options.import), std::move(options.take_descriptor)}} {}

RingSession::~RingSession() { munmap(base_, bytes_); }

bool RingSession::PrepareSleep() {
  requests_.PrepareSleep();
  if (state_.box->any()) return false;
  return !MayTake() || (!held_ && requests_.Empty());
}

RingSession::Outcome RingSession::Malformed(std::string why) {
  malformed_ = std::move(why);
  return Outcome::kMalformed;
}

RingSession::Outcome RingSession::OnDetach(const ring::RingFrame& frame) {
  if (!frame.payload.empty()) return Malformed("Detach with a payload");
  // The end of the session wipes its segment, and the reply with it: that waits until the client
  // has read it. Until then this is as good: sequences are closed before the reply.
  state_.tensors.End();
  state_.store->sessions().EndSession(state_.session, SessionEnd::kEof);
  state_.sequences.CloseAll();
  state_.replies.Answer(frame.header.id, OkStatus());
  return Outcome::kDetached;
}

}  // namespace kvstrata
