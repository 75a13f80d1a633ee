// SPDX-License-Identifier: Apache-2.0
// Op attend_raw: partial attention of a few queries over a run of rows of one KV head.
//
// One work item is the queries of one sequence's step (one in decode, a chunk in prefill) with the
// G query heads of one KV head, over a slice of the attended positions. It returns the partial
// (docs/spec/README.md, "Partial attention"): m = max s_i, l = sum exp(s_i - m), o = sum exp(s_i -
// m) v_i with s_i = scale * q.k_i. Row r is visible to query token i iff r <= position + i
// (causal). Queries that see no row of the slice get m = -inf, l = 0, o = 0.
//
// Whoever makes the items splits positions by length (kAttendSliceRows), never by thread count, so
// answers are the same bits on every transport and machine size (ADR 11).
// Sums accumulate in fp32 (ref: double). Work items are independent.
// Cost: reads each K and V row once per 8 (queries * group) or fewer; decode is bound by memory.
//
// Rotary embedding on the fly (docs/spec/README.md; tests/reference/core.py, attend_pre_rope): with
// `rotary`, queries and keys come as they are before it, and s_i = scale * R(place of q) q .
// R(place of i) k_i. A place is the position that the embedding uses: a row's own, or (compact) its
// rank among the attended rows. Visibility goes by positions in either case.
// Cost of it: each key is rotated once per item, for all its queries (rotate_rows-inl.h; the ratio
// to keys stored after rotary embedding is in docs/plans.md).
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/rotary.h"

namespace kvstrata {

// Rows of a slice: large enough that merging is nothing, small enough to share among cores.
inline constexpr int32_t kAttendSliceRows = 1024;
// Query tokens of a work item in prefill.
inline constexpr int32_t kAttendQueryTile = 64;

struct AttendWork {
  PagedRows k, v;
  const float* q = nullptr;   // query token i, head g of the group: q + i*q_token + g*dim
  int64_t q_token = 0;        // floats from a query token to the next
  int32_t queries = 1;        // query tokens
  int32_t group = 1;          // G
  int32_t position = 0;       // position of query token 0
  const Run* runs = nullptr;  // [run_count], ascending, disjoint, not empty
  int32_t run_count = 0;
  float scale = 1.0f;
  float* m = nullptr;  // [queries * group], index i * group + g
  float* l = nullptr;  // [queries * group]
  float* o = nullptr;  // [queries * group][dim]

  const RotaryTable* rotary = nullptr;  // null: q and k are used as they are
  int32_t query_place = 0;              // place of query token 0; token i stands at query_place + i
  // Where the first row of `runs` stands, the others behind it one by one; -1: each at its
  // position.
  int32_t row_place = -1;
};

void AttendRawRef(const AttendWork* work, int64_t n, Executor& executor);
void AttendRawSimd(const AttendWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
