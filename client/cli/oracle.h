// SPDX-License-Identifier: Apache-2.0
// Oracle: exact attention of one step at one layer, from the trace's rows alone, in double.
//
// What a plan's answers are measured against where its own log-sum-exp says nothing: mass on any
// set of positions, attention over any set, the best k. Ownership: borrows the trace's rows.
// Threads: immutable. Cost: the constructor reads the layer's keys once per query head; memory is
// 8 bytes per query head and position. A trace with keys = pre_rope is rotated to its positions
// first: a cosine and a sine a pair, head and position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/cli/trace.h"

namespace kvstrata::cli {

class Oracle {
 public:
  // Step t of the trace: its query over positions 0 .. N0 + t.
  Oracle(const TraceShape& shape, const TraceLayer& layer, int32_t t);

  // Positions are ascending and below N0 + t + 1 everywhere.
  // The part of full attention's softmax mass that falls on `positions`.
  double MassOn(int32_t head, std::span<const int32_t> positions) const;
  // [head_dim]: attention over `positions` alone; zeros over none.
  std::vector<double> AttendOver(int32_t head, std::span<const int32_t> positions) const;
  // The k positions of largest q . key, ties to the lower; ascending.
  std::vector<int32_t> Best(int32_t head, int32_t k) const;

 private:
  struct Head {
    std::vector<double> scores;      // q . key of every position, unscaled
    double largest = 0, weight = 0;  // over the scaled scores: max, sum of exp(score - max)
  };
  double Weight(const Head& head, int32_t position, double largest) const;

  TraceShape shape_;
  TraceLayer layer_;
  double scale_;
  std::vector<Head> heads_;
};

}  // namespace kvstrata::cli
