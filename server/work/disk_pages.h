// DiskPages: keeps sealed pages, index blocks and artefacts on disk, and reads them back: the
// PageTier of the store over a DiskTier.
//
// Values: docs/disk_format.md. One that changed (more was reported of a page's positions; an
// artefact was built again) is erased and put again. An artefact's record is put last, when all of
// its parts are there.
// The writer's thread ("kvs-disk-write") takes keys from a bounded queue of offers, copies what
// is still in memory and puts it in batches; a full disk gives up what was not used lately. When
// something was written since, it makes a checkpoint every `checkpoint_interval`. Readers
// ("kvs-disk-read") serve opening sequences by turns, a batch each, within `load_timeout` of its
// request, so that one with much to read delays the others by a batch of its own and no more; while
// one reader copies into pages another keeps the disk busy. A scrub goes on when no open waits. All
// go through memory of their own: a page is held for the length of a copy, and a request that the
// disk never answers keeps no page.
//
// disk_pages_write.cc: the way out; disk_pages_read.cc: the way in; disk_scrub.h: a scrub.
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
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/store/tier_scrub.h"
#include "server/tier/disk_tier.h"
#include "server/work/disk_scrub.h"
#include "server/work/status_log.h"
#include "server/work/tier_buffers.h"

namespace kvstrata {

struct DiskPagesOptions {
  uint32_t queue = 65536;  // offers that may wait
  uint32_t readers = 2;    // threads
  // Of one batch, but for its first value; a quarter of it where others wait for the disk.
  uint64_t batch_bytes = uint64_t{64} << 20;
  std::chrono::microseconds load_timeout{500'000};
  std::chrono::microseconds checkpoint_interval{60'000'000};  // 0: only the daemon's, at its end
};

// Since start; pages, index blocks, parts and records of artefacts alike.
struct DiskPagesCounters {
  uint64_t written = 0;
  uint64_t dropped = 0;  // offers that the queue had no room for, or the stop no time
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
  // Writes what waits, until `deadline` or until `most_bytes` of it are written, and drops the
  // rest; ends loads without reading; joins. Idempotent.
  void Stop(Deadline deadline, uint64_t most_bytes) KVS_EXCLUDES(mu_);

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
  static constexpr std::chrono::seconds kPutTimeout{10};

  struct Request {
    TierLoad load;
    Deadline deadline;
    size_t read = 0;  // keys
  };
  // The writer's: copies on their way to disk.
  struct Batch {
    std::vector<TierPut> puts;
    std::vector<std::string> changed;  // keys among them, to be erased before
    uint64_t bytes = 0;
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
  void PutInPlaceOfOthers(TierPut* put, Deadline deadline) KVS_EXCLUDES(mu_);
  void Count(uint64_t DiskPagesCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  void Read() KVS_EXCLUDES(mu_);
  // A reader's next: a load's turn, else the scrub's. Neither: the end.
  struct Task {
    std::optional<Request> load;
    uint64_t bytes = 0;  // that the load may read in this turn
    DiskScrub* scrub = nullptr;
  };
  Task NextTask() KVS_EXCLUDES(mu_);
  void ReadLoad(Request* load, uint64_t bytes) KVS_EXCLUDES(mu_);
  // Whether there is more of the load to read.
  bool ReadBatch(Request* request, uint64_t most_bytes) KVS_EXCLUDES(mu_);
  // Of the first keys, as many as a batch takes; at least one.
  std::vector<TierGet> PlanReads(std::span<const PageKey> keys, uint64_t most_bytes);
  // Ends a load's turn: if there is more, it waits behind the others. False: it is the caller's to
  // end.
  bool TakeBack(Request* request, bool more) KVS_EXCLUDES(mu_);
  void GoOnScrubbing(DiskScrub* scrub) KVS_EXCLUDES(mu_);
  bool stopping() const KVS_EXCLUDES(mu_);
  // Whether the stop has no time or bytes left for more offers.
  bool GivesUp() const KVS_REQUIRES(mu_);
  // Whether this offer, which was taken out already, is dropped.
  bool Drops() KVS_EXCLUDES(mu_);
  // Until when a batch of so many bytes may take.
  Deadline PutDeadline(uint64_t bytes) KVS_EXCLUDES(mu_);
  // Of one batch, but for its first value.
  uint64_t BatchBytes() const KVS_EXCLUDES(mu_);
  // Whether there is time to give up others for a value of a batch with that deadline.
  bool MayEvict(Deadline deadline) const KVS_EXCLUDES(mu_);
  bool ScrubsEnd() const KVS_EXCLUDES(mu_);

  const DiskPagesOptions options_;
  Store* const store_;
  DiskTier* const disk_;
  TierBuffers buffers_;

  mutable Mutex mu_;
  std::condition_variable offered_, asked_;
  std::deque<PageKey> offers_ KVS_GUARDED_BY(mu_);
  std::deque<Request> requests_ KVS_GUARDED_BY(mu_);  // for their next turn
  size_t reading_ KVS_GUARDED_BY(mu_) = 0;            // loads whose turn it is
  size_t writing_ KVS_GUARDED_BY(mu_) = 0;
  // While `scrubbing_` that of one reader, and no other looks at it; readers alone end it.
  std::unique_ptr<DiskScrub> scrub_ KVS_GUARDED_BY(mu_);
  bool scrubbing_ KVS_GUARDED_BY(mu_) = false;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  // kDrying: the writer is to make a checkpoint when nothing waits.
  enum class Drains : uint8_t { kNo, kDrying, kFailed, kDrained };
  Drains drains_ KVS_GUARDED_BY(mu_) = Drains::kNo;
  Status drain_failed_ KVS_GUARDED_BY(mu_);  // of kFailed
  bool no_scrubs_ KVS_GUARDED_BY(mu_) = false;
  Deadline stop_deadline_ KVS_GUARDED_BY(mu_){};
  uint64_t stop_bytes_ KVS_GUARDED_BY(mu_) = 0;  // that may still be written
  DiskPagesCounters counters_ KVS_GUARDED_BY(mu_);
  bool unsaved_ = false;  // the writer's: something was put since the last checkpoint
  std::chrono::steady_clock::time_point checkpoint_at_;
  StatusLog write_log_, read_log_;
  std::thread writer_;
  std::vector<std::thread> readers_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_DISK_PAGES_H_
