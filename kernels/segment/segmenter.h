// SPDX-License-Identifier: Apache-2.0
// Segmenter: how is a sequence cut into units, and which summaries does a unit have? (The first
// axis of docs/plans.md.) A segmenter fixes the IndexLayout of a plan and brings index blocks
// up to date.
//
// Implementations: page.cc (Quest's min/max), hierarchy.cc (CHESS's page, chunk and grid means);
// bits.cc (keys in few bits); `none` has no index. Summaries are functions of the raw keys alone,
// so building them token by token, in chunks or at once gives the same bits. Threads: stateless;
// any.
#pragma once

#include "kernels/backend/backend.h"
#include "kernels/pages/sequence_view.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

class Segmenter {
 public:
  virtual ~Segmenter() = default;

  virtual IndexLayout Layout(const Plan& plan, const Geometry& geometry) const = 0;

  // Writes the rows of every level's units that are complete at `to` tokens and were not at `from`.
  // REQUIRES: index blocks up to `to` are writable. Cost: reads (to - from) keys of all layers
  // once.
  virtual void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
                      int32_t from, int32_t to, const Backend& backend,
                      Executor& executor) const = 0;
};

// Whether plan.index.rest asks coarse rows of an index.
inline bool HasCoarseRows(const Plan& plan) { return plan.index.rest != RestKind::kDrop; }

// Lives for the process.
const Segmenter& SegmenterOf(SegmenterKind kind);

}  // namespace kvstrata
