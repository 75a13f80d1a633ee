// SPDX-License-Identifier: Apache-2.0
// What a session that lends its engine's tensors asks (ring_handlers.h).
#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/ring_handlers.h"

namespace kvstrata::ring {

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
