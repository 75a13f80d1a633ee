// Key-key affinity of CHESS (docs/spec/chess.md 2 and 3): the anchor, which is the mean page vector
// of the recent window, against every page, chunk and grid of a hierarchy index. Private to
// kernels/select.
//
// Units that are still filling have no stored row; their vectors are made here and thrown away.
// Threads: pure; any. Cost: reads every index row below `tokens` once, for all layers and heads;
// one scratch array of (units * layers * KV heads) floats.
#ifndef KVSTRATA_KERNELS_SELECT_AFFINITY_H_
#define KVSTRATA_KERNELS_SELECT_AFFINITY_H_

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

// By level of the index: 0 pages (complete ones), 1 chunks, 2 grids (the last may be filling).
using AffinityScores = std::array<std::vector<float>, 3>;

// Scores of the sequence as it was at `tokens`, later tokens unseen. The window is the pages from
// `window_start` on, the filling one included. `centred`: both sides of the dot product minus the
// mean vector of the complete pages (fp32, unrounded), so that channels that are large everywhere
// do not decide (docs/spec/beyond.md 7); it reads the page rows once more.
// REQUIRES: at least one page is complete at `tokens`; tokens <= context.view.tokens; all rows of
// units that are complete at `tokens` are written; window_start <= tokens / page.
AffinityScores ScoreAffinity(const SelectContext& context, int32_t tokens, int32_t window_start,
                             bool centred);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_AFFINITY_H_
