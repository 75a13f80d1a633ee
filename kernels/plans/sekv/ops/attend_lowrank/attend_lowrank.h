// SPDX-License-Identifier: Apache-2.0
// Op attend_lowrank: partial attention over expanded spans in factor space (docs/spec/sekv.md 8).
//
// Keys of a span of n tokens are A B with A [n][rank], B [rank][dim], both bf16: scores A (B q),
// output (p A) B; nothing is reconstructed. rank < 0: A holds the rows themselves [n][dim].
// Partials as in attend_raw.h over all spans of an item; every query sees every row. Output row of
// query token i and head g is i * row_token + g.
// Sums in fp32 (ref: double). Work items are independent. No allocation beyond a few rows of stack.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/dtype.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// More tokens than this are no span (docs/spec/sekv.md: a span is a run between anchors); a
// segmenter splits longer ones.
inline constexpr int32_t kMaxRank = 256;

struct LowRankRows {
  const BF16* left = nullptr;   // [n][rank], or [n][dim] when rank < 0
  const BF16* right = nullptr;  // [rank][dim]; null when rank < 0
  int32_t rank = -1;
};
// Bytes of a side of n tokens.
inline uint64_t FactorBytes(int32_t n, const LowRankRows& rows, int32_t dim) {
  const int64_t values = rows.rank < 0 ? int64_t{n} * dim : int64_t{rows.rank} * (int64_t{n} + dim);
  return static_cast<uint64_t>(values) * sizeof(BF16);
}

struct LowRankSpan {
  int32_t n = 0;
  LowRankRows k, v;
};

struct AttendLowRankWork {
  const LowRankSpan* spans = nullptr;  // [span_count]
  int32_t span_count = 0;
  int32_t dim = 0;
  const float* q = nullptr;  // query token i, head g: q + i*q_token + g*dim
  int64_t q_token = 0;
  int32_t queries = 1;
  int32_t group = 1;
  int32_t row_token = 1;
  float scale = 1.0f;
  float* m = nullptr;
  float* l = nullptr;
  float* o = nullptr;  // [rows][dim]
};

void AttendLowRankRef(const AttendLowRankWork* work, int64_t n, Executor& executor);
void AttendLowRankSimd(const AttendLowRankWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
