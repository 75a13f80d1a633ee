// SPDX-License-Identifier: Apache-2.0
// TierWriter: keeps sealed pages, index blocks and artefacts in a tier below memory.
//
// Its thread ("kvs-tier-write") takes keys from a bounded queue of offers, copies what is still in
// memory and puts it in batches. A value that changed (more was reported of a page's positions; an
// artefact was built again) is forgotten and put again. An artefact's record is put last, when all
// of its extents are there. A page is held for the length of a copy into the buffers.
//
// Ownership: borrows what it is given. Thread-safety: all methods, from any thread; one lock of its
// own, held for a look at the queue. Errors: only those of drains; the others are counted, and
// logged at most once a second.
#ifndef KVSTRATA_SERVER_WORK_TIERS_TIER_WRITER_H_
#define KVSTRATA_SERVER_WORK_TIERS_TIER_WRITER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct TierWriterOptions {
  uint32_t queue = 65536;                     // offers that may wait
  uint64_t batch_bytes = uint64_t{64} << 20;  // bytes of one batch, but for its first value
};

// Since start; pages, index blocks, extents and records of artefacts alike.
struct TierWriterCounters {
  uint64_t written = 0;
  uint64_t dropped = 0;  // offers that the queue had no room for, or the stop no time
  uint64_t gone = 0;     // left memory before they were written
  uint64_t failed = 0;   // the tier did not take them
  uint64_t refused = 0;  // offers while it was drained
};

// How far a drain is. kDrying: the writer is to make a checkpoint when nothing waits.
enum class Drains : uint8_t { kNo, kDrying, kFailed, kDrained };

class TierWriter {
 public:
  // checkpoint: makes the tier's next start quick; may be empty.
  TierWriter(const TierWriterOptions& options, Store* store, ValueTier* tier, TierBuffers* buffers,
             std::function<Status(Deadline)> checkpoint);
  // Stop, at once.
  ~TierWriter();
  // Writes what waits, until `deadline` or until `most_bytes` of it are written, drops the rest and
  // joins. Idempotent.
  void Stop(Deadline deadline, uint64_t most_bytes) KVS_EXCLUDES(mu_);

  void Offer(const PageKey& key) KVS_EXCLUDES(mu_);

  // Refuses offers from now on and has the writer make a checkpoint, where the tier has one,
  // when none waits any more: ask again until `drained`. Never waits. What the checkpoint returned,
  // once; the next call has it tried again.
  Status Drain() KVS_EXCLUDES(mu_);
  // Takes offers again, first of what memory has and the tier has not.
  void Resume() KVS_EXCLUDES(mu_);
  bool draining() const KVS_EXCLUDES(mu_);
  // Nothing waits, nothing comes, and the next start is quick.
  bool drained() const KVS_EXCLUDES(mu_);

  TierWriterCounters counters() const KVS_EXCLUDES(mu_);
  // Offers that wait or are being written.
  size_t waiting() const KVS_EXCLUDES(mu_);

 private:
  // Copies on their way to the tier.
  struct Batch {
    std::vector<TierPut> puts;
    std::vector<std::string> changed;  // keys among them, to be forgotten before
    uint64_t bytes = 0;
    // The most bytes it may have, but for its first value: fewer while the writer stops, which
    // looks at its time between batches.
    uint64_t most = 0;
  };

  void Write() KVS_EXCLUDES(mu_);
  // Waits for some; nothing: the end. Empty: a drain waits for its checkpoint.
  std::optional<std::vector<PageKey>> NextOffers() KVS_EXCLUDES(mu_);
  void WriteOffered(const PageKey& key, Batch* batch) KVS_EXCLUDES(mu_);
  // Copies value number `i` of an offered key, if the tier needs it.
  void Add(const PageKey& offered, size_t i, const SealedValue& value, Batch* batch)
      KVS_EXCLUDES(mu_);
  // Puts the batch, which is empty afterwards.
  void PutAll(Batch* batch) KVS_EXCLUDES(mu_);
  // The end of a drain, when nothing waits.
  void CheckpointIfDry() KVS_EXCLUDES(mu_);
  // Whether the stop has no time or bytes left for more offers.
  bool GivesUp() const KVS_REQUIRES(mu_);
  // The deadline of a batch of so many bytes.
  Deadline PutDeadline(uint64_t bytes) KVS_EXCLUDES(mu_);
  void Count(uint64_t TierWriterCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  const TierWriterOptions options_;
  Store* const store_;
  ValueTier* const tier_;
  TierBuffers* const buffers_;
  const std::function<Status(Deadline)> checkpoint_;
  std::stop_source end_writes_;

  mutable Mutex mu_;
  std::condition_variable offered_, ended_;
  std::deque<PageKey> offers_ KVS_GUARDED_BY(mu_);
  size_t writing_ KVS_GUARDED_BY(mu_) = 0;
  bool written_out_ KVS_GUARDED_BY(mu_) = false;  // the writer has ended
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  Drains drains_ KVS_GUARDED_BY(mu_) = Drains::kNo;
  Status drain_failed_ KVS_GUARDED_BY(mu_);  // why kFailed
  Deadline stop_deadline_ KVS_GUARDED_BY(mu_){};
  uint64_t stop_bytes_ KVS_GUARDED_BY(mu_) = 0;  // that may still be written
  TierWriterCounters counters_ KVS_GUARDED_BY(mu_);
  StatusLog log_;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TIERS_TIER_WRITER_H_
