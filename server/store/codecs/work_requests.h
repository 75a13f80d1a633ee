// SPDX-License-Identifier: Apache-2.0
// WorkRequests: who the workers are, what they have, and what is asked of their recompression
// beyond what is offered to them as it is due: that it be done now, how far it is, its end.
//
// Thread-safety: all methods, from any thread; answers (SettleDone) are given without the store's
// lock, at once in the caller's thread or later in a worker's. Cost: a look at the sequence;
// Work and SetSink look at all sequences.
// Errors: SEQUENCE_UNKNOWN, DEVICE_FAILED, UNAVAILABLE WORK_STOPPED (no workers), and those that a
// method names.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

// How far a sequence's recompression is.
struct WorkProgress {
  bool done = true;  // nothing is due, queued or running, or it was cancelled
  WorkInfo work;     // unset when done
  uint32_t extents = 0;
  uint64_t released_bytes = 0;  // raw bytes released or moved to host since it was opened
};

class WorkRequests {
 public:
  WorkRequests(StoreMutex& mu, Answers& answers, SessionCatalog& catalog, Devices& devices,
               Recompression& recompression, Builds& builds)
      : mu_(mu),
        answers_(answers),
        catalog_(catalog),
        devices_(devices),
        recompression_(recompression),
        builds_(builds) {}

  // Who recompresses and builds. Null: nobody; what runs is cancelled, and who waits is answered
  // UNAVAILABLE WORK_STOPPED.
  void SetSink(RecompressSink* sink) KVS_EXCLUDES(store_lock);
  // What is due, queued or running, builds too, by sequence.
  std::vector<WorkInfo> Work() const KVS_EXCLUDES(store_lock);

  // Has workers look at the sequence now, also after failures and a cancel; `done` (may be null) is
  // called as by Recompression::Settle. session 0: an operator asks. FAILED_PRECONDITION
  // RECOMPRESS_RAW.
  Status Recompress(uint64_t session, uint64_t sequence, SettleDone done) KVS_EXCLUDES(store_lock);
  // RECOMPRESS_RAW.
  Result<WorkProgress> Progress(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);
  // Ends what is queued or running of the sequence, builds too; whether something ran. What was not
  // published leaves nothing behind. It stays due, and is not offered before the next Recompress,
  // commit or report. Whoever settles meanwhile is told ABORTED WORK_CANCELLED.
  Result<bool> Cancel(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);

 private:
  StoreMutex& mu_;
  Answers& answers_;
  SessionCatalog& catalog_;
  Devices& devices_;
  Recompression& recompression_;
  Builds& builds_;
};

}  // namespace kvstrata
