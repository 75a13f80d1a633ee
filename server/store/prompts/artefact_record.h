// SPDX-License-Identifier: Apache-2.0
// ArtefactRecord: what an artefact (artefacts.h) is when it lies in the tier below, as bytes of
// docs/disk_format.md, "Artefact". The record is the value of the artefact's key; each extent is
// one of its extents, a value under a key that names the extent's checksum too, so that extents of
// two builds of one artefact never mix.
//
// Values and pure functions. Cost: a copy; a hash of some 100 bytes an extent key.
#ifndef KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_RECORD_H_
#define KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_RECORD_H_

#include <optional>
#include <span>
#include <vector>

#include "server/store/pages/artefacts.h"
#include "server/store/prompts/held_prefix.h"

namespace kvstrata {

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

// Whether `value`, as it came from the tier, is that extent: its header and every byte of it.
Status VerifyExtent(const ArtefactRecord::Stored& stored, std::span<const std::byte> value,
                    const Geometry& geometry);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_RECORD_H_
