// SPDX-License-Identifier: Apache-2.0
// Recompression (recompress_job.h): what is due, what a worker gets, how its extents are published,
// who waits for it.
//
// Ownership: borrows the sink. Thread-safety: methods that say so are called under the store's
// lock, all others from any thread; the sink's are called under it. Cost: a look at the sequence,
// but for what copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "server/store/codecs/codec_extents.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

class Recompression {
 public:
  Recompression(Books& books, const StoreOptions& options, Answers& answers,
                SessionCatalog& catalog, PageHolds& holds, CodecExtents& extents,
                RawPages& raw_pages);

  // NOT_FOUND when the sequence is gone, ABORTED WORK_NOTHING when nothing is due (any more).
  Result<RecompressJob> TakeRecompression(uint64_t sequence) KVS_EXCLUDES(store_lock);
  // Before a run: copies what it reads of a pool that the host cannot read to the host, and points
  // the job there; its other pages become null. On such a pool it takes as much host memory as the
  // rows that the run reads. ABORTED when cancelled; RESOURCE_EXHAUSTED MEMORY_EXHAUSTED;
  // COPY_FAILED. The job is to be abandoned then.
  Status StageRecompression(RecompressJob* job) KVS_EXCLUDES(store_lock);
  // Copies the drafts into extents, publishes a table that names them with `next` as the sequence's
  // Recompressor, and gives up raw pages as the plan's keep_raw says. `next` and `output` are those
  // of the job; with a job that has none, only raw pages are placed. Takes as long as the copies.
  // What fails leaves the sequence as it was: SEQUENCE_UNKNOWN (closed meanwhile), POOL_EXHAUSTED,
  // TABLES_FULL, DRAFT_INVALID (INTERNAL).
  Result<RecompressResult> PublishRecompression(RecompressJob job,
                                                std::unique_ptr<Recompressor> next,
                                                RecompressOutput output) KVS_EXCLUDES(store_lock);
  // `why` is shown; ABORTED is no failure.
  void AbandonRecompression(RecompressJob job, const Status& why) KVS_EXCLUDES(store_lock);
  // Offers again what the sink refused and what has waited out a failure. Cheap when there is none.
  void OfferDue() KVS_EXCLUDES(store_lock);
  // Calls `done` once nothing of the sequence is due, queued, running or on its way from a tier: at
  // once, in this thread, or later in a worker's or the tier's, without any lock; with the error
  // when its last recompression failed, or what was on its way is lost.
  // SEQUENCE_UNKNOWN, ABORTED SEQUENCE_CLOSED, UNAVAILABLE WORK_STOPPED.
  void Settle(uint64_t session, uint64_t sequence, SettleDone done) KVS_EXCLUDES(store_lock);

  // A load has ended of what sequences of that session opened without (CodecState::rest_load). Each
  // gets all of the artefact; null: it did not come, and they are lost.
  void EndRest(uint64_t session, uint64_t load, const Artefact* whole) KVS_EXCLUDES(store_lock);

  // Null: nobody; waiting settles are answered UNAVAILABLE WORK_STOPPED then.
  void SetSinkLocked(RecompressSink* sink) KVS_REQUIRES(store_lock);
  RecompressSink* sink() const KVS_REQUIRES(store_lock) { return sink_; }
  // Offers the sequence if something of it is due; after everything that may make it so.
  void NoteDue(Sequence* s) KVS_REQUIRES(store_lock);
  void OfferIfDue(Sequence* s) KVS_REQUIRES(store_lock);  // nothing is new: not after a cancel
  // Somebody asked for it: also after a failure, at once.
  void NoteAsked(Sequence* s) KVS_REQUIRES(store_lock);
  // Adds what is due, queued or running.
  void ListLocked(std::vector<WorkInfo>* list) const KVS_REQUIRES(store_lock);
  WorkInfo WorkOf(const Sequence& s) const KVS_REQUIRES(store_lock);
  // Answers the sequence's waiters, when there is an answer for them.
  void AnswerWaiters(Sequence* s) KVS_REQUIRES(store_lock);
  void AnswerWaiters(Sequence* s, const Status& status) KVS_REQUIRES(store_lock);

 private:
  bool Due(Sequence* s) KVS_REQUIRES(store_lock);
  Result<RecompressJob> TakeNow(uint64_t sequence) KVS_EXCLUDES(store_lock);
  void KeepPages(const Sequence& s, RecompressJob* job) KVS_REQUIRES(store_lock);
  void NoteFailed(Sequence* s, const Status& why) KVS_REQUIRES(store_lock);
  void NoteDone(Sequence* s) KVS_REQUIRES(store_lock);
  // A run's drafts become the sequence's extents; what fails is noted.
  Status PublishRun(const RecompressJob& job, std::unique_ptr<Recompressor> next,
                    const RecompressOutput& output, RecompressResult* result)
      KVS_EXCLUDES(store_lock);
  Result<RecompressResult> PublishNow(RecompressJob job, std::unique_ptr<Recompressor> next,
                                      RecompressOutput output) KVS_EXCLUDES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  Answers& answers_;
  SessionCatalog& catalog_;
  PageHolds& holds_;
  CodecExtents& extents_;
  RawPages& raw_pages_;
  RecompressSink* sink_ KVS_GUARDED_BY(store_lock) = nullptr;
  bool due_unoffered_ KVS_GUARDED_BY(store_lock) = false;  // OfferDue has something to do
};

}  // namespace kvstrata
