// SPDX-License-Identifier: Apache-2.0
// Op score_spans on the GPU (contract: score_spans.h). Both kinds of queries as two bf16 numbers
// each, sums in fp32. Cost: reads each mean key and norm once (no norms where there are no
// routers); one kernel. Every CTA routes the queries of its KV head for itself.
#ifndef KVSTRATA_KERNELS_PLANS_SEKV_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_
#define KVSTRATA_KERNELS_PLANS_SEKV_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_

#include "kernels/plans/sekv/ops/attend_spans/score_spans.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue: a shape that it does not take.
int ScoreSpansCuda(const ScoreSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_PLANS_SEKV_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_
