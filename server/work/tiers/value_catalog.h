// SPDX-License-Identifier: Apache-2.0
// ValueCatalog: values one by one, in memory and on disk, as an operator lists, fetches and
// verifies them (Admin.ListValues, GetValue, Verify).
//
// Ownership: borrows store and tier (null: there is none), which outlive it. Thread-safety: all
// methods, from any thread. Blocking: Get and Verify wait for the disk, 10 s at most. Cost: a list
// holds the store's lock for 256 records at a time, the tier's for 256 slots.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/store/reports/value_info.h"
#include "server/store/store.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// Chunks of engines in memory (docs/chunks.md), by their keys in tiers. Null functions: none.
struct ChunkValues {
  // Lists the next `n` from `*at` on, 0 at first; kNoMoreValues: that was all.
  std::function<std::vector<ValueInfo>(uint64_t* at, size_t n)> list;
  std::function<bool(const std::string& key)> has;
  std::function<Result<ValueBytes>(const std::string& key)> get;
};

class ValueCatalog {
 public:
  ValueCatalog(Store* store, ValueTier* tier, ChunkValues chunks = {})
      : store_(store), tier_(tier), chunks_(std::move(chunks)) {}

  // At most `limit` values behind `after` (0: from the first one on): what memory has, then what
  // the disk alone has. Fewer, or none, before the end where many were looked at. What changes
  // between two calls may be missed, or come twice. The kind of what only the disk has is told by
  // its key and sizes: where those fit a registered model's pages, a page.
  ValueList List(const ValueFilter& filter, uint64_t after, size_t limit) const;

  // From memory, else from disk. NOT_FOUND VALUE_UNKNOWN; what ValueTier::Get says.
  Result<ValueBytes> Get(const std::string& key) const;

  // Reads it from disk and checks it there, then compares a page, index block, extent or chunk in
  // memory with it; not what may change under its key (series, records). DISK_DEADLINE,
  // DISK_BREAKER.
  Result<ValueVerdict> Verify(const std::string& key) const;

 private:
  Result<ValueBytes> InMemory(const std::string& key) const;

  Store* const store_;
  ValueTier* const tier_;
  const ChunkValues chunks_;
};

}  // namespace kvstrata
