// RingSession: the daemon's end of one client's rings. Takes frames, asks the Store, answers.
//
// Trust: a frame is copied before it is looked at; sizes are checked against what arrived. A frame
// that breaks the format is kMalformed and costs this client its session; one that asks for
// something impossible is answered with an error and costs nothing.
// Events have no answer: the first error of a sequence's events is the answer to the next kGrow,
// kForkSequence or kSettle on it, so that nothing is lost silently.
// A kSettle, kRecompress, kBuild or kOpenSequence is answered when the store says so, which may be
// from another thread (a worker's; the disk tier's): what it says waits in a box that Drain
// empties, and the loop is woken. Meanwhile the ring is served. An open has the tier's deadline,
// the others `settle_timeout`: then the answer is DEADLINE_EXCEEDED SETTLE_TIMEOUT, and the work
// goes on. Back-pressure: replies that the reply ring does not take wait here; while more than
// `backlog_bytes` wait, or kMaxSettles settles and opens, no more requests are taken.
//
// Ownership: its own mapping of the session segment, so that the reply to kDetach can follow the
// end of the session in the store. Thread-safety: one thread at a time (the attach server's, or one
// that it lends the session to). Cost: no system call unless the client sleeps on its reply.
//
// Quanta: the loop that serves many sessions gives each a Quantum, whose budget counts work. A
// frame that would take more, or that may wait for whoever has the store, is not taken in it
// (kElsewhere): the loop lends the session to another thread for a quantum of its own, and its ring
// is not looked at meanwhile, so that a session's frames are handled in their order and one that
// asks for much waits for itself alone.
#ifndef KVSTRATA_SERVER_ATTACH_RING_SESSION_H_
#define KVSTRATA_SERVER_ATTACH_RING_SESSION_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "proto/ring.h"
#include "proto/ring_messages.h"
#include "server/attach/descriptor_closer.h"
#include "server/store/build_job.h"
#include "server/store/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

struct RingOptions {
  uint64_t backlog_bytes = 1 << 20;
  std::chrono::microseconds settle_timeout{60'000'000};
  std::function<void()> wake;             // the loop, from any thread; null: it polls
  std::unique_ptr<SessionImport> import;  // null: engines lend no tensors here
  // A descriptor that the client has sent under this number; -1: it has not. Null: as if none came.
  std::function<PassedFd(uint32_t)> take_descriptor;
  PeerIdentity peer;  // whose session it is, for the log
};

// What a session may do in one go. Work is an estimate of CPU time in ns, by what frames ask for.
struct Quantum {
  uint64_t work;
  uint64_t frame_bytes;  // longer ones are left, not even copied
  bool first_unbounded;  // the first frame may take more
  bool may_wait;         // for the store; else only what needs nothing of it is handled
};
inline constexpr uint64_t kQuantumWork = 200'000;
// The loop's own; that of a session that is lent; and the last one of a client that has hung up.
inline constexpr Quantum kLoopQuantum{kQuantumWork, 32 << 10, false, true};
inline constexpr Quantum kLoopQuantumBesideLong{kQuantumWork, 32 << 10, false, false};
inline constexpr Quantum kLentQuantum{kQuantumWork, ~uint64_t{0}, true, true};
inline constexpr Quantum kLastQuantum{500 * kQuantumWork, ~uint64_t{0}, true, true};

class RingSession {
 public:
  static constexpr size_t kMaxSettles = 256;

  enum class Outcome {
    kIdle,       // nothing to do, or nothing that can be done before the client reads
    kWorked,     // took at least one frame
    kDetached,   // the client detached: its sequences are closed, its reply is on its way
    kMalformed,  // the client broke the format; see malformed()
    kElsewhere,  // the next frame is not for a Quantum like this; see next_is_long()
    kFailed,     // there is no memory left even to say so; see malformed()
  };

  static Result<std::unique_ptr<RingSession>> Map(const SessionSegments& segments, Store* store,
                                                  RingOptions options);
  ~RingSession();
  RingSession(const RingSession&) = delete;
  RingSession& operator=(const RingSession&) = delete;

  Outcome Drain(const Quantum& quantum);
  // After kElsewhere: whether the frame itself takes more than a quantum.
  bool next_is_long() const { return next_is_long_; }
  // Whether ending the session takes more than a quantum.
  bool end_is_long() const;

  // Announces that the daemon is about to sleep; false when there is work and it must not.
  bool PrepareSleep();
  void CancelSleep();

  // Answers settles that have waited too long.
  void ExpireSettles();

  // Replies wait for room: come back without a doorbell.
  bool has_backlog() const { return !backlog_.empty(); }
  uint64_t frames() const { return frames_; }
  const std::string& malformed() const { return malformed_; }

 private:
  struct Frame {
    shm::FrameHeader header;
    std::span<const std::byte> payload;
  };
  struct Waiting {
    uint64_t id;
    std::vector<std::byte> bytes;  // ErrorReply and payload
  };
  // What an answered open is to be told to the import: nothing unless the sequence is imported.
  struct OpenRequest {
    uint64_t model = 0;
    std::vector<int32_t> tokens;
    uint32_t asked = 0;  // tokens that pages were taken for
    std::chrono::steady_clock::time_point begun;
  };
  struct Open {
    uint64_t id = 0;
    OpenRequest request;
    Result<OpenedSequence> opened;
  };
  struct LookedUp {
    uint64_t id = 0;
    Status status;
    shm::LookupReply reply{};
    std::string plan;  // in text form; "": of raw pages
    std::chrono::steady_clock::time_point begun;
  };
  // Where the store's late answers arrive; outlives the session, as long as the store needs.
  struct AnswerBox {
    void PutSettled(uint64_t id, const Status& status) KVS_EXCLUDES(mu);
    void PutOpened(uint64_t id, const OpenRequest& request, const Result<OpenedSequence>& opened)
        KVS_EXCLUDES(mu);
    void PutBuilt(uint64_t id, const Result<BuildResult>& result) KVS_EXCLUDES(mu);
    void PutLookedUp(uint64_t id, std::chrono::steady_clock::time_point begun,
                     const Result<PrefixHit>& hit) KVS_EXCLUDES(mu);
    void Tell();

    const std::function<void()> wake;
    // Who is in Drain: what it puts itself, it sees.
    std::atomic<std::thread::id> serving{};
    std::atomic<bool> any{false};
    Mutex mu;
    std::vector<std::pair<uint64_t, Status>> settled KVS_GUARDED_BY(mu);
    std::vector<Open> opened KVS_GUARDED_BY(mu);
    std::vector<std::pair<uint64_t, Result<BuildResult>>> built KVS_GUARDED_BY(mu);
    std::vector<LookedUp> looked_up KVS_GUARDED_BY(mu);
  };

  RingSession(std::byte* base, const SessionSegments& segments, Store* store, RingOptions options);

  bool MayTake() const {
    return backlog_used_ <= options_.backlog_bytes && settling_.size() + opening_ < kMaxSettles;
  }
  // The next frame into held_: kWorked; or what there is instead, kIdle: nothing. A frame without
  // memory for its payload is answered and passed over.
  Outcome TakeFrame(const Quantum& quantum);
  Outcome DrainFrames(const Quantum& quantum, Outcome outcome);
  Outcome HandleHeld();
  // Answers a frame that could not be handled; `front`: what there is of its payload.
  void Fail(const shm::FrameHeader& header, std::span<const std::byte> front, const Status& why);
  uint64_t WorkOf(const shm::FrameHeader& header) const;
  Outcome Handle(const Frame& frame);
  Outcome Malformed(std::string why);

  void Answer(uint64_t id, const Status& status, std::span<const std::byte> head = {},
              std::span<const std::byte> tail = {});
  bool TryPush(uint64_t id, std::span<const std::byte> reply, std::span<const std::byte> head,
               std::span<const std::byte> tail);
  void FlushBacklog();
  // Whether there was one.
  bool AnswerLate();

  Outcome OnRegisterModel(const Frame& frame);
  Outcome OnOpen(const Frame& frame);
  Outcome OnPlanText(const Frame& frame);
  Outcome OnFork(const Frame& frame);
  Outcome OnClose(const Frame& frame);
  Outcome OnGrow(const Frame& frame);
  Outcome OnTruncate(const Frame& frame);
  Outcome OnCloseKey(const Frame& frame);
  Outcome OnTruncateKey(const Frame& frame);
  Outcome OnSettle(const Frame& frame);
  Outcome OnDetach(const Frame& frame);
  Outcome OnCommit(const Frame& frame);
  Outcome OnReport(const Frame& frame);
  Outcome OnPrefillDone(const Frame& frame);
  Outcome OnRecall(const Frame& frame);
  // ring_work.cc
  Outcome OnBuild(const Frame& frame);
  Outcome OnRecompress(const Frame& frame);
  Outcome OnCancelWork(const Frame& frame);
  void AnswerBuilt(uint64_t id, const Result<BuildResult>& built);
  // Its answer comes late, or not in time.
  // False: a request of that id waits already.
  bool Await(uint64_t id) {
    return settling_.emplace(id, std::chrono::steady_clock::now() + options_.settle_timeout).second;
  }
  // Calls `then` when what the sequence sealed is copied, or with why it was not.
  void AwaitCopies(uint64_t sequence, SettleDone then);
  // ring_lookup.cc
  Outcome OnLookup(const Frame& frame);
  Outcome OnCapacity(const Frame& frame);
  void AnswerLookedUp(const LookedUp& answer);
  // ring_import.cc
  Outcome OnRegisterTensors(const Frame& frame);
  Outcome OnSealBlocks(const Frame& frame);
  Outcome OnAcknowledged(const Frame& frame);
  Status RegisterTensors(const shm::RegisterTensors& in);
  // Awaits copies first where there are any.
  void Settle(uint64_t sequence, SettleDone done);
  void NoteImported(const OpenRequest& request, const OpenedSequence& opened);

  void AnswerOpened(uint64_t id, const Result<OpenedSequence>& opened, uint32_t tokens);
  void NoteEvent(uint64_t sequence, const Status& status);
  void NoteTokens(uint64_t sequence, uint64_t tokens);
  uint32_t TokensOf(uint64_t sequence) const;
  // The error of the sequence's events, told once; SEQUENCE_UNKNOWN when it is not open here.
  Status TakeEventError(uint64_t sequence);

  // Constant.
  std::byte* const base_;
  const uint64_t bytes_;
  const uint64_t session_;
  Store* const store_;
  RingOptions options_;
  const std::shared_ptr<AnswerBox> box_;

  // Used by whoever serves the session.
  shm::RingConsumer requests_;
  shm::RingProducer replies_;
  // A frame that was taken off the ring and is not handled yet, and its payload.
  std::optional<shm::FrameHeader> held_;
  std::vector<std::byte> payload_;
  bool next_is_long_ = false;
  std::deque<Waiting> backlog_;
  uint64_t backlog_used_ = 0;
  struct OpenState {
    Status error;         // the first of its events since it was told
    uint32_t tokens = 0;  // that its table covers, about: what closing or forking it costs
  };
  std::map<uint64_t, OpenState> sequences_;
  // Settles and what else waits for workers, not answered yet, by request, with their deadlines.
  std::map<uint64_t, std::chrono::steady_clock::time_point> settling_;
  size_t opening_ = 0;                  // opens and look-ups that were not answered yet
  std::set<uint64_t> imported_;         // sequences
  std::set<uint64_t> imported_models_;  // whose sequences are
  std::string malformed_;
  uint64_t frames_ = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_SESSION_H_
