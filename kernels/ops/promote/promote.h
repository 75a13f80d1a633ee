// SPDX-License-Identifier: Apache-2.0
// Ops promote and rebase: the hot cache (kernels/cuda/batches/hot_pages.h) follows what is
// selected, and where the pages are.
//
// promote, of one layer, between its selection and its attention: of each (sequence, KV head) the
// pages of the sinks, the listed units and the recent tokens that lie in the host's memory and have
// no slot get one, in order of position, and are copied into it: free slots first, then those that
// were selected longest ago, never one that this selection has. The slots are given out by index,
// first all that are older than the youngest that is needed, then of those as young the lower ones.
// What finds no slot is attended in place, as is a page that is not complete, and all of a sequence
// that is attended in full. What is attended has the same bits either way.
//
// rebase, when pages have come or moved: entries of pages whose address is another one than before
// name the page itself, and their slots are free.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

struct PromoteBatch {
  PagedLayer layer;           // with `hot`
  DeviceSelection selection;  // sink_end and recent_begin not null
  int32_t batch = 0;
  int64_t layer_bytes = 0;             // bytes of a layer on a page
  const int32_t* tokens = nullptr;     // device [batch], of this step, above 0: the stamp
  const int32_t* committed = nullptr;  // device [batch]: pages up to there are complete
  uint32_t* counters =
      nullptr;                // device [batch * kv_heads], 0 before the first call and after each
  int32_t ctas_per_list = 0;  // 0: as many as are good; else 1 .. 128, for tests and tuning
};

struct RebaseBatch {
  HotPages hot;
  const uint64_t* pages = nullptr;  // device: what hot.pages is to be
  int32_t first = 0, last = 0;      // pages [first, last) change
  int32_t layers = 0, kv_heads = 0;
  int64_t layer_bytes = 0;
};

// What a promotion did: pages that had a slot, slots taken from other pages, pages that found none.
struct Promoted {
  int64_t hits = 0, evictions = 0, unplaced = 0;
};

// The truth; slots and pages that are copied are in the host's memory, and so are all tables.
Promoted PromoteRef(const PromoteBatch& work);
void RebaseRef(const RebaseBatch& work);

}  // namespace kvstrata::cuda
