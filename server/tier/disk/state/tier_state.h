// SPDX-License-Identifier: Apache-2.0
// TierState: what both sides of a disk tier change together, and the one lock that guards it: where
// each value lies, which slots are taken, which are condemned, how the device does.
//
// The tier's parts (tier_files.h and others) hold the lock for as long as they look something up.
// Locks: a side's (tier_files.h), then `mu`, which is a leaf and never held
// around I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "server/tier/breaker.h"
#include "server/tier/disk/files/transfer_queue.h"
#include "server/tier/disk/format/checkpoint.h"
#include "server/tier/disk/format/format.h"
#include "server/tier/disk/format/segment_table.h"
#include "server/tier/disk/state/disk_options.h"
#include "server/tier/value_tier.h"

namespace kvstrata::disk {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
using Index = std::unordered_map<std::string, Entry, StringHash, std::equal_to<>>;

struct Condemned {
  SlotId at;
  bool reuse = false;  // free once its header is overwritten; else the medium is not trusted
};

Status DeadlineExceeded(const char* what);
// "segment.3: read 0 of 4096 bytes at offset 8192: Input/output error".
Status IoError(const IoOutcome& outcome, std::string_view file);

class TierState {
 public:
  TierState(const DiskTierOptions& of, uint32_t segments)
      : options(of), table(segments, of.segment_bytes / kBlockBytes) {}

  // OK, or UNAVAILABLE DISK_BREAKER: the device is left alone for a while.
  Status MayAsk() KVS_EXCLUDES(mu);
  // What the device answered about a segment; that it did not answer in time.
  void Observe(const IoOutcome& outcome, uint32_t segment) KVS_EXCLUDES(mu);
  void ObserveDeadline() KVS_EXCLUDES(mu);

  void Probe(std::span<TierProbe> probes) const KVS_EXCLUDES(mu);
  std::vector<TierValue> Scan(uint64_t* cursor, size_t slots) const KVS_EXCLUDES(mu);

  // Those of DiskTier: which values may leave so that another finds room, by a clock hand for each
  // size of a slot, and which must stay.
  std::vector<std::string> Victims(std::span<const uint64_t> sizes) KVS_EXCLUDES(mu);
  void Pin(std::span<const std::string> keys) KVS_EXCLUDES(mu);
  void Unpin(std::span<const std::string> keys) KVS_EXCLUDES(mu);

  // Counts a failure of the device, and keeps what it was.
  void Failed(std::string what) KVS_REQUIRES(mu);
  // Takes a value out of the index. Its slot stays taken.
  SlotId Forget(Index::iterator it) KVS_REQUIRES(mu);
  Place PlaceOf(SlotId at) const KVS_REQUIRES(mu);

  const DiskTierOptions options;
  StoreId store{};  // constant after the start

  mutable Mutex mu;
  Index index KVS_GUARDED_BY(mu);
  SegmentTable table KVS_GUARDED_BY(mu);
  Breaker breaker KVS_GUARDED_BY(mu);
  std::vector<Condemned> condemned KVS_GUARDED_BY(mu);
  std::unordered_map<std::string, uint32_t> pinned KVS_GUARDED_BY(mu);  // how often
  std::map<uint32_t, uint64_t> hands KVS_GUARDED_BY(mu);                // by blocks of a slot
  uint64_t generation KVS_GUARDED_BY(mu) = 0;                           // the last one given
  uint64_t checkpoint_sequence KVS_GUARDED_BY(mu) = 0;  // number of the last one tried or found
  DiskTierStats stats KVS_GUARDED_BY(mu);
};

}  // namespace kvstrata::disk
