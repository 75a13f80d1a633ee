// DiskPages: keeps sealed pages and index blocks on disk, and reads prefixes back: the PageTier of
// the store over a DiskTier.
//
// A value is a page's bytes under its 32-byte key, all layers in one buffer. Series that an engine
// reported are not kept: who is held for a page from disk reports them again (surprisal_tokens).
// Two threads. The writer ("kvs-disk-write") takes keys from a bounded queue of offers, copies what
// is still in memory and puts it in batches; a full disk gives up what was not used lately. The
// reader ("kvs-disk-read") serves one opening sequence after another, in batches, each within
// `load_timeout` of its request. Both go through memory of their own: a page is held for the length
// of a copy, and a request that the disk never answers keeps no page.
//
// Ownership: borrows store and tier, which outlive it; sets and unsets itself as the store's tier.
// Thread-safety: all methods, from any thread; one lock of its own, held for a look at the queues.
// Errors: none reach a caller; they are counted, and logged at most once a second each way.
#ifndef KVSTRATA_SERVER_WORK_DISK_PAGES_H_
#define KVSTRATA_SERVER_WORK_DISK_PAGES_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/telemetry/log.h"
#include "server/tier/disk_tier.h"

namespace kvstrata {

struct DiskPagesOptions {
  uint32_t queue = 65536;  // offers that may wait
  std::chrono::microseconds load_timeout{500'000};
};

// Since start; pages and index blocks alike.
struct DiskPagesCounters {
  uint64_t written = 0;
  uint64_t dropped = 0;  // offers that the queue had no room for
  uint64_t gone = 0;     // left memory before their turn
  uint64_t failed = 0;   // the disk did not take them
  uint64_t evicted = 0;  // gave their place on a full disk
  uint64_t read = 0;
  uint64_t refused_loads = 0;  // too many waited
  uint64_t late_loads = 0;     // ended by their deadline
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
  bool Load(PrefixLoad load) override KVS_EXCLUDES(mu_);
  Status Pin(const PrefixPin& pin) override KVS_EXCLUDES(mu_);
  Status Unpin(const PrefixPin& pin, bool forget) override;

  DiskPagesCounters counters() const KVS_EXCLUDES(mu_);
  // Offers that wait or are being written.
  size_t waiting() const KVS_EXCLUDES(mu_);

 private:
  struct Request {
    PrefixLoad load;
    Deadline deadline;
  };

  void Write() KVS_EXCLUDES(mu_);
  // Waits for some; empty: the end.
  std::vector<PageKey> NextOffers() KVS_EXCLUDES(mu_);
  // Copies of the first of `keys` that memory has and the disk has not; takes those off.
  std::vector<DiskPut> CopyOut(std::span<const PageKey>* keys) KVS_EXCLUDES(mu_);
  void PutAll(std::span<DiskPut> puts) KVS_EXCLUDES(mu_);
  // Again, after giving up what is in its way.
  void PutInPlaceOfOthers(DiskPut* put, Deadline deadline) KVS_EXCLUDES(mu_);
  void Count(uint64_t DiskPagesCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  void Read() KVS_EXCLUDES(mu_);
  void ReadPrefix(const Request& request) KVS_EXCLUDES(mu_);
  std::vector<DiskGet> PlanReads(std::span<const PageKey> keys) const;
  bool stopping() const KVS_EXCLUDES(mu_);

  const DiskPagesOptions options_;
  Store* const store_;
  DiskTier* const disk_;

  mutable Mutex mu_;
  std::condition_variable offered_, asked_;
  std::deque<PageKey> offers_ KVS_GUARDED_BY(mu_);
  std::deque<Request> requests_ KVS_GUARDED_BY(mu_);
  size_t writing_ KVS_GUARDED_BY(mu_) = 0;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  Deadline stop_deadline_ KVS_GUARDED_BY(mu_){};
  DiskPagesCounters counters_ KVS_GUARDED_BY(mu_);
  LogLimiter write_log_{1};  // the writer's
  LogLimiter read_log_{1};   // the reader's
  std::thread writer_, reader_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_DISK_PAGES_H_
