// DiskTier::Impl: the state of the engine. disk_tier.cc: values; disk_erase.cc: erased slots;
// disk_flush.cc: dirty marks and flushes; disk_start.cc: the index from the slots;
// disk_checkpoint.cc: the checkpoint; disk_resize.cc: another budget; disk_check.cc: what keeps it
// from opening.
//
// Locks: a side's, then mu_. mu_ is a leaf and never held around I/O.
#ifndef KVSTRATA_SERVER_TIER_DISK_TIER_IMPL_H_
#define KVSTRATA_SERVER_TIER_DISK_TIER_IMPL_H_

#include <condition_variable>
#include <map>
#include <set>
#include <unordered_map>

#include "base/sync.h"
#include "server/tier/breaker.h"
#include "server/tier/checkpoint.h"
#include "server/tier/disk_tier.h"
#include "server/tier/format.h"
#include "server/tier/scratch.h"
#include "server/tier/segment_table.h"
#include "server/tier/tier_directory.h"
#include "server/tier/transfer_queue.h"

namespace kvstrata {

namespace disk {

// A lock that is waited for until a deadline.
class DeadlineLock {
 public:
  bool Take(Deadline deadline) KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock lock(mu_.native());
    const auto free = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return !taken_; };
    if (!free_.wait_until(lock, deadline, free)) return false;
    taken_ = true;
    return true;
  }
  void Release() {
    MutexLock lock(mu_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  Mutex mu_;
  std::condition_variable free_;
  bool taken_ KVS_GUARDED_BY(mu_) = false;
};

class HeldSide {
 public:
  HeldSide(DeadlineLock* lock, Deadline deadline) : lock_(lock), held_(lock->Take(deadline)) {}
  HeldSide(const HeldSide&) = delete;
  HeldSide& operator=(const HeldSide&) = delete;
  ~HeldSide() {
    if (held_) lock_->Release();
  }
  bool held() const { return held_; }

 private:
  DeadlineLock* const lock_;
  const bool held_;
};

// One of the two sides: whoever holds its lock uses queue and scratch.
struct Side {
  Side(std::unique_ptr<IoQueue> queue, uint32_t depth)
      : scratch(TransferQueue::kMaxRunning + depth), transfers(std::move(queue)) {
    transfers.queue().AddMemory(scratch.base(), scratch.bytes());
  }
  DeadlineLock lock;
  Scratch scratch;
  TransferQueue transfers;
};

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
using Index = std::unordered_map<std::string, Entry, StringHash, std::equal_to<>>;

Status DeadlineExceeded(const char* what);
Status IoError(int error);  // an errno
// OK, or FAILED_PRECONDITION DISK_VERSION, DISK_SEGMENT_BYTES. REQUIRES: the block is whole.
Status CheckGeometry(const Superblock& block, const DiskTierOptions& options);
// REQUIRES of both, DiskTier::Check of the options is OK.
uint32_t SegmentsOf(const DiskTierOptions& options);
// Whether the file system has room for what is missing of the budget's files, and keeps some for
// others (a twentieth of it, at most 1 GiB). OK, or RESOURCE_EXHAUSTED DISK_SPACE.
Status CheckSpace(const DiskTierOptions& options);

}  // namespace disk

class DiskTier::Impl {
 public:
  Impl(const DiskTierOptions& options, disk::TierDirectory directory, IoQueueChoice reads,
       IoQueueChoice writes);
  Status AddFiles();
  Status Start(Deadline deadline);

  void Put(std::span<TierPut> requests, Deadline deadline, const std::stop_token& cancel)
      KVS_EXCLUDES(mu_);
  void Get(std::span<TierGet> requests, Deadline deadline, const std::stop_token& cancel)
      KVS_EXCLUDES(mu_);
  Status Erase(std::span<const std::string> keys, Deadline deadline) KVS_EXCLUDES(mu_);
  Status Flush(Deadline deadline) KVS_EXCLUDES(mu_);
  Status Checkpoint(Deadline deadline) KVS_EXCLUDES(mu_);
  Status AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline)
      KVS_EXCLUDES(mu_);
  Result<uint64_t> Resize(uint64_t budget_bytes, Deadline deadline) KVS_EXCLUDES(mu_);

  void Probe(std::span<TierProbe> probes) const KVS_EXCLUDES(mu_);
  std::vector<TierValue> Scan(uint64_t* cursor, size_t slots) const KVS_EXCLUDES(mu_);
  std::vector<std::string> Victims(std::span<const uint64_t> sizes) KVS_EXCLUDES(mu_);
  DiskTierStats Stats() const KVS_EXCLUDES(mu_);
  void Pin(std::span<const std::string> keys) KVS_EXCLUDES(mu_);
  void Unpin(std::span<const std::string> keys) KVS_EXCLUDES(mu_);

 private:
  // A value that has a slot and is not yet in the index.
  struct PlannedPut {
    TierPut* request = nullptr;
    disk::SlotId at;
    disk::Place place;
    uint64_t generation = 0;
  };
  struct PlannedGet {
    TierGet* request = nullptr;
    disk::SlotId at;
    disk::Place place;
    uint64_t generation = 0;
  };
  struct Condemned {
    disk::SlotId at;
    bool reuse = false;  // free once its header is overwritten; else the medium is not trusted
  };
  struct Covered {  // a checkpoint
    std::vector<disk::NamedEntry> entries;
    uint64_t sequence = 0;
  };
  struct Superblocks {  // what a segment's first blocks say
    disk::Superblock newest{};
    bool valid = false;
    bool both = false;
  };

  // disk_tier.cc
  Status MayAsk() KVS_EXCLUDES(mu_);
  void Observe(int error, uint32_t segment) KVS_EXCLUDES(mu_);
  void ObserveDeadline() KVS_EXCLUDES(mu_);
  Status CheckPut(const TierPut& request) const;
  std::vector<PlannedPut> PlanPuts(std::span<TierPut> requests) KVS_EXCLUDES(mu_);
  disk::Transfer TransferOf(const PlannedPut& put) KVS_EXCLUDES(mu_);
  void FinishPut(const PlannedPut& put, int error) KVS_EXCLUDES(mu_);
  std::vector<PlannedGet> PlanGets(std::span<TierGet> requests) KVS_EXCLUDES(mu_);
  disk::Transfer TransferOf(const PlannedGet& get) KVS_EXCLUDES(mu_);
  Status FinishGet(const PlannedGet& get, std::byte* scratch, int error) KVS_EXCLUDES(mu_);
  // Forgets the value at `at` if it is still that one, and has its slot overwritten later.
  Status Lose(const PlannedGet& get, bool reuse, Status why) KVS_EXCLUDES(mu_);
  disk::SlotId Forget(disk::Index::iterator it) KVS_REQUIRES(mu_);
  disk::Place PlaceOf(disk::SlotId at) const KVS_REQUIRES(mu_);

  // disk_erase.cc
  // Overwrites the headers of slots that hold nothing, and frees them. The first error.
  Status Overwrite(std::vector<Condemned> slots, Deadline deadline) KVS_EXCLUDES(mu_);
  void OverwriteCondemned(Deadline deadline) KVS_EXCLUDES(mu_);

  // disk_flush.cc
  using Errors = std::map<uint32_t, int>;  // errno by segment
  Errors MarkDirty(const std::set<uint32_t>& segments, Deadline deadline) KVS_EXCLUDES(mu_);
  disk::Transfer MarkTransfer(uint32_t segment, Errors* failed) KVS_EXCLUDES(mu_);
  Status FlushWritten(Deadline deadline) KVS_EXCLUDES(mu_);
  void LoseUnflushed(uint32_t segment) KVS_REQUIRES(mu_);

  // disk_checkpoint.cc
  std::vector<std::byte> EncodeEntries(disk::CheckpointHeader* header) KVS_EXCLUDES(mu_);
  std::optional<Covered> LoadCheckpoint(Deadline deadline);
  std::optional<std::vector<disk::NamedEntry>> LoadEntries(uint32_t which,
                                                           const disk::CheckpointHeader& header,
                                                           Deadline deadline);

  // disk_start.cc
  Status ReadSuperblocks(std::vector<Superblocks>* all, Deadline deadline);
  Status ChooseStore(std::span<const Superblocks> all);
  void AdoptSegments(std::span<const Superblocks> all);
  bool Plausible(std::span<const disk::NamedEntry> entries) const;
  Status ScanSegments(const std::set<uint32_t>& segments, std::vector<disk::NamedEntry>* found,
                      Deadline deadline);
  void EnterFound(disk::NamedEntry found) KVS_EXCLUDES(mu_);
  void FreeUnheld() KVS_EXCLUDES(mu_);

  // disk_resize.cc; both sides are held
  Status Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes) KVS_EXCLUDES(mu_);
  // Has both queues know the files of new segments.
  Status AddNewFiles();
  // Forgets the values of segments from `segments` on; how many.
  Result<uint64_t> Shrink(uint32_t segments) KVS_EXCLUDES(mu_);

  // By which number the queues know a file: first the segments that there were at the start, then
  // both checkpoints, then further segments.
  uint32_t FileOf(uint32_t segment) const {
    return segment < segments_count_ ? segment : segment + 2;
  }
  uint32_t checkpoint_file(uint64_t sequence) const {
    return segments_count_ + static_cast<uint32_t>(sequence % 2);
  }

  const DiskTierOptions options_;
  disk::TierDirectory directory_;  // of both sides together, but for what is constant
  const uint32_t segments_count_;  // at the start
  uint64_t checkpoint_bytes_;      // of each of its files; both sides held change it
  const std::string queue_name_;
  const Status degraded_;
  disk::StoreId store_{};  // constant after Start

  mutable Mutex mu_;
  std::vector<std::shared_ptr<std::byte>> memory_ KVS_GUARDED_BY(mu_);  // that queues registered
  disk::Side reader_, writer_;                                          // each under its lock
  size_t added_ = 0;  // segments that both queues know; of both sides together

  disk::Index index_ KVS_GUARDED_BY(mu_);
  disk::SegmentTable table_ KVS_GUARDED_BY(mu_);
  disk::Breaker breaker_ KVS_GUARDED_BY(mu_);
  std::vector<Condemned> condemned_ KVS_GUARDED_BY(mu_);
  std::set<disk::SlotId> unreadable_ KVS_GUARDED_BY(mu_);   // at start
  std::map<uint32_t, uint64_t> hands_ KVS_GUARDED_BY(mu_);  // of Victims, by blocks of a slot
  std::unordered_map<std::string, uint32_t> pinned_ KVS_GUARDED_BY(mu_);  // how often
  uint64_t generation_ KVS_GUARDED_BY(mu_) = 0;                           // the last one given
  uint64_t checkpoint_sequence_ KVS_GUARDED_BY(mu_) = 0;  // of the last one, tried or found
  DiskTierStats stats_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_TIER_DISK_TIER_IMPL_H_
