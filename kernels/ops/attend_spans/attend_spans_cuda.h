// Ops attend_coarse and attend_lowrank on the GPU (contracts: attend_coarse.h, attend_lowrank.h),
// and attend_raw for the rows that lie between spans and behind them: all that one query token a
// sequence attends under plan sekv, in one kernel and one softmax.
//
//   expanded spans   from their factors A, B: scores A (B q), output (p A) B; or as raw rows
//   coarse rows      of all spans whose logit is not -inf
//   raw rows         of the parts
//   rows on pages    [window_begin, tokens): the local window and what was generated
//
// One kernel, as each of four would cost 3 us more, and warps that are short of one kind of work
// take another. Products in tensor cores: queries and B q as two bf16 numbers each, weights and
// p A rounded to bf16 (weights of rows in the model's dtype to that), sums in fp32. The same inputs
// on the same GPU give the same bits.
//
// Cost: reads each attended row or factor once, at any rank up to 32; beyond, B once for every 16
// tokens of its span.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_SPANS_ATTEND_SPANS_CUDA_H_
#define KVSTRATA_KERNELS_OPS_ATTEND_SPANS_ATTEND_SPANS_CUDA_H_

#include "kernels/ops/attend_spans/span_layer.h"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

struct AttendSpansBatch {
  SpanLayer layer;
  SpanQueries queries;
  const float* coarse = nullptr;          // device [batch][query_heads][span_stride], natural
  const uint32_t* list = nullptr;         // device, of expand_spans
  const int32_t* counts = nullptr;        // device [batch][kv_heads]
  PagedLayer pages;                       // of this layer; page_tokens a multiple of 16
  const int32_t* window_begin = nullptr;  // device [batch]
  const int32_t* tokens = nullptr;        // device [batch], the new one included

  Partials with;                 // of other ops on the same queries, merged into the output
  AttentionOutput to;            // to.rows null: `partial` is written instead
  Partials partial;              // 1 part: what merge.h calls a partial, over all attended rows
  uint32_t* counters = nullptr;  // device [batch * kv_heads], 0 before the first call, after each
  float* workspace = nullptr;    // device, AttendSpansWorkspaceBytes, any content, 16-aligned
  // launch.cuh, for tables and lengths. For queries and rows: expand_spans of the same layer is
  // before this op on the stream, and all that is not of spans is complete before that one's wait
  // ends.
  bool ahead = false;
};

int64_t AttendSpansWorkspaceBytes(const AttendSpansBatch& work);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or workspace
// must be ordered by a stream.
int AttendSpansCuda(const AttendSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_SPANS_ATTEND_SPANS_CUDA_H_
