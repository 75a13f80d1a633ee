// SPDX-License-Identifier: Apache-2.0
// Inspection: snapshots for operators and tests, and the proof of the books.
//
// Thread-safety: methods that say so are called under the store's lock, all others from any thread.
// Cost: each sequence is shown as it was at some moment, others get in between; Audit holds the
// lock for all, and looks at everything.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

class Inspection {
 public:
  Inspection(Books& books, SessionCatalog& catalog, Eviction& eviction, const Plans& plans,
             const PageReferences& references, const PageHolds& holds, const PrefixPins& pins)
      : books_(books),
        catalog_(catalog),
        eviction_(eviction),
        plans_(plans),
        references_(references),
        holds_(holds),
        pins_(pins) {}

  std::vector<PoolInfo> Pools() const KVS_EXCLUDES(store_lock);  // the devices', then the host's
  std::vector<SessionInfo> Sessions() const KVS_EXCLUDES(store_lock);
  std::vector<ModelInfo> Models() const KVS_EXCLUDES(store_lock);
  std::vector<SequenceInfo> Sequences(uint64_t session) const KVS_EXCLUDES(store_lock);  // 0: all
  Result<SequenceDetail> Show(uint64_t sequence) const KVS_EXCLUDES(store_lock);
  // In buckets of at least `bucket_tokens`, a power of two of pages, and at most `buckets`. Cost: a
  // load for each page. NOT_FOUND SEQUENCE_UNKNOWN.
  Result<SelectionSample> Selections(uint64_t sequence, uint32_t buckets,
                                     uint32_t bucket_tokens = 0) const KVS_EXCLUDES(store_lock);
  // The `most` newest ones, in the order of their numbers.
  std::vector<LiveSequence> Newest(size_t most, uint32_t buckets) const KVS_EXCLUDES(store_lock);
  AuditReport Audit() const KVS_EXCLUDES(store_lock);
  StoreCounters Counters() const KVS_EXCLUDES(store_lock);

  // The sequence's numbers without those that CountPages adds.
  SequenceInfo InfoOf(const Sequence& s) const KVS_REQUIRES(store_lock);
  // Lets others in: what was found before may be gone.
  void CountPages(SequenceInfo* info) const KVS_REQUIRES(store_lock);

 private:
  // Lets others in, too.
  uint64_t BytesOf(std::span<const uint64_t> sequences) const KVS_REQUIRES(store_lock);
  std::string_view WhyUncounted(const Sequence& s, const Session& session) const
      KVS_REQUIRES(store_lock);
  SelectionSample SampleOf(const Sequence& s, uint32_t buckets, uint32_t bucket_tokens) const
      KVS_REQUIRES(store_lock);
  // Calls visit(sequence, page, whether it is an index block) for the sequence's pages and blocks,
  // as long as it is there.
  template <typename Visit>
  void VisitPages(uint64_t sequence, Visit&& visit) const KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Eviction& eviction_;
  const Plans& plans_;
  // What the audit looks at besides.
  const PageReferences& references_;
  const PageHolds& holds_;
  const PrefixPins& pins_;
};

}  // namespace kvstrata
