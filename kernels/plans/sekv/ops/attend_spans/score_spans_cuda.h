// SPDX-License-Identifier: Apache-2.0
// Op score_spans on the GPU (contract: score_spans.h). Both kinds of queries as two bf16 numbers
// each, sums in fp32. Cost: reads each mean key and norm once (no norms where there are no
// routers); one kernel. Every CTA routes the queries of its KV head for itself.
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/score_spans.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue: a shape that it does not take.
int ScoreSpansCuda(const ScoreSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda
