// SPDX-License-Identifier: Apache-2.0
// Options of selector `bucket` (docs/spec/sentencekv.md; budget, r, n_obs: paper; the others: its
// code), in tokens. Rows: bucket.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct BucketOptions {
  int32_t budget = 1024;            // `tau`
  double r = 2.0;                   // kept tokens over `budget`
  int32_t n_obs = 32;               // last queries of the prompt
  int32_t sinks = 32, recent = 32;  // sinks: `start`
  int32_t pool = 7, max_length = 100;
  bool keep_rest = false, per_query_head = false;

  bool operator==(const BucketOptions&) const = default;
};

}  // namespace kvstrata
