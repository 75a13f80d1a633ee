// RingSession: the daemon's end of one client's rings. Takes frames, asks the Store, answers.
//
// Trust: a frame is copied before it is looked at; sizes are checked against what arrived. A frame
// that breaks the format is kMalformed and costs this client its session; one that asks for
// something impossible is answered with an error and costs nothing.
// Events have no answer: the first error of a sequence's events is the answer to the next kGrow,
// kForkSequence or kSettle on it, so that nothing is lost silently.
// A kSettle or kOpenSequence is answered when the store says so, which may be from another thread
// (a worker's; the disk tier's): what it says waits in a box that Drain empties, and the loop is
// woken. Meanwhile the ring is served. A settle has `settle_timeout`, then the answer is
// DEADLINE_EXCEEDED SETTLE_TIMEOUT; an open has the tier's deadline. Back-pressure: replies that
// the reply ring does not take wait here; while more than `backlog_bytes` wait, or kMaxSettles
// settles and opens, no more requests are taken.
//
// Ownership: its own mapping of the session segment, so that the reply to kDetach can follow the
// end of the session in the store. Thread-safety: one thread (the attach server's). Cost: no system
// call unless the client sleeps on its reply.
#ifndef KVSTRATA_SERVER_ATTACH_RING_SESSION_H_
#define KVSTRATA_SERVER_ATTACH_RING_SESSION_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "proto/ring.h"
#include "proto/ring_messages.h"
#include "server/store/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

struct RingOptions {
  uint64_t backlog_bytes = 1 << 20;
  std::chrono::microseconds settle_timeout{60'000'000};
  std::function<void()> wake;             // the loop, from any thread; null: it polls
  std::unique_ptr<SessionImport> import;  // null: engines lend no tensors here
  // A descriptor that the client has sent under this number; -1: it has not. Null: as if none came.
  std::function<UniqueFd(uint32_t)> take_descriptor;
};

class RingSession {
 public:
  static constexpr size_t kMaxSettles = 256;

  enum class Outcome {
    kIdle,       // nothing to do, or nothing that can be done before the client reads
    kWorked,     // took at least one frame
    kDetached,   // the client detached: its sequences are closed, its reply is on its way
    kMalformed,  // the client broke the format; see malformed()
  };

  static Result<std::unique_ptr<RingSession>> Map(const SessionSegments& segments, Store* store,
                                                  RingOptions options);
  ~RingSession();
  RingSession(const RingSession&) = delete;
  RingSession& operator=(const RingSession&) = delete;

  // Takes at most `max_frames` frames, so that one client cannot starve the others.
  Outcome Drain(int max_frames);

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
  };
  struct Open {
    uint64_t id = 0;
    OpenRequest request;
    Result<OpenedSequence> opened;
  };
  // Where the store's late answers arrive; outlives the session, as long as the store needs.
  struct AnswerBox {
    void PutSettled(uint64_t id, const Status& status) KVS_EXCLUDES(mu);
    void PutOpened(uint64_t id, const OpenRequest& request, const Result<OpenedSequence>& opened)
        KVS_EXCLUDES(mu);
    void Tell();

    const std::function<void()> wake;
    // What the loop puts itself, it sees before it sleeps.
    const std::thread::id loop = std::this_thread::get_id();
    std::atomic<bool> any{false};
    Mutex mu;
    std::vector<std::pair<uint64_t, Status>> settled KVS_GUARDED_BY(mu);
    std::vector<Open> opened KVS_GUARDED_BY(mu);
  };

  RingSession(std::byte* base, const SessionSegments& segments, Store* store, RingOptions options);

  bool MayTake() const {
    return backlog_used_ <= options_.backlog_bytes && settling_.size() + opening_ < kMaxSettles;
  }
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
  Outcome OnFork(const Frame& frame);
  Outcome OnClose(const Frame& frame);
  Outcome OnGrow(const Frame& frame);
  Outcome OnSettle(const Frame& frame);
  Outcome OnLookup(const Frame& frame);
  Outcome OnDetach(const Frame& frame);
  Outcome OnCommit(const Frame& frame);
  Outcome OnReport(const Frame& frame);
  Outcome OnPrefillDone(const Frame& frame);
  Outcome OnRecall(const Frame& frame);
  // ring_import.cc
  Outcome OnRegisterTensors(const Frame& frame);
  Outcome OnSealBlocks(const Frame& frame);
  Outcome OnAcknowledged(const Frame& frame);
  Status RegisterTensors(const shm::RegisterTensors& in);
  // Awaits copies first where there are any.
  void Settle(uint64_t sequence, SettleDone done);
  void NoteImported(const OpenRequest& request, const OpenedSequence& opened);

  void AnswerOpened(uint64_t id, const Result<OpenedSequence>& opened);
  void NoteEvent(uint64_t sequence, const Status& status);
  // The error of the sequence's events, told once; SEQUENCE_UNKNOWN when it is not open here.
  Status TakeEventError(uint64_t sequence);

  // Constant.
  std::byte* const base_;
  const uint64_t bytes_;
  const uint64_t session_;
  Store* const store_;
  RingOptions options_;
  const std::shared_ptr<AnswerBox> box_;

  // The attach thread's.
  shm::RingConsumer requests_;
  shm::RingProducer replies_;
  std::vector<std::byte> payload_;
  std::deque<Waiting> backlog_;
  uint64_t backlog_used_ = 0;
  // The session's open sequences, each with the first error of its events since it was told.
  std::map<uint64_t, Status> sequences_;
  // Settles that were not answered yet, by request, with their deadlines.
  std::map<uint64_t, std::chrono::steady_clock::time_point> settling_;
  size_t opening_ = 0;                  // opens that were not answered yet
  std::set<uint64_t> imported_;         // sequences
  std::set<uint64_t> imported_models_;  // whose sequences are
  std::string malformed_;
  uint64_t frames_ = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_SESSION_H_
