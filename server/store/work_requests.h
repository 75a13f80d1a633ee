// WorkRequests: what is asked of the workers beyond what the store offers them by itself: builds
// (build_job.h), recompressions now, and their end. A part of the store: its own state lies behind
// the store's lock.
//
// A sequence has one build at a time; the same plan asked for again waits for that one. Builds wait
// in the workers' queue, which is bounded, so a request may be refused; they end with the sequence
// and with the workers.
// Thread-safety: all methods from any thread, but for those that end in Locked, which the store
// calls under its lock. Answers (BuildDone, SettleDone) are given without it: at once in the
// caller's thread or later in a worker's. Cost: of a request, hashing nothing and a look at the
// sequence; of a part, the copies that its methods name.
// Errors of requests: SEQUENCE_UNKNOWN, DEVICE_FAILED, UNAVAILABLE WORK_STOPPED (no workers), and
// those that a method names.
#ifndef KVSTRATA_SERVER_STORE_WORK_REQUESTS_H_
#define KVSTRATA_SERVER_STORE_WORK_REQUESTS_H_

#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/sync.h"
#include "server/store/build_job.h"
#include "server/store/store.h"

namespace kvstrata {

struct CodecState;
struct Page;
struct Sequence;

// How far a sequence's recompression is.
struct WorkProgress {
  bool done = true;  // nothing is due, queued or running, or it was cancelled
  WorkInfo work;     // unset when done
  uint32_t extents = 0;
  uint64_t released_bytes = 0;  // raw bytes given back or moved to host since it was opened
};

class WorkRequests {
 public:
  // Works for its store, which outlives it.
  explicit WorkRequests(Store::Impl* store);
  ~WorkRequests();

  // Builds what a plan keeps beside the sequence's committed tokens. A result that is not `done`
  // says what there is so far; `done` (may be null) is called later then, else never. Under the
  // sequence's own plan the index grows by complete blocks: rows of the block that is being filled
  // are whoever's that runs the steps, and so are buckets. Under another plan the codec takes the
  // committed tokens for the prompt. PLAN_*; FAILED_PRECONDITION BUILD_INPUT names what the plan
  // needs and the sequence has not, BUILD_RUNNING: another plan is being built; RESOURCE_EXHAUSTED
  // WORK_QUEUE; UNIMPLEMENTED BUILD_BUCKETS (an operator asks), BUILD_BLOCKS (index blocks of
  // another plan that end inside of pages), BUILD_FAR (extents of another plan from rows that the
  // host cannot read). Later: POOL_EXHAUSTED, TABLES_FULL, COPY_FAILED, ABORTED SEQUENCE_CLOSED,
  // WORK_CANCELLED.
  Result<BuildResult> Build(const BuildRequest& request, BuildDone done);

  // --- workers ---
  // The next part; takes as long as the copies from pools that the host cannot read. ABORTED
  // BUILD_OVER when there is none: the request is answered then.
  Result<BuildJob> TakeBuild(uint64_t sequence);
  // Copies the blocks into pages and enters them.
  void PublishBlocks(BuildJob job);
  // Makes an artefact of them.
  void PublishExtents(BuildJob job, BuiltExtents made);
  // The request ends with `why`.
  void AbandonBuild(BuildJob job, const Status& why);

  // --- recompression ---
  // Has workers look at the sequence now, also after failures and a cancel; `done` (may be null) is
  // called as by Store::Settle. session 0: an operator asks. FAILED_PRECONDITION RECOMPRESS_RAW.
  Status Recompress(uint64_t session, uint64_t sequence, SettleDone done);
  // RECOMPRESS_RAW.
  Result<WorkProgress> Progress(uint64_t session, uint64_t sequence);
  // Ends what is queued or running of the sequence, builds too; whether something ran. What was not
  // published leaves nothing behind. It stays due, and is not offered before the next Recompress,
  // commit or report. Whoever settles meanwhile is told ABORTED WORK_CANCELLED.
  Result<bool> Cancel(uint64_t session, uint64_t sequence);

  // --- the store's ---
  // Ends the sequence's build.
  void EndBuildLocked(uint64_t sequence, const Status& why) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // The workers stop.
  void EndAllLocked(const Status& why) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // Adds the builds.
  void ListLocked(std::vector<WorkInfo>* list) const KVS_NO_THREAD_SAFETY_ANALYSIS;

 private:
  // A page, or an index block, that is copied to the host for a part.
  struct Staged {
    const Page* page = nullptr;
    std::byte** address = nullptr;  // null: to `to`
    std::byte* to = nullptr;
  };
  // A request that waits for workers, or is theirs.
  struct Pending {
    uint64_t id = 0;
    uint64_t sequence = 0;
    bool operators = false;  // an operator asked
    UserPlace place;         // among its user's work, until it ends
    bool own = true;         // the sequence's own plan
    Plan plan;
    IndexLayout index;
    uint32_t built_to = 0;      // of another plan: leading tokens whose blocks there are
    uint32_t built_blocks = 0;  // made by this request
    // For another plan with a codec.
    std::shared_ptr<const Recompressor> recompressor;
    PageKey artefact{};
    uint32_t extents = 0;  // of the artefact; 0: it is not there
    std::string parameters_digest;

    bool begun = false;    // a worker came for it
    bool running = false;  // a worker has a part of it
    std::chrono::steady_clock::time_point since;
    std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
    std::vector<BuildDone> waiters;
  };

  // work_requests.cc
  Result<Sequence*> FindLocked(uint64_t session, uint64_t sequence) KVS_NO_THREAD_SAFETY_ANALYSIS;
  Result<Pending> Prepare(const BuildRequest& request);
  Result<BuildResult> StartLocked(Pending pending, BuildDone done) KVS_NO_THREAD_SAFETY_ANALYSIS;
  Status CheckInputs(const Sequence& s, const Pending& p) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  Status CheckOther(const Sequence& s, const Pending& p) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  BuildResult ResultOf(const Sequence& s, const Pending& p) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  // The index is complete. If it is the sequence's own plan, it is recompressed: false, and `done`
  // is called when that is over, unless there is nothing to wait for.
  bool FinishLocked(Sequence* s, BuildResult* result,
                    std::vector<BuildDone> waiters) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void AnswerLocked(std::vector<BuildDone> waiters,
                    const Result<BuildResult>& result) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void AskLocked(Sequence* s) KVS_NO_THREAD_SAFETY_ANALYSIS;

  // build_parts.cc
  Pending* PendingOf(const BuildJob& job);
  // Rows whose blocks are made next; empty: none.
  Run NextBlocks(const Sequence& s, Pending* p) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  static bool WantsExtents(const Pending& p) { return p.recompressor != nullptr && p.extents == 0; }
  Result<BuildJob> TakeLocked(uint64_t sequence,
                              std::vector<Staged>* staged) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void FillBlocks(const Sequence& s, Run rows, BuildJob* job,
                  std::vector<Staged>* staged) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void FillExtents(const Sequence& s, const Pending& p, BuildJob* job,
                   std::vector<Staged>* staged) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // The key for the committed tokens.
  static PageKey ArtefactKey(const Sequence& s, const Pending& p);
  void ReadLocked(Page* page, BuildJob* job, std::byte** address,
                  std::vector<Staged>* staged) KVS_NO_THREAD_SAFETY_ANALYSIS;
  Status Stage(BuildJob* job, const std::vector<Staged>& staged) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // Pages with the drafts' bytes, which their publication or DropFresh ends.
  Status TakePages(const BuildJob& job, const RecompressOutput& output, std::vector<Page*>* fresh);
  void EnterBlocks(Sequence* s, Pending* p, const BuildJob& job,
                   std::span<Page* const> fresh) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void DropPages(std::vector<Page*>* fresh) KVS_NO_THREAD_SAFETY_ANALYSIS;

  Store::Impl* const store_;
  // By sequence. The store's lock guards them.
  std::map<uint64_t, Pending> builds_;
  uint64_t next_build_ = 1;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_WORK_REQUESTS_H_
