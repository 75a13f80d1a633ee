// The first op of plan sekv on the GPU (docs/spec/sekv.md 6, 8; kernels/select/zoom.cc): one read
// of the mean keys gives both what spans are chosen by and the logits of their coarse rows.
//
//   relevance[b][h][s] = (W^T W q_h / sqrt(d')) . k_s / |W k_s| + ln n_s
//                        coarse[b][h][s] where a sequence has no routers
//   coarse[b][h][s]    = scale q_h . k_s + ln n_s
//
// Both kinds of queries as two bf16 numbers each, sums in fp32. Cost: reads each mean key and norm
// once (no norms where there are no routers); one kernel. Every CTA routes the queries of its KV
// head for itself.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_
#define KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_

#include "kernels/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

struct ScoreSpansBatch {
  SpanLayer layer;
  SpanQueries queries;
  float* relevance = nullptr;  // device [batch][query_heads][span_stride]
  float* coarse = nullptr;     // device, the same
  bool ahead = false;          // launch.cuh; of parts, all in them, and routers, not of q
};

// cudaErrorInvalidValue: a shape that it does not take.
int ScoreSpansCuda(const ScoreSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SCORE_SPANS_CUDA_H_
