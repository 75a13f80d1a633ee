// SPDX-License-Identifier: Apache-2.0
// Builds: what a plan keeps beside a sequence's rows, made on request (build_job.h), piece after
// piece by the workers.
//
// A sequence has one build at a time; the same plan asked for again waits for that one. Builds wait
// in the workers' queue, which is bounded, so a request may be refused; they end with the sequence
// and with the workers.
// Ownership: a piece's hold keeps the pages that it reads. Thread-safety: methods that say so are
// called under the store's lock, all others from any thread. Answers (BuildDone) are given without
// it: at once in the caller's thread or later in a worker's. Cost: of a request, hashing nothing
// and a look at the sequence; of a piece, the copies that its methods name. Errors of requests:
// SEQUENCE_UNKNOWN, DEVICE_FAILED, UNAVAILABLE WORK_STOPPED (no workers), and those that a method
// names.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/plan/plan.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/options/user_limits.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/requests/build_job.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

// A request that waits for workers, or is theirs.
struct PendingBuild {
  bool WantsExtents() const { return recompressor != nullptr && extents == 0; }
  // What there is so far.
  BuildResult ResultFor(const Sequence& s) const;
  // The key for the committed tokens.
  PageKey ArtefactKey(const Sequence& s) const;

  uint64_t id = 0;
  uint64_t sequence = 0;
  bool operators = false;  // an operator asked
  UserPlace place;         // among its user's work, until it ends
  bool own = true;         // the sequence's own plan
  Plan plan;
  IndexLayout index;
  uint32_t built_to = 0;      // for another plan: leading tokens whose blocks there are
  uint32_t built_blocks = 0;  // made by this request
  // For another plan with a codec.
  std::shared_ptr<const Recompressor> recompressor;
  PageKey artefact{};
  uint32_t extents = 0;  // extents of the artefact; 0: it is not there
  std::string parameters_digest;

  bool begun = false;    // a worker came for it
  bool running = false;  // a worker has a piece of it
  std::chrono::steady_clock::time_point since;
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  std::vector<BuildDone> waiters;
};

class Builds {
 public:
  Builds(Books& books, const std::shared_ptr<UserLimits>& user_limits, Plans& plans,
         Answers& answers, SessionCatalog& catalog, Devices& devices, Recompression& recompression,
         BuildPages& pages)
      : books_(books),
        user_limits_(user_limits),
        plans_(plans),
        answers_(answers),
        catalog_(catalog),
        devices_(devices),
        recompression_(recompression),
        pages_(pages) {}

  // Builds what a plan keeps beside the sequence's committed tokens. A result that is not `done`
  // says what there is so far; `done` (may be null) is called later then, else never. Under the
  // sequence's own plan the index grows by complete blocks: rows of the block that is being filled
  // are whoever's that runs the steps, and so are buckets. Under another plan the codec takes the
  // committed tokens for the prompt. PLAN_*; FAILED_PRECONDITION BUILD_INPUT names what the plan
  // needs and the sequence has not, BUILD_RUNNING: another plan is being built; RESOURCE_EXHAUSTED
  // WORK_QUEUE; UNIMPLEMENTED BUILD_BUCKETS (an operator asks), BUILD_BLOCKS (index blocks of
  // another plan that end inside of pages), BUILD_ON_GPU (extents of another plan from rows that
  // the host cannot read). Later: POOL_EXHAUSTED, TABLES_FULL, COPY_FAILED, ABORTED
  // SEQUENCE_CLOSED, WORK_CANCELLED.
  Result<BuildResult> Build(const BuildRequest& request, BuildDone done) KVS_EXCLUDES(store_lock);

  // --- workers ---
  // The next piece; takes as long as the copies from pools that the host cannot read. ABORTED
  // BUILD_OVER when there is none: the request is answered then.
  Result<BuildJob> TakeBuild(uint64_t sequence) KVS_EXCLUDES(store_lock);
  // Copies the blocks into pages and enters them.
  void PublishBlocks(BuildJob job) KVS_EXCLUDES(store_lock);
  // Makes an artefact of them.
  void PublishExtents(BuildJob job, BuiltExtents made) KVS_EXCLUDES(store_lock);
  // The request ends with `why`.
  void AbandonBuild(BuildJob job, const Status& why) KVS_EXCLUDES(store_lock);

  // Ends the sequence's build; whether a worker had a piece of it.
  bool EndBuildLocked(uint64_t sequence, const Status& why) KVS_REQUIRES(store_lock);
  // The workers stop.
  void EndAllLocked(const Status& why) KVS_REQUIRES(store_lock);
  // Adds the builds.
  void ListLocked(std::vector<WorkInfo>* list) const KVS_REQUIRES(store_lock);

 private:
  Result<PendingBuild> Prepare(const BuildRequest& request) KVS_EXCLUDES(store_lock);
  Result<BuildResult> StartLocked(PendingBuild pending, BuildDone done) KVS_REQUIRES(store_lock);
  Status CheckInputs(const Sequence& s, const PendingBuild& p) const KVS_REQUIRES(store_lock);
  // The index is complete. If it is the sequence's own plan, it is recompressed: false, and `done`
  // is called when that is over, unless there is nothing to wait for.
  bool FinishLocked(Sequence* s, BuildResult* result, std::vector<BuildDone> waiters)
      KVS_REQUIRES(store_lock);
  void AnswerLocked(std::vector<BuildDone> waiters, const Result<BuildResult>& result)
      KVS_REQUIRES(store_lock);

  // build_pieces.cc
  PendingBuild* PendingOf(const BuildJob& job) KVS_REQUIRES(store_lock);
  // Rows whose blocks are made next; empty: none.
  Run NextBlocks(const Sequence& s, PendingBuild* p) const KVS_REQUIRES(store_lock);
  Result<BuildJob> TakeLocked(uint64_t sequence, std::vector<StagedPage>* staged)
      KVS_REQUIRES(store_lock);
  // Pages with the drafts' bytes, which their publication or Discard ends. BUILD_OVER.
  Status CopyPages(const BuildJob& job, const RecompressOutput& output, FreshPages* fresh)
      KVS_EXCLUDES(store_lock);

  Books& books_;
  const std::shared_ptr<UserLimits>& user_limits_;
  Plans& plans_;
  Answers& answers_;
  SessionCatalog& catalog_;
  Devices& devices_;
  Recompression& recompression_;
  BuildPages& pages_;
  std::map<uint64_t, PendingBuild> builds_ KVS_GUARDED_BY(store_lock);  // by sequence
  uint64_t next_build_ KVS_GUARDED_BY(store_lock) = 1;
};

}  // namespace kvstrata
