// SPDX-License-Identifier: Apache-2.0
// Op pick: scores to indices.
//
// TopK gives the indices of the k largest scores in ascending order of index; equal scores keep the
// lower index; NaN ranks below everything. k >= n gives all of them; k <= 0 none.
// ref: full sort; simd: bisection for the threshold, at most 35 passes over the scores, or over
// those that reach a guess; 70 KB of stack, no allocation. Exact: all backends agree bit for bit.
// CeilShare and the literal cascade's quantile live here too, so that every selector counts alike
// (docs/spec/README.md "A share of n units"; docs/spec/chess.md 4).
#pragma once

#include <cstdint>
#include <vector>

namespace kvstrata {

struct PickWork {
  const float* scores = nullptr;  // [n]
  int32_t n = 0;
  int32_t k = 0;
  int32_t* out = nullptr;  // [min(k, n)]
};

// Returns nothing: out has exactly min(max(k, 0), n) entries.
void TopKRef(const PickWork& work);
void TopKSimd(const PickWork& work);

// All n indices in the order in which TopK takes them: for refs of ops that stop elsewhere.
std::vector<int32_t> RankedRef(const float* scores, int32_t n);

// ceil(share * n - 1e-9) in fp64, at least 1 and at most n (0 for n = 0).
int32_t CeilShare(double share, int32_t n);

// Linearly interpolated quantile q in [0, 1] of n >= 1 values, as numpy's default method.
double Quantile(const std::vector<double>& values, double q);

}  // namespace kvstrata
