// SPDX-License-Identifier: Apache-2.0
// SpanShape: which tokens of a sequence plan sekv has in spans and which as raw rows, and what both
// take; of the model that span_step.h measures.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bench/cuda/trace_surprisal.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata::cuda::sekv {

inline constexpr int kKvHeads = 8, kGroup = 4, kHeads = kKvHeads * kGroup, kDim = 128;
inline constexpr int32_t kPage = 16, kWindow = 512, kRank = 16, kRoutes = 32;
inline constexpr int64_t kRow = kDim * 2;
inline constexpr int64_t kPageBytes = int64_t{2} * kKvHeads * kPage * kRow;

class SpanShape {
 public:
  SpanShape(const std::vector<float>& surprisal, int32_t tokens)
      : room_(tokens / 50), window_begin_(tokens - kWindow) {
    const auto n = static_cast<int32_t>(surprisal.size());
    const double threshold = AnchorThreshold(surprisal, n, 2.0);
    const std::vector<kvstrata::Run> found = SpansIn(surprisal, {0, n}, threshold, 4);
    for (int32_t at = 0; at < window_begin_; at += n) {
      for (const kvstrata::Run& s : found) {
        if (at + s.end <= window_begin_) spans_.push_back({at + s.begin, at + s.end});
      }
    }
    for (const kvstrata::Run& s : spans_) spanned_ += s.end - s.begin;
  }

  const std::vector<kvstrata::Run>& spans() const { return spans_; }
  int32_t count() const { return static_cast<int32_t>(spans_.size()); }
  int32_t raw() const { return static_cast<int32_t>(window_begin_ - spanned_); }
  // Tokens that a query head may expand.
  int32_t room() const { return room_; }
  // The stride of a row of scores, one for each span.
  int32_t stride() const { return (count() + 31) / 32 * 32; }

  static int32_t RankOf(int32_t n) { return kRank * (n + kDim) < n * kDim ? kRank : -1; }
  // Bytes of a head's keys, or of its values.
  static int64_t SideBytes(int32_t n) {
    if (RankOf(n) < 0) return n * kRow;
    return (int64_t{n} * kRank * 2 + 63) / 64 * 64 + kRank * kRow;
  }
  int64_t HeadFactors() const {
    int64_t bytes = 0;
    for (const kvstrata::Run& s : spans_) bytes += 2 * SideBytes(s.end - s.begin);
    return bytes;
  }
  // Bytes that a step of one layer must read of the sequence, if the heads of a group agree.
  int64_t BytesRead() const {
    const int64_t rows = int64_t{kKvHeads} * kRow * (2 * raw() + 2 * count() + 2 * kWindow);
    const int64_t scores = int64_t{kHeads} * count() * 4 * 5;  // norms, two scores, read again
    const int64_t factors = kKvHeads * HeadFactors();
    return rows + scores + factors * room_ / std::max<int64_t>(spanned_, 1);
  }

 private:
  const int32_t room_, window_begin_;
  std::vector<kvstrata::Run> spans_;
  int64_t spanned_ = 0;  // tokens
};

}  // namespace kvstrata::cuda::sekv
