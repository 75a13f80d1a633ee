// SPDX-License-Identifier: Apache-2.0
// PageCopies: bytes of pages on their way to other pages. Planned and held under the lock, copied
// outside of it; what changed meanwhile is seen when the copies take their sources' places.
//
// Ownership: a plan's hold has its pages. Thread-safety: methods that say so are called under the
// store's lock, Copy without it, from any thread. Units: bytes, rows are tokens. Cost: of copies;
// while a step runs, promotions keep to StoreSettings::promote_rate.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "server/store/options/copy_rate.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

// A page and the one that it is copied to.
struct PlannedCopy {
  Page* source = nullptr;
  Page* copy = nullptr;
  // For a page of a sequence: where it is, in Sequence::pages or index_blocks.
  bool index = false;
  uint32_t position = 0;
  static constexpr uint32_t kAllRows = ~uint32_t{0};
  uint32_t rows = kAllRows;  // leading tokens that are copied
  bool keeps_key = false;    // the copy takes the source's place in the prefix index too
  bool used = false;         // result: it took the source's place
};

struct CopyPlan {
  uint64_t hold = 0;  // keeps the pages (page_references.h); 0: somebody else's does
  std::vector<PlannedCopy> copies;
};

class PageCopies {
 public:
  PageCopies(Books& books, SessionCatalog& catalog, Tables& tables, PageReferences& references,
             PageHolds& holds, PageAllocator& allocator, uint64_t promote_rate)
      : books_(books),
        catalog_(catalog),
        tables_(tables),
        references_(references),
        holds_(holds),
        allocator_(allocator),
        promote_rate_(promote_rate) {}

  // A page for each to be the copy, and a hold that refers to both; or none. `fits`: Shortage's.
  Status TakeCopies(Session* session, const Taker& taker, CopyPlan* plan,
                    std::optional<uint64_t> fits = {}) KVS_REQUIRES(store_lock);
  // Begins or extends the plan's hold by these of its copies.
  void Hold(CopyPlan* plan, std::span<const PlannedCopy> copies) KVS_REQUIRES(store_lock);
  // `geometry`: of the pages of which some rows are copied.
  Status Copy(const CopyPlan& plan, const Geometry& geometry) KVS_EXCLUDES(store_lock);
  // Copies, and puts the copies in the place of their sources where the sequence (of that session;
  // 0: of any) still has those. Ends the hold in any case. What took its place, and the version of
  // the table that says so. SEQUENCE_UNKNOWN, COPY_FAILED, TABLES_FULL: nothing came of the plan.
  Result<MoveResult> CopyAndSwapIn(uint64_t session, uint64_t sequence, const Geometry& geometry,
                                   CopyPlan* plan) KVS_EXCLUDES(store_lock);
  // Nothing comes of the plan.
  void Discard(CopyPlan* plan) KVS_REQUIRES(store_lock);
  // Makes the copy what the source was, to the prefix index too.
  void TakeOver(Page* source, Page* copy) KVS_REQUIRES(store_lock);
  // StoreSettings::promote_rate.
  void SetPromoteRate(uint64_t bytes_a_second) { promote_rate_.Set(bytes_a_second); }

 private:
  bool StepsRun() const KVS_EXCLUDES(store_lock);
  // For CopyAndSwapIn, once the bytes are there.
  Status SwapIn(Session* session, Sequence* s, CopyPlan* plan) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageHolds& holds_;
  PageAllocator& allocator_;
  CopyRate promote_rate_;
};

}  // namespace kvstrata
