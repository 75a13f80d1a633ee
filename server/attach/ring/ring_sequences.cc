// SPDX-License-Identifier: Apache-2.0
// Models, sequences and what is reported of them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/ring_handlers.h"
#include "server/sockets/packet.h"
#include "server/telemetry/log.h"
#include "server/telemetry/verified_hits.h"

namespace kvstrata::ring {
namespace {

Status ReadModel(const shm::RegisterModel& in, std::span<const int32_t> boundaries,
                 ModelDesc* out) {
  const auto text = [](std::string_view field, std::span<const char> from, std::string* to) {
    if (ReadText(from, to) && Printable(*to) == *to) return OkStatus();
    return InvalidArgument("MODEL_TEXT", "model " + std::string(field) +
                                             " is not NUL-terminated UTF-8 without control "
                                             "characters in " +
                                             std::to_string(from.size()) + " bytes");
  };
  KVS_RETURN_IF_ERROR(text("name", in.name, &out->name));
  KVS_RETURN_IF_ERROR(text("digest", in.digest, &out->digest));
  KVS_RETURN_IF_ERROR(text("layout", in.layout, &out->layout));
  KVS_RETURN_IF_ERROR(text("adapter", in.adapter, &out->adapter));
  if (!IsDType(in.dtype)) {
    return InvalidArgument("MODEL_DTYPE", "model dtype " + std::to_string(in.dtype) +
                                              "; allowed: " + AllDTypes("KVS"));
  }
  if (in.keys_pre_rope != 0 && in.keys_pre_rope != 1) {
    return InvalidArgument("MODEL_KEYS", "model keys_pre_rope " + std::to_string(in.keys_pre_rope) +
                                             "; allowed: 0 (post_rope), 1 (pre_rope)");
  }
  out->geometry = {in.layers,   in.query_heads, in.kv_heads,
                   in.head_dim, in.page_tokens, static_cast<DType>(in.dtype)};
  out->geometry.scale = static_cast<float>(in.scale);
  KVS_ASSIGN_OR_RETURN(out->geometry.rotary, ReadRotary({in.keys_pre_rope != 0, in.rope_theta,
                                                         in.rope_dim, in.rope_interleaved},
                                                        in.head_dim));
  out->rank = in.rank;
  out->ranks = in.ranks;
  out->boundary_tokens.assign(boundaries.begin(), boundaries.end());
  return OkStatus();
}

}  // namespace

void AnswerOpened(RingState* state, uint64_t id, const Result<OpenedSequence>& opened,
                  uint32_t tokens) {
  if (!opened.ok()) return state->replies.Answer(id, opened.status());
  const OpenedSequence& s = opened.value();
  state->sequences.Open(s.sequence);
  LogEvent(LogLevel::kDebug, "sequence_opened",
           {{"session", state->session},
            {"sequence", s.sequence},
            {"plan", s.plan.name},
            {"held_tokens", s.held_tokens}});
  state->sequences.NoteTokens(s.sequence, tokens);
  const std::string plan = FormatPlan(s.plan);
  // Ends that the frame has no room for are reported by the engine again, as if never stored.
  const size_t besides =
      sizeof(shm::FrameHeader) + sizeof(shm::ErrorReply) + sizeof(shm::SequenceReply) + plan.size();
  const size_t ends = std::min(s.boundary.size(), state->replies.max_frame() - besides);
  // Where the model names the tokens that end sentences, a client knows the ends by itself.
  const uint32_t bounded = s.boundary_tokens.empty()
                               ? std::min(s.bounded_tokens, static_cast<uint32_t>(ends))
                               : s.bounded_tokens;
  std::vector<std::byte> text(plan.size() + ends);
  std::memcpy(text.data(), plan.data(), plan.size());
  if (ends != 0) std::memcpy(text.data() + plan.size(), s.boundary.data(), ends);
  const shm::SequenceReply reply{s.sequence,
                                 s.slot,
                                 s.held_tokens,
                                 s.indexed_tokens,
                                 static_cast<uint32_t>(plan.size()),
                                 s.surprisal_tokens,
                                 static_cast<uint32_t>(ends),
                                 bounded,
                                 0};
  state->replies.Answer(id, OkStatus(), BytesOf(reply), text);
}

Malformed OnRegisterModel(RingState* state, const RingFrame& frame) {
  shm::RegisterModel in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> boundaries;
  if (!Take(&rest, &in) || in.boundary_count < 0 ||
      !TakeArray(&rest, static_cast<uint32_t>(in.boundary_count), &boundaries) || !rest.empty()) {
    return "RegisterModel of a wrong size";
  }
  ModelDesc desc;
  if (Status status = ReadModel(in, boundaries, &desc); !status.ok()) {
    state->replies.Answer(frame.header.id, status);
    return kHandled;
  }
  const Result<uint64_t> model = state->store->models().RegisterModel(state->session, desc);
  const shm::ModelReply reply{model.ok() ? model.value() : 0};
  state->replies.Answer(frame.header.id, model.status(),
                        model.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return kHandled;
}

Malformed OnOpen(RingState* state, const RingFrame& frame) {
  shm::OpenSequence in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  std::span<const int32_t> tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return "OpenSequence of a wrong size";
  }
  std::string key;
  if (!ReadText(in.key, &key)) return "OpenSequence with a key that does not end";
  const std::string_view text(plan.data(), strnlen(plan.data(), plan.size()));
  const uint64_t id = frame.header.id;
  OpenRequest request{
      in.model, {}, std::max(in.tokens, in.reserve_tokens), std::chrono::steady_clock::now()};
  if (state->tensors.LendsFor(in.model)) request.tokens.assign(tokens.begin(), tokens.end());
  const OpenOptions options{
      {in.max_held_tokens, (in.flags & shm::OpenSequence::kOnlyReported) != 0},
      in.reserve_tokens,
      (in.flags & shm::OpenSequence::kPrivate) != 0};
  state->awaited.BeginOpening();
  state->store->openings().OpenSequence(
      state->session, in.model, text, tokens,
      [box = state->box, store = state->store, session = state->session, id, request,
       key](const Result<OpenedSequence>& opened) {
        box->PutOpened(id, request, store->sequences().GiveKey(session, opened, key));
      },
      options);
  AnswerLate(state);  // most have nothing to wait for
  return kHandled;
}

Malformed OnFork(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "ForkSequence of a wrong size";
  if (const Status earlier = state->sequences.TakeEventError(in.sequence); !earlier.ok()) {
    state->replies.Answer(frame.header.id, earlier);
  } else {
    AnswerOpened(state, frame.header.id,
                 state->store->sequences().ForkSequence(state->session, in.sequence),
                 state->sequences.TokensOf(in.sequence));
  }
  return kHandled;
}

Malformed OnClose(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "CloseSequence of a wrong size";
  state->sequences.Close(in.sequence);
  state->tensors.Closed(in.sequence);
  const Status closed = state->store->sequences().CloseSequence(state->session, in.sequence);
  if (closed.ok()) {
    LogEvent(LogLevel::kDebug, "sequence_closed",
             {{"session", state->session}, {"sequence", in.sequence}});
  }
  state->replies.Answer(frame.header.id, closed);
  return kHandled;
}

Malformed OnCloseKey(RingState* state, const RingFrame& frame) {
  shm::SequenceKey in;
  std::string key;
  if (!TakeWhole(frame.payload, &in) || !ReadText(in.key, &key)) {
    return "CloseKey of a wrong size";
  }
  state->replies.Answer(frame.header.id, state->store->sequences().CloseKey(state->session, key));
  return kHandled;
}

Malformed OnTruncateKey(RingState* state, const RingFrame& frame) {
  shm::TruncateKey in;
  std::string key;
  if (!TakeWhole(frame.payload, &in) || !ReadText(in.key, &key)) {
    return "TruncateKey of a wrong size";
  }
  state->replies.Answer(frame.header.id,
                        state->store->sequences().TruncateKey(state->session, key, in.tokens));
  return kHandled;
}

Malformed OnGrow(RingState* state, const RingFrame& frame) {
  shm::Grow in;
  if (!TakeWhole(frame.payload, &in)) return "Grow of a wrong size";
  Status status = state->sequences.TakeEventError(in.sequence);
  if (status.ok()) {
    status = state->store->steps().Grow(state->session, in.sequence, in.tokens, in.writable,
                                        in.index_writable);
    if (status.ok()) state->sequences.NoteTokens(in.sequence, in.tokens);
  }
  state->replies.Answer(frame.header.id, status);
  return kHandled;
}

Malformed OnTruncate(RingState* state, const RingFrame& frame) {
  shm::Truncate in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> tail;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.tail, &tail) || !rest.empty()) {
    return "Truncate of a wrong size";
  }
  Status status = state->sequences.TakeEventError(in.sequence);
  if (status.ok()) {
    status = state->store->sequences().Truncate(state->session, in.sequence, in.tokens, tail);
  }
  state->replies.Answer(frame.header.id, status);
  return kHandled;
}

Malformed OnCommit(RingState* state, const RingFrame& frame) {
  shm::Commit in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return "Commit of a wrong size";
  }
  Status status;
  if ((in.flags & shm::Commit::kPrivate) != 0) {
    status = state->store->sequences().MakePrivate(state->session, in.sequence);
  }
  if (status.ok()) {
    status = state->store->steps().Commit(state->session, in.sequence, in.first, tokens,
                                          in.indexed_tokens);
  }
  state->sequences.NoteEvent(in.sequence, status);
  state->sequences.NoteTokens(in.sequence,
                              std::min<uint64_t>(uint64_t{in.first} + in.tokens, 1u << 24));
  return kHandled;
}

Malformed OnReport(RingState* state, const RingFrame& frame) {
  shm::Report in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in)) return "Report of a wrong size";
  const auto has = [&in](uint32_t flag) { return (in.flags & flag) != 0; };
  std::span<const float> surprisal, entropy;
  std::span<const uint8_t> boundary;
  if (!TakeArray(&rest, has(shm::Report::kSurprisal) ? in.n : 0, &surprisal) ||
      !TakeArray(&rest, has(shm::Report::kEntropy) ? in.n : 0, &entropy) ||
      !TakeArray(&rest, has(shm::Report::kBoundary) ? in.n : 0, &boundary) || !rest.empty()) {
    return "Report of a wrong size";
  }
  state->sequences.NoteEvent(
      in.sequence,
      state->store->steps().Report(state->session, in.sequence, in.first, in.n,
                                   has(shm::Report::kSurprisal) ? surprisal.data() : nullptr,
                                   has(shm::Report::kEntropy) ? entropy.data() : nullptr,
                                   has(shm::Report::kBoundary) ? boundary.data() : nullptr));
  return kHandled;
}

Malformed OnPrefillDone(RingState* state, const RingFrame& frame) {
  shm::SequenceRef in;
  if (!TakeWhole(frame.payload, &in)) return "PrefillDone of a wrong size";
  const bool imported = state->tensors.Imports(in.sequence);  // then its copies come first
  state->sequences.NoteEvent(
      in.sequence, imported ? state->tensors.Seal({in.sequence, 0, {}, {}, true})
                            : state->store->steps().PrefillDone(state->session, in.sequence));
  return kHandled;
}

// Whoever computed on a hit that differs has made something that nobody else should have.
Malformed OnVerified(RingState* state, const RingFrame& frame) {
  shm::Verified in;
  if (!TakeWhole(frame.payload, &in)) return "Verified of a wrong size";
  if (in.equal == 0) {
    state->sequences.NoteEvent(in.sequence,
                               state->store->sequences().MakePrivate(state->session, in.sequence));
  }
  NoteVerifiedHit({state->session, in.sequence, in.first, in.n, in.equal != 0});
  return kHandled;
}

// What it says is the audit's matter alone: it never fails the sequence.
Malformed OnRecall(RingState* state, const RingFrame& frame) {
  shm::Recall in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> layers;
  std::span<const float> recall, error;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.layers, &layers) ||
      !TakeArray(&rest, uint64_t{in.layers} * in.heads, &recall) ||
      !TakeArray(&rest, uint64_t{in.layers} * in.heads, &error) || !rest.empty()) {
    return "Recall of a wrong size";
  }
  state->store->recalls().AddRecall(
      state->session, in.sequence,
      {in.audit, static_cast<int32_t>(in.position), static_cast<int32_t>(in.heads),
       (in.flags & shm::Recall::kRawGone) != 0, in.dropped, layers, recall, error,
       (in.flags & shm::Recall::kCaptured) != 0});
  return kHandled;
}

}  // namespace kvstrata::ring
