// SPDX-License-Identifier: Apache-2.0
// What a client asks of the workers: settles, builds, recompressions, their end; and what a session
// that lends its engine's tensors asks.
#include <cstring>
#include <utility>

#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/ring_handlers.h"
#include "server/sockets/packet.h"
#include "server/store/codecs/work_requests.h"

namespace kvstrata::ring {
namespace {

// Awaits copies first where there are any.
void Settle(RingState* state, uint64_t sequence, SettleDone done) {
  state->tensors.AwaitCopies(sequence, [store = state->store, session = state->session, sequence,
                                        done = std::move(done)](const Status& copied) {
    if (!copied.ok()) return done(copied);
    store->recompression().Settle(session, sequence, done);
  });
}

}  // namespace

Malformed OnSettle(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "Settle of a wrong size";
  // Events are handled in the order of the ring, before this frame.
  if (const Status earlier = state->sequences.TakeEventError(in.sequence); !earlier.ok()) {
    state->replies.Answer(frame.header.id, earlier);
    return kHandled;
  }
  const uint64_t id = frame.header.id;
  if (!state->awaited.Await(id)) return "a request's id that waits for its answer already";
  Settle(state, in.sequence,
         [box = state->box, id](const Status& status) { box->PutSettled(id, status); });
  AnswerLate(state);  // most have nothing to wait for
  return kHandled;
}

Malformed OnBuild(RingState* state, const RingFrame& frame) {
  shm::Build in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return "Build of a wrong size";
  }
  const uint64_t id = frame.header.id;
  if (const Status earlier = state->sequences.TakeEventError(in.sequence); !earlier.ok()) {
    state->replies.Answer(id, earlier);
    return kHandled;
  }
  BuildRequest request{
      state->session, in.sequence, {plan.data(), strnlen(plan.data(), plan.size())}};
  if (!state->awaited.Await(id)) return "a request's id that waits for its answer already";
  state->tensors.AwaitCopies(
      in.sequence, [box = state->box, store = state->store, id, request](const Status& copied) {
        if (!copied.ok()) return box->PutBuilt(id, copied);
        const Result<BuildResult> now = store->builds().Build(
            request, [box, id](const Result<BuildResult>& built) { box->PutBuilt(id, built); });
        if (!now.ok() || now->done) box->PutBuilt(id, now);
      });
  AnswerLate(state);
  return kHandled;
}

void AnswerBuilt(RingState* state, uint64_t id, const Result<BuildResult>& built) {
  if (!built.ok()) return state->replies.Answer(id, built.status());
  const shm::BuildReply reply{built->indexed_tokens, built->built_blocks, built->extents,
                              built->own ? 1u : 0u};
  state->replies.Answer(id, OkStatus(), BytesOf(reply));
}

Malformed OnRecompress(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "Recompress of a wrong size";
  const uint64_t id = frame.header.id;
  if (const Status earlier = state->sequences.TakeEventError(in.sequence); !earlier.ok()) {
    state->replies.Answer(id, earlier);
    return kHandled;
  }
  if (!state->awaited.Await(id)) return "a request's id that waits for its answer already";
  state->tensors.AwaitCopies(
      in.sequence, [box = state->box, store = state->store, session = state->session, id,
                    sequence = in.sequence](const Status& copied) {
        const auto done = [box, id](const Status& status) { box->PutSettled(id, status); };
        if (!copied.ok()) return done(copied);
        const Status asked = store->requests().Recompress(session, sequence, done);
        if (!asked.ok()) done(asked);
      });
  AnswerLate(state);
  return kHandled;
}

Malformed OnCancelWork(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "CancelWork of a wrong size";
  const Result<bool> ran = state->store->requests().Cancel(state->session, in.sequence);
  const shm::CancelWorkReply reply{ran.ok() && *ran ? 1u : 0u, 0};
  state->replies.Answer(frame.header.id, ran.status(),
                        ran.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return kHandled;
}

Malformed OnRegisterTensors(RingState* state, const RingFrame& frame) {
  shm::RegisterTensors in;
  if (!TakeWhole(frame.payload, &in)) return "RegisterTensors of a wrong size";
  state->replies.Answer(frame.header.id, state->tensors.Register(in));
  return kHandled;
}

Malformed OnSealBlocks(RingState* state, const RingFrame& frame) {
  shm::SealBlocks in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> blocks, tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.blocks, &blocks) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return "SealBlocks of a wrong size";
  }
  Status status = state->sequences.TakeEventError(in.sequence);
  if (status.ok()) status = state->tensors.Seal({in.sequence, in.first, blocks, tokens});
  state->replies.Answer(frame.header.id, status);
  return kHandled;
}

Malformed OnAcknowledged(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "Acknowledged of a wrong size";
  const Result<uint32_t> tokens = state->tensors.Acknowledged(in.sequence);
  const shm::AcknowledgedReply reply{tokens.ok() ? *tokens : 0, 0};
  state->replies.Answer(frame.header.id, tokens.status(),
                        tokens.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return kHandled;
}

}  // namespace kvstrata::ring
