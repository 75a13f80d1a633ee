// SPDX-License-Identifier: Apache-2.0
// Op merge: partials of the same queries over different rows to the attention output.
//
// M = max m_j; out = sum exp(m_j - M) o_j / sum exp(m_j - M) l_j; lse = M + ln(sum exp(m_j - M)
// l_j) (docs/spec/README.md, "Merge"). Empty partials change nothing; the output over no rows is 0
// and its lse is -inf. Partials are taken in the order given, so answers are the same bits
// everywhere.
// Work items are independent. No allocation.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct MergeWork {
  // `parts` partials of `rows` queries each: m, l [parts][rows], o [parts][rows][dim].
  const float* m = nullptr;
  const float* l = nullptr;
  const float* o = nullptr;
  int32_t parts = 0;
  int32_t rows = 0;  // query tokens * group
  int32_t group = 1;
  int32_t dim = 0;
  // Row i * group + g goes to out + i * out_token + g * dim (floats), lse + i * lse_token + g.
  float* out = nullptr;
  int64_t out_token = 0;
  float* lse = nullptr;  // may be null
  int64_t lse_token = 0;
};

void MergeRef(const MergeWork* work, int64_t n, Executor& executor);
void MergeSimd(const MergeWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
