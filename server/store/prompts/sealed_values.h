// SPDX-License-Identifier: Apache-2.0
// SealedValues: what lies under a key, as bytes: pages, index blocks, artefacts' records and
// extents (docs/disk_format.md, "Values"). For the tier below, which writes them, and for
// operators, who list and copy them (value_info.h).
//
// Thread-safety: all methods, from any thread. Bytes are copied outside of the lock, while a hold
// keeps their page. Cost: of the copy; lists hold the lock for 256 records, or for one artefact, at
// a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_tier.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/prompts/artefact_ledger.h"
#include "server/store/reports/value_info.h"

namespace kvstrata {

// Who copies a value. What was reported of its positions is new until the local tier has copied it.
enum class CopyFor : uint8_t { kLocalTier, kRemoteTier };

class SealedValues {
 public:
  SealedValues(Books& books, ArtefactLedger& ledger, PageHolds& holds)
      : books_(books), ledger_(ledger), holds_(holds) {}

  // --- for the tier below (page_tier.h) ---
  // What is to be written for an offered key: a page or index block, or the extents of an artefact
  // and at last its record, which is of no use without all of them. Empty: it left memory.
  std::vector<SealedValue> Sealed(const PageKey& key) const KVS_EXCLUDES(store_lock);
  // Copies the buffers of one of them; false: it is not there any more, or of another size.
  bool CopySealed(const PageKey& key, size_t value, std::span<const std::span<std::byte>> to,
                  CopyFor whom = CopyFor::kLocalTier) KVS_EXCLUDES(store_lock);
  // The tier has these now.
  void NoteStored(std::span<const PageKey> keys) KVS_EXCLUDES(store_lock);
  // It has this value of an artefact's key; nothing if that is no record.
  void NoteRecord(const PageKey& artefact, std::span<const std::byte> value);

  // --- for operators (value_info.h) ---
  // Pages and index blocks under a key, of at most `records` records from `*cursor` on (0: the
  // first), which it moves; at the end it is kNoMoreValues.
  std::vector<ValueInfo> PageValues(uint64_t* cursor, size_t records) const
      KVS_EXCLUDES(store_lock);
  // Records and extents of artefacts.
  std::vector<ValueInfo> ArtefactValues() const KVS_EXCLUDES(store_lock);
  // Whether a page or index block is under this key. A look-up.
  bool HoldsPage(const PageKey& key) const KVS_EXCLUDES(store_lock);
  // A copy of any of these. NOT_FOUND VALUE_UNKNOWN: memory has none.
  Result<ValueBytes> CopyValue(const PageKey& key) KVS_EXCLUDES(store_lock);

 private:
  ValueInfo InfoOfPage(const Page& page) const KVS_REQUIRES(store_lock);
  // The keys of all artefacts, now.
  std::vector<PageKey> ArtefactKeys() const KVS_EXCLUDES(store_lock);
  // Extents of one, in order; empty: it is gone.
  std::vector<ArtefactRecord::Stored> ExtentsOf(const PageKey& artefact, ValueInfo* record) const
      KVS_EXCLUDES(store_lock);
  // Keeps the extent under that key readable; null if there is none any more.
  Page* KeepExtent(const PageKey& key, uint64_t* hold) KVS_EXCLUDES(store_lock);

  Books& books_;
  ArtefactLedger& ledger_;
  PageHolds& holds_;
};

}  // namespace kvstrata
