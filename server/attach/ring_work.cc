// What a client asks of the workers: builds, recompressions, their end.
#include <cstring>

#include "server/attach/frame_reader.h"
#include "server/attach/packet.h"
#include "server/attach/ring_session.h"
#include "server/store/work_requests.h"

namespace kvstrata {

RingSession::Outcome RingSession::OnBuild(const Frame& frame) {
  shm::Build in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return Malformed("Build of a wrong size");
  }
  const uint64_t id = frame.header.id;
  if (const Status earlier = TakeEventError(in.sequence); !earlier.ok()) {
    Answer(id, earlier);
    return Outcome::kWorked;
  }
  BuildRequest request{session_, in.sequence, {plan.data(), strnlen(plan.data(), plan.size())}};
  if (!Await(id)) return Malformed("a request's id that waits for its answer already");
  AwaitCopies(in.sequence, [box = box_, store = store_, id, request](const Status& copied) {
    if (!copied.ok()) return box->PutBuilt(id, copied);
    const Result<BuildResult> now = store->builds().Build(
        request, [box, id](const Result<BuildResult>& built) { box->PutBuilt(id, built); });
    if (!now.ok() || now->done) box->PutBuilt(id, now);
  });
  AnswerLate();
  return Outcome::kWorked;
}

void RingSession::AnswerBox::PutBuilt(uint64_t id, const Result<BuildResult>& result) {
  {
    MutexLock lock(mu);
    built.emplace_back(id, result);
  }
  Tell();
}

void RingSession::AnswerBuilt(uint64_t id, const Result<BuildResult>& built) {
  if (!built.ok()) return Answer(id, built.status());
  const shm::BuildReply reply{built->indexed_tokens, built->built_blocks, built->extents,
                              built->own ? 1u : 0u};
  Answer(id, OkStatus(), BytesOf(reply));
}

RingSession::Outcome RingSession::OnRecompress(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("Recompress of a wrong size");
  const uint64_t id = frame.header.id;
  if (const Status earlier = TakeEventError(in.sequence); !earlier.ok()) {
    Answer(id, earlier);
    return Outcome::kWorked;
  }
  if (!Await(id)) return Malformed("a request's id that waits for its answer already");
  AwaitCopies(in.sequence, [box = box_, store = store_, session = session_, id,
                            sequence = in.sequence](const Status& copied) {
    const auto done = [box, id](const Status& status) { box->PutSettled(id, status); };
    if (!copied.ok()) return done(copied);
    const Status asked = store->requests().Recompress(session, sequence, done);
    if (!asked.ok()) done(asked);
  });
  AnswerLate();
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnCancelWork(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("CancelWork of a wrong size");
  const Result<bool> ran = store_->requests().Cancel(session_, in.sequence);
  const shm::CancelWorkReply reply{ran.ok() && *ran ? 1u : 0u, 0};
  Answer(frame.header.id, ran.status(), ran.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return Outcome::kWorked;
}

}  // namespace kvstrata
