// SPDX-License-Identifier: Apache-2.0
// The one loop behind every segmenter whose summaries are rows of units: writes the rows of the
// units that became complete, level by level, coarse rows (IndexLayout::key_mean, ...) included.
// Private to segmenters.
//
// One (layer, KV head) depends on nothing but itself, at every level: the loop is parallel over
// them. Threads: as Segmenter::Update. Cost: reads (to - from) keys of all layers once,
// and values with coarse rows; nothing when no unit completes.
#pragma once

#include "kernels/backend/backend.h"
#include "kernels/pages/sequence_view.h"

namespace kvstrata {

// REQUIRES: index.kind is not kNone; index blocks up to `to` are writable.
void SummarizeCompleteUnits(const Geometry& geometry, const IndexLayout& index,
                            const SequenceView& view, int32_t from, int32_t to,
                            const Backend& backend, Executor& executor);

}  // namespace kvstrata
