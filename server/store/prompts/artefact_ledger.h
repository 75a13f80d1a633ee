// SPDX-License-Identifier: Apache-2.0
// ArtefactLedger: what the records of artefacts in the tier below say, kept in memory, so that a
// look-up need not read them. A record is noted when it is written, when an open reads it, and when
// the daemon starts (server/work/tiers/pin_records.h); it may have left the tier since.
//
// Records that make no page redundant are not kept: they change no look-up. Thread-safety: all
// methods, from any thread. Cost: 40 bytes an extent, kMaxBytes in all; what was noted first is
// forgotten first.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "kernels/codec/extent.h"
#include "server/store/pages/artefacts.h"
#include "server/store/prompts/held_prefix.h"

namespace kvstrata {

// ArtefactRecord: what an artefact (artefacts.h) is when it lies in the tier below, as bytes of
// docs/disk_format.md, "Artefact". The record is the value of the artefact's key; each extent is
// one of its extents, a value under a key that names the extent's checksum too, so that extents of
// two builds of one artefact never mix.
//
// Values and pure functions. Cost: a copy; a hash of some 100 bytes an extent key.
struct ArtefactRecord {
  struct Stored {
    uint64_t bytes = 0;     // size of the extent; the value is rounded up to whole pages
    uint64_t checksum = 0;  // checksum in its header
    Run tokens;
    Tier tier = Tier::kDevice;  // where it lay
  };
  uint32_t prompt_tokens = 0;
  std::vector<Stored> extents;
  std::vector<Run> released;
  Series series;
};

ArtefactRecord RecordOf(const Artefact& artefact);

std::vector<std::byte> EncodeRecord(const ArtefactRecord& record);
// Nothing unless the bytes are a record whose extents and runs are in order and within the prompt.
std::optional<ArtefactRecord> ParseRecord(std::span<const std::byte> bytes);

// REQUIRES: it has extents.
inline RawFree RawFreeOf(const ArtefactRecord& record) {
  return {record.released, record.extents.back().tokens.end, Tier::kDisk};
}

// The key of extent number `i`.
PageKey ExtentKey(const PageKey& artefact, size_t i, const ArtefactRecord::Stored& stored);

// Hands `value`, as it came from the tier, to `copy` piece by piece, and says whether it is that
// extent: its header and every byte of it. What was copied counts only then.
Status CopyVerified(const ArtefactRecord::Stored& stored, std::span<const std::byte> value,
                    const Geometry& geometry, const ExtentCopier& copy);

class ArtefactLedger {
 public:
  static constexpr size_t kMaxBytes = size_t{64} << 20;

  // Takes the place of what was noted of that artefact.
  void Note(const PageKey& artefact, ArtefactRecord record) KVS_EXCLUDES(mu_);
  // Without its series. Null: it is not known.
  std::shared_ptr<const ArtefactRecord> Find(const PageKey& artefact) const KVS_EXCLUDES(mu_);

 private:
  using Entry = std::pair<PageKey, std::shared_ptr<const ArtefactRecord>>;
  void Forget(std::list<Entry>::iterator at) KVS_REQUIRES(mu_);

  mutable Mutex mu_;
  std::list<Entry> by_age_ KVS_GUARDED_BY(mu_);  // the oldest first
  std::map<PageKey, std::list<Entry>::iterator> by_key_ KVS_GUARDED_BY(mu_);
  size_t bytes_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace kvstrata
