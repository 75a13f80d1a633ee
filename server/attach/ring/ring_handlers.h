// SPDX-License-Identifier: Apache-2.0
// What a session's frames ask of the store, one function a message (proto/ring_messages.h), and
// what the store's late answers become.
//
// A handler checks sizes against what arrived, asks, and answers through RingState::replies; an
// event has no answer, and leaves its error with its sequence. Whoever serves the session calls
// them, one frame after the other. kDetach is RingSession's own: it ends the session.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "base/status.h"
#include "proto/ring_messages.h"
#include "server/attach/ring/answer_box.h"
#include "server/attach/ring/reply_ring.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/requests/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

// AwaitedRequests: the requests of one session that the store answers later (answer_box.h).
//
// A settle, a build and a recompression have a deadline here: then the answer is DEADLINE_EXCEEDED
// SETTLE_TIMEOUT, and the work goes on. An open and a look-up have the tier's, and are only
// counted. While kMost wait the session takes no more requests. Thread-safety: whoever serves the
// session.
class AwaitedRequests {
 public:
  static constexpr size_t kMost = 256;

  explicit AwaitedRequests(std::chrono::microseconds timeout) : timeout_(timeout) {}

  bool full() const { return deadlines_.size() + opening_ >= kMost; }

  // False: a request of that id waits already.
  bool Await(uint64_t id) {
    return deadlines_.emplace(id, std::chrono::steady_clock::now() + timeout_).second;
  }
  // It waits no more; whether it did.
  bool Answered(uint64_t id) { return deadlines_.erase(id) != 0; }
  // Answers those that have waited too long.
  void Expire(ReplyRing* replies);

  // Opens and look-ups that were not answered yet.
  size_t opening() const { return opening_; }
  void BeginOpening() { ++opening_; }
  void EndOpenings(size_t n) { opening_ -= n; }
  // Those begun since there were `before` failed, and will not be answered.
  void DropOpenings(size_t before) { opening_ = std::min(before, opening_); }

 private:
  const std::chrono::microseconds timeout_;
  std::map<uint64_t, std::chrono::steady_clock::time_point> deadlines_;  // by request
  size_t opening_ = 0;
};

// OpenSequences: the sequences that one session has open, as its ring knows them: each one's
// first error of an event, and about how many tokens it covers.
//
// Events have no answer: the first error of a sequence's events is the answer to the next request
// on it that could fail, so that nothing is lost silently. Thread-safety: whoever serves the
// session.
class OpenSequences {
 public:
  // `session` is for the log.
  explicit OpenSequences(uint64_t session) : session_(session) {}

  void Open(uint64_t sequence) { sequences_.try_emplace(sequence); }
  void Close(uint64_t sequence) { sequences_.erase(sequence); }
  void CloseAll() { sequences_.clear(); }

  void NoteEvent(uint64_t sequence, const Status& status);
  // The error of the sequence's events, told once; SEQUENCE_UNKNOWN when it is not open here.
  Status TakeEventError(uint64_t sequence);

  // Its table covers as many tokens, or more.
  void NoteTokens(uint64_t sequence, uint64_t tokens);
  uint32_t TokensOf(uint64_t sequence) const;
  // What closing all of them takes, at so much a sequence and a token.
  uint64_t WorkToClose(uint64_t of_sequence, uint64_t of_token) const;

 private:
  struct Sequence {
    Status error;         // the first of its events since it was told
    uint32_t tokens = 0;  // that its table covers, about: what closing or forking it costs
  };

  const uint64_t session_;
  std::map<uint64_t, Sequence> sequences_;
};

// SessionTensors: the tensors that one session's engine lends, and which of its sequences are
// copied from them (server/store/requests/import_sink.h).
//
// Ownership: owns the session's import; null where engines lend none. Thread-safety: whoever serves
// the session.
class SessionTensors {
 public:
  // A descriptor that the client has sent under this number; -1: it has not. Null: none came.
  using TakeDescriptor = std::function<PassedFd(uint32_t)>;

  SessionTensors(std::unique_ptr<SessionImport> import, TakeDescriptor take_descriptor)
      : import_(std::move(import)), take_descriptor_(std::move(take_descriptor)) {}

  // Those of SessionImport::Register; UNIMPLEMENTED IMPORT_NONE, TENSOR_KIND, TENSOR_HANDLE.
  Status Register(const shm::RegisterTensors& in);
  // Whether tensors of the model are registered.
  bool LendsFor(uint64_t model) const { return models_.contains(model); }

  // A sequence begins or ends. Notes it if it is imported; else nothing happens.
  void Opened(uint64_t model, std::span<const int32_t> tokens, const OpenedSequence& opened);
  void Closed(uint64_t sequence);
  bool Imports(uint64_t sequence) const { return sequences_.contains(sequence); }

  // Those of SessionImport; SEQUENCE_UNKNOWN without one.
  Status Seal(const SealedBlocks& blocks);
  Result<uint32_t> Acknowledged(uint64_t sequence);
  // Calls `then` when what the sequence sealed is copied, or with why it was not.
  void AwaitCopies(uint64_t sequence, SettleDone then);

  // Ends all copies. Nothing is lent any more.
  void End();

 private:
  std::unique_ptr<SessionImport> import_;
  const TakeDescriptor take_descriptor_;
  std::set<uint64_t> sequences_;
  std::set<uint64_t> models_;
};

}  // namespace kvstrata

namespace kvstrata::ring {

// What all messages of a session share.
struct RingState {
  Store* const store;
  const uint64_t session;
  const std::shared_ptr<AnswerBox> box;
  ReplyRing replies;
  AwaitedRequests awaited;
  OpenSequences sequences;
  SessionTensors tensors;
};

struct RingFrame {
  shm::FrameHeader header;
  std::span<const std::byte> payload;
};

// How the frame breaks the format, which costs the client its session; null: it was handled.
using Malformed = const char*;
inline constexpr Malformed kHandled = nullptr;

using Handler = Malformed (*)(RingState* state, const RingFrame& frame);
// For any frame but kDetach, by its type; null: there is no such type.
Handler HandlerOf(uint32_t type);
// Answers what has come into the box; whether there was something.
bool AnswerLate(RingState* state);

// ring_sequences.cc
Malformed OnRegisterModel(RingState* state, const RingFrame& frame);
Malformed OnOpen(RingState* state, const RingFrame& frame);
Malformed OnFork(RingState* state, const RingFrame& frame);
Malformed OnClose(RingState* state, const RingFrame& frame);
Malformed OnCloseKey(RingState* state, const RingFrame& frame);
Malformed OnTruncateKey(RingState* state, const RingFrame& frame);
Malformed OnGrow(RingState* state, const RingFrame& frame);
Malformed OnTruncate(RingState* state, const RingFrame& frame);
Malformed OnCommit(RingState* state, const RingFrame& frame);
Malformed OnReport(RingState* state, const RingFrame& frame);
Malformed OnPrefillDone(RingState* state, const RingFrame& frame);
Malformed OnRecall(RingState* state, const RingFrame& frame);
Malformed OnVerified(RingState* state, const RingFrame& frame);
// `tokens`: that its table covers.
void AnswerOpened(RingState* state, uint64_t id, const Result<OpenedSequence>& opened,
                  uint32_t tokens);

// ring_work.cc
Malformed OnSettle(RingState* state, const RingFrame& frame);
Malformed OnBuild(RingState* state, const RingFrame& frame);
Malformed OnRecompress(RingState* state, const RingFrame& frame);
Malformed OnCancelWork(RingState* state, const RingFrame& frame);
Malformed OnRegisterTensors(RingState* state, const RingFrame& frame);
Malformed OnSealBlocks(RingState* state, const RingFrame& frame);
Malformed OnAcknowledged(RingState* state, const RingFrame& frame);
void AnswerBuilt(RingState* state, uint64_t id, const Result<BuildResult>& built);

// ring_lookup.cc
Malformed OnLookup(RingState* state, const RingFrame& frame);
Malformed OnCapacity(RingState* state, const RingFrame& frame);
Malformed OnPlanText(RingState* state, const RingFrame& frame);
void AnswerLookedUp(RingState* state, const LookupAnswer& answer);

}  // namespace kvstrata::ring
