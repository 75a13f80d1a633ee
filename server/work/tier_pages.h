// TierPages: keeps sealed pages, index blocks and artefacts in a tier below memory, and reads them
// back: the PageTier of the store over any ValueTier.
//
// Values: docs/disk_format.md. One that changed (more was reported of a page's positions; an
// artefact was built again) is forgotten and put again. An artefact's record is put last, when all
// of its parts are there.
// The writer's thread ("kvs-tier-write") takes keys from a bounded queue of offers, copies what
// is still in memory and puts it in batches. All goes through memory of its own: a page is held for
// the length of a copy, and a request that the tier never answers keeps no page.
//
// The way in: tier_loads.h; scrubs, when no open waits: tier_scrubs.h.
//
// Ownership: borrows store and tier, which outlive it; sets and unsets itself as the store's tier.
// Thread-safety: all methods, from any thread; one lock of its own, held for a look at the queues.
// Errors: none reach a caller but those of drains, pins and scrubs; they are counted, and logged at
// most once a second each way.
#ifndef KVSTRATA_SERVER_WORK_TIER_PAGES_H_
#define KVSTRATA_SERVER_WORK_TIER_PAGES_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/tier/value_tier.h"
#include "server/work/status_log.h"
#include "server/work/tier_buffers.h"
#include "server/work/tier_hooks.h"
#include "server/work/tier_loads.h"
#include "server/work/tier_scrubs.h"

namespace kvstrata {

struct TierPagesOptions {
  uint32_t queue = 65536;  // offers that may wait
  TierLoadsOptions loads;  // its batch_bytes: those of the writer, too
};

// Since start; pages, index blocks, parts and records of artefacts alike.
struct TierPagesCounters : TierLoadsCounters {
  uint64_t written = 0;
  uint64_t dropped = 0;  // offers that the queue had no room for, or the stop no time
  uint64_t gone = 0;     // left memory before their turn
  uint64_t failed = 0;   // the tier did not take them
  uint64_t refused = 0;  // offers while it was drained
};

class TierPages final : public PageTier {
 public:
  TierPages(const TierPagesOptions& options, Store* store, ValueTier* tier, TierHooks hooks);
  // Stop, at once.
  ~TierPages() override;
  // Writes what waits, until `deadline` or until `most_bytes` of it are written, and drops the
  // rest; ends loads without reading; joins. Idempotent.
  void Stop(Deadline deadline, uint64_t most_bytes) KVS_EXCLUDES(mu_);

  void Offer(const PageKey& key) override KVS_EXCLUDES(mu_);
  bool Holds(const PageKey& key) const override;
  bool Load(TierLoad load) override { return loads_.Add(std::move(load)); }
  Status Pin(const PrefixPin& pin) override KVS_EXCLUDES(mu_);
  Status Unpin(const PrefixPin& pin, bool forget) override;

  TierScrubs& scrubs() { return scrubs_; }

  // Turns offers away from now on and has the writer make a checkpoint, where the tier has one,
  // when none waits any more: ask again until `drained`. Never waits. What the checkpoint returned,
  // once; the next call has it tried again.
  Status Drain() KVS_EXCLUDES(mu_);
  // Takes offers again, first of what memory has and the tier has not.
  void Resume() KVS_EXCLUDES(mu_);
  bool draining() const KVS_EXCLUDES(mu_);
  // Nothing waits, nothing comes, and the next start is quick.
  bool drained() const KVS_EXCLUDES(mu_);

  TierPagesCounters counters() const KVS_EXCLUDES(mu_);
  // Offers that wait or are being written.
  size_t waiting() const KVS_EXCLUDES(mu_);

 private:
  static constexpr std::chrono::seconds kPutTimeout{10};

  // The writer's: copies on their way to the tier.
  struct Batch {
    std::vector<TierPut> puts;
    std::vector<std::string> changed;  // keys among them, to be forgotten before
    uint64_t bytes = 0;
  };

  void WaitUntilWritten(Deadline deadline) KVS_EXCLUDES(mu_);

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
  // Whether this offer, which was taken out already, is dropped.
  bool Drops() KVS_EXCLUDES(mu_);
  // Until when a batch of so many bytes may take.
  Deadline PutDeadline(uint64_t bytes) KVS_EXCLUDES(mu_);
  // Of one batch, but for its first value.
  uint64_t BatchBytes() const KVS_EXCLUDES(mu_);
  void Count(uint64_t TierPagesCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  bool stopping() const KVS_EXCLUDES(mu_);

  const TierPagesOptions options_;
  Store* const store_;
  ValueTier* const tier_;
  const TierHooks hooks_;
  TierBuffers buffers_;
  TierLoads loads_;
  TierScrubs scrubs_;
  std::stop_source end_writes_;

  mutable Mutex mu_;
  std::condition_variable offered_, ended_;
  std::deque<PageKey> offers_ KVS_GUARDED_BY(mu_);
  size_t writing_ KVS_GUARDED_BY(mu_) = 0;
  bool written_out_ KVS_GUARDED_BY(mu_) = false;  // the writer has ended
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  // kDrying: the writer is to make a checkpoint when nothing waits.
  enum class Drains : uint8_t { kNo, kDrying, kFailed, kDrained };
  Drains drains_ KVS_GUARDED_BY(mu_) = Drains::kNo;
  Status drain_failed_ KVS_GUARDED_BY(mu_);  // of kFailed
  Deadline stop_deadline_ KVS_GUARDED_BY(mu_){};
  uint64_t stop_bytes_ KVS_GUARDED_BY(mu_) = 0;  // that may still be written
  TierPagesCounters counters_ KVS_GUARDED_BY(mu_);
  StatusLog log_;
  std::thread writer_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TIER_PAGES_H_
