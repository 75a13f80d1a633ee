// SPDX-License-Identifier: Apache-2.0
// DiskTier: the engine that keeps values on disk, where they outlive the daemon. Its calls block;
// DiskValueTier (server/tier/disk/disk_value_tier.h) makes a ValueTier of it.
//
// Values, keys and requests are those of server/tier/value_tier.h. Any value may be lost; what Get
// returns was stored under that key and has been checksummed since it left the disk
// (docs/disk_format.md).
//
// Ownership: `keep` of a request owns its buffers. It is let go when the disk no longer uses them,
// which after DEADLINE_EXCEEDED may be later than the call: reuse them only then. Buffers of values
// above 64 KiB must begin at a multiple of 4096; they are moved without a copy, and in one request
// with their header where that has room before them (`header_room`).
// Thread-safety: all methods, from any thread. Calls of the read side (Get) run one at a time,
// those of the write side (Put, Erase, Flush, Checkpoint) too, a read beside a write; the others
// hold a lock for a look-up. Who waits for a side longer than its deadline gets
// DEADLINE_EXCEEDED. So one thread that reads in batches keeps the device busy, and one that
// writes. Errors: DEADLINE_EXCEEDED DISK_DEADLINE; UNAVAILABLE DISK_BREAKER: the device failed
// repeatedly and is left alone for a while. A request may get INVALID_ARGUMENT DISK_VALUE; others
// are named below. Cost: Contains a hash look-up (under 1 us); memory about 250 bytes an entry.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/state/disk_options.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

class DiskTier {
 public:
  // INVALID_ARGUMENT DISK_SEGMENT_BYTES, DISK_BUDGET.
  static Status Check(const DiskTierOptions& options);
  // Whether Open would take what is in the directory. Changes nothing. Those of TierPlace;
  // FAILED_PRECONDITION DISK_VERSION (it is of a newer kvstrata), DISK_SEGMENT_BYTES (it was made
  // with another size); RESOURCE_EXHAUSTED DISK_SPACE: the file system has no room for the budget.
  static Status CheckPlace(const DiskTierOptions& options);
  // Blocks for as long as the start takes: seconds from a checkpoint, else one small read a slot.
  // What the checks and TierDirectory return.
  static Result<std::unique_ptr<DiskTier>> Open(const DiskTierOptions& options, Deadline deadline);
  // Writes nothing: call Checkpoint before. Waits a second at most for what is in flight.
  ~DiskTier();

  // Writes values; readable when it returns, durable after a later Flush. A request may get
  // RESOURCE_EXHAUSTED DISK_FULL (see Victims) or DISK_SPACE; DATA_LOSS DISK_IO.
  // After a cancel no further value is begun; those get ABORTED TIER_CANCELLED.
  void Put(std::span<TierPut> requests, Deadline deadline, const std::stop_token& cancel = {});

  // Reads values into the callers' buffers, whose bytes mean nothing unless OK. A request may get
  // NOT_FOUND DISK_MISS; DATA_LOSS DISK_CORRUPT or DISK_IO: the value has left.
  // A cancel as in Put.
  void Get(std::span<TierGet> requests, Deadline deadline, const std::stop_token& cancel = {});

  // Forgets values; keys that are not there are fine. Gone for good after a later Flush.
  Status Erase(std::span<const std::string> keys, Deadline deadline);

  // Makes durable what was put and erased before. DATA_LOSS DISK_FLUSH: values put since the last
  // good flush to a segment that failed have left, and it takes no more.
  Status Flush(Deadline deadline);

  // Flush, then the index. RESOURCE_EXHAUSTED DISK_CHECKPOINT: it is larger than its file.
  Status Checkpoint(Deadline deadline);

  // Another budget, until the next Open: more files, reserved, or fewer, whose values leave;
  // returns how many did. Holds both sides. Checkpoints' files grow, and never shrink.
  // INVALID_ARGUMENT DISK_BUDGET; RESOURCE_EXHAUSTED DISK_SPACE: nothing changed;
  // FAILED_PRECONDITION RESIZE_PINNED: pins keep some of the files that would go.
  Result<uint64_t> Resize(uint64_t budget_bytes, Deadline deadline);

  // The sizes of what is there. Under one hold of the lock.
  void Probe(std::span<TierProbe> probes) const;
  bool Contains(std::string_view key) const;
  // Bytes of each buffer; empty: it is not there.
  std::vector<uint64_t> Sizes(std::string_view key) const;
  // `visit` must not call the tier.
  void ForEach(const std::function<void(const std::string& key, std::span<const uint64_t> sizes)>&
                   visit) const;
  // The values of `slots` slots from `*cursor` on (0: the first), in their order on disk; moves it,
  // at the end to kWalkEnd. Holds the lock for that many slots.
  std::vector<TierValue> Scan(uint64_t* cursor, size_t slots) const;
  // Keys to Erase so that a value of these sizes finds room: one not used lately of its size, or,
  // while no segment serves its size, all of the segment that holds the fewest. Empty: there is
  // room, or pins keep all.
  std::vector<std::string> Victims(std::span<const uint64_t> sizes);

  // Victims never names these, there now or later, until as many Unpin. RAM only.
  void Pin(std::span<const std::string> keys);
  void Unpin(std::span<const std::string> keys);

  // Memory that buffers lie in: io_uring registers it, where RLIMIT_MEMLOCK allows. The tier keeps
  // it for as long as it lives. Holds both sides.
  Status AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline);

  DiskTierStats Stats() const;

 private:
  struct Impl;
  explicit DiskTier(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
