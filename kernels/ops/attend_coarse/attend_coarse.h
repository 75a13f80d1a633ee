// SPDX-License-Identifier: Apache-2.0
// Op attend_coarse: partial attention over units as one row each (docs/spec/sekv.md 8;
// docs/spec/beyond.md 1).
//
// Unit u of n_u tokens: logit scale * q.k_u + ln n_u, value
// v_u. Partials as in attend_raw.h; every query sees every unit. Output row of query token i and
// head g is i * row_token + g, so that items for single heads of a group can share one part; rows
// that no item writes are the caller's.
// Work items are independent. Cost: reads each chosen row once per item. No allocation.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct AttendCoarseWork {
  PagedRows k, v;            // means, dressed as pages of units
  const float* q = nullptr;  // query token i, head g: q + i*q_token + g*dim
  int64_t q_token = 0;
  int32_t queries = 1;
  int32_t group = 1;
  int32_t row_token = 1;      // rows of m, l, o from a query token to the next; >= group
  const Run* runs = nullptr;  // units, ascending, disjoint, not empty
  int32_t run_count = 0;
  // ln n_u of unit u at log_count[u]; null: log_count_all for every unit.
  const float* log_count = nullptr;
  float log_count_all = 0;
  float scale = 1.0f;
  float* m = nullptr;
  float* l = nullptr;
  float* o = nullptr;  // [rows][dim]
};

void AttendCoarseRef(const AttendCoarseWork* work, int64_t n, Executor& executor);
void AttendCoarseSimd(const AttendCoarseWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
