// DiskPages: keeps sealed pages, index blocks and artefacts on disk, and reads them back: the
// PageTier of the store over a DiskTier.
//
// Values: docs/disk_format.md. One that changed (more was reported of a page's positions; an
// artefact was built again) is erased and put again. An artefact's record is put last, when all of
// its parts are there.
// Two threads. The writer ("kvs-disk-write") takes keys from a bounded queue of offers, copies what
// is still in memory and puts it in batches; a full disk gives up what was not used lately. When
// something was written since, it makes a checkpoint every `checkpoint_interval`. The
// reader ("kvs-disk-read") serves one opening sequence after another, in batches, each within
// `load_timeout` of its request, and a scrub when none waits: an open waits for at most a batch of
// it. Both go through memory of their own: a page is held for the length of a copy, and a request
// that the disk never answers keeps no page.
//
// Ownership: borrows store and tier, which outlive it; sets and unsets itself as the store's tier.
// Thread-safety: all methods, from any thread; one lock of its own, held for a look at the queues.
// Errors: none reach a caller but those of drains and scrubs; they are counted, and logged at most
// once a second each way.
#ifndef KVSTRATA_SERVER_WORK_DISK_PAGES_H_
#define KVSTRATA_SERVER_WORK_DISK_PAGES_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/store/tier_scrub.h"
#include "server/telemetry/log.h"
#include "server/tier/disk_tier.h"
#include "server/work/disk_buffers.h"

namespace kvstrata {

struct DiskPagesOptions {
  uint32_t queue = 65536;  // offers that may wait
  std::chrono::microseconds load_timeout{500'000};
  std::chrono::microseconds checkpoint_interval{60'000'000};  // 0: only the daemon's, at its end
};

// Since start; pages, index blocks, parts and records of artefacts alike.
struct DiskPagesCounters {
  uint64_t written = 0;
  uint64_t dropped = 0;  // offers that the queue had no room for
  uint64_t gone = 0;     // left memory before their turn
  uint64_t failed = 0;   // the disk did not take them
  uint64_t evicted = 0;  // gave their place on a full disk
  uint64_t read = 0;
  uint64_t checkpoints = 0;    // that succeeded
  uint64_t refused_loads = 0;  // too many waited
  uint64_t late_loads = 0;     // ended by their deadline
  uint64_t refused = 0;        // offers while it was drained
};

class DiskPages final : public PageTier {
 public:
  static constexpr size_t kMaxLoads = 256;  // that may wait

  DiskPages(const DiskPagesOptions& options, Store* store, DiskTier* disk);
  // Stop, at once.
  ~DiskPages() override;
  // Writes what waits, until `deadline`; ends loads without reading; joins. Idempotent.
  void Stop(Deadline deadline) KVS_EXCLUDES(mu_);

  void Offer(const PageKey& key) override KVS_EXCLUDES(mu_);
  bool Holds(const PageKey& key) const override;
  bool Load(TierLoad load) override KVS_EXCLUDES(mu_);
  Status Pin(const PrefixPin& pin) override KVS_EXCLUDES(mu_);
  Status Unpin(const PrefixPin& pin, bool forget) override;

  // Has the reader read and check every value of the disk, a batch whenever no load waits; values
  // that come meanwhile may be left out. FAILED_PRECONDITION SCRUB_RUNNING: one at a time;
  // UNAVAILABLE DAEMON_STOPPING. Else `scrub.done` is called.
  Status Scrub(TierScrub scrub) KVS_EXCLUDES(mu_);
  // Ends a scrub with DAEMON_STOPPING after the batch under way, and refuses others.
  void EndScrubs() KVS_EXCLUDES(mu_);

  // Turns offers away from now on and has the writer make a checkpoint when none waits any more:
  // ask again until `drained`. Never waits. What DiskTier::Checkpoint returned, once; the next
  // call has it tried again.
  Status Drain() KVS_EXCLUDES(mu_);
  // Takes offers again, first of what memory has and the disk has not.
  void Resume() KVS_EXCLUDES(mu_);
  bool draining() const KVS_EXCLUDES(mu_);
  // All that is on disk is in a checkpoint, and nothing comes.
  bool drained() const KVS_EXCLUDES(mu_);

  // Gives the disk another budget, and makes a checkpoint; values that left (`evicted`). Waits for
  // the disk. What DiskTier::Resize returns; a checkpoint that fails is logged.
  Result<uint64_t> Resize(uint64_t budget_bytes) KVS_EXCLUDES(mu_);

  DiskPagesCounters counters() const KVS_EXCLUDES(mu_);
  // Offers that wait or are being written.
  size_t waiting() const KVS_EXCLUDES(mu_);

 private:
  struct Request {
    TierLoad load;
    Deadline deadline;
  };
  // The writer's: copies on their way to disk.
  struct Batch {
    std::vector<DiskPut> puts;
    std::vector<std::string> changed;  // keys among them, to be erased before
    uint64_t bytes = 0;
  };

  struct Scrubbing {
    TierScrub scrub;
    uint64_t cursor = 0;
    std::deque<DiskValue> ahead;  // found, not yet read
    ScrubProgress so_far;
    std::unordered_set<std::string> parts, named;  // of artefacts: found; by their records
    std::chrono::steady_clock::time_point next_batch, next_look;  // a look: is it still wanted?
  };

  void Write() KVS_EXCLUDES(mu_);
  // Waits for some; nothing: the end. Empty: a checkpoint may be due.
  std::optional<std::vector<PageKey>> NextOffers() KVS_EXCLUDES(mu_);
  void WriteOffered(const PageKey& key, Batch* batch) KVS_EXCLUDES(mu_);
  // Copies value number `i` of an offered key, if the disk needs it.
  void Add(const PageKey& offered, size_t i, const SealedValue& value, Batch* batch)
      KVS_EXCLUDES(mu_);
  // Puts the batch, which is empty afterwards.
  void PutAll(Batch* batch) KVS_EXCLUDES(mu_);
  void CheckpointIfDue() KVS_EXCLUDES(mu_);
  // Whether a drain waits for a checkpoint alone.
  bool IsDry() const KVS_EXCLUDES(mu_);
  void EndDrying(const Status& checkpoint) KVS_EXCLUDES(mu_);
  // Again, after giving up what is in its way.
  void PutInPlaceOfOthers(DiskPut* put, Deadline deadline) KVS_EXCLUDES(mu_);
  void Count(uint64_t DiskPagesCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  void Read() KVS_EXCLUDES(mu_);
  void ReadPrefix(const Request& request) KVS_EXCLUDES(mu_);
  // The reader's next: a load, else a batch of the scrub. Neither: the end.
  struct Task {
    std::optional<Request> load;
    Scrubbing* scrub = nullptr;
  };
  Task NextTask() KVS_EXCLUDES(mu_);
  void GoOnScrubbing(Scrubbing* scrub) KVS_EXCLUDES(mu_);
  // How it ended; nothing: there is more.
  std::optional<Status> ScrubBatch(Scrubbing* scrub);
  // Whether there is more to read.
  static bool PlanScrub(const DiskTier& disk, DiskBuffers* buffers, Scrubbing* scrub,
                        std::vector<DiskGet>* gets);
  static void NoteParts(const DiskGet& get, Scrubbing* scrub);
  // Parts that no record names: it was lost, or made anew of other parts. Those that memory has may
  // have theirs yet to come.
  void EraseOrphans(Scrubbing* scrub);
  void EndScrub(const Status& why) KVS_EXCLUDES(mu_);
  std::vector<DiskGet> PlanReads(std::span<const PageKey> keys);
  bool stopping() const KVS_EXCLUDES(mu_);
  bool ScrubsEnd() const KVS_EXCLUDES(mu_);

  const DiskPagesOptions options_;
  Store* const store_;
  DiskTier* const disk_;
  DiskBuffers buffers_;

  mutable Mutex mu_;
  std::condition_variable offered_, asked_;
  std::deque<PageKey> offers_ KVS_GUARDED_BY(mu_);
  std::deque<Request> requests_ KVS_GUARDED_BY(mu_);
  size_t writing_ KVS_GUARDED_BY(mu_) = 0;
  std::unique_ptr<Scrubbing> scrub_ KVS_GUARDED_BY(mu_);  // the reader's, which alone ends it
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  // kDrying: the writer is to make a checkpoint when nothing waits.
  enum class Drains : uint8_t { kNo, kDrying, kFailed, kDrained };
  Drains drains_ KVS_GUARDED_BY(mu_) = Drains::kNo;
  Status drain_failed_ KVS_GUARDED_BY(mu_);  // of kFailed
  bool no_scrubs_ KVS_GUARDED_BY(mu_) = false;
  Deadline stop_deadline_ KVS_GUARDED_BY(mu_){};
  DiskPagesCounters counters_ KVS_GUARDED_BY(mu_);
  bool unsaved_ = false;  // the writer's: something was put since the last checkpoint
  std::chrono::steady_clock::time_point checkpoint_at_;
  LogLimiter write_log_{1};  // the writer's
  LogLimiter read_log_{1};   // the reader's
  std::thread writer_, reader_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_DISK_PAGES_H_
