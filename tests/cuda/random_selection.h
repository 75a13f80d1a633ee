// SPDX-License-Identifier: Apache-2.0
// A random selection for each sequence of a batch: on the host, in the shapes of DeviceSelection,
// and on the device. Entries that are no part of a list are no tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/batches/batch.h"
#include "kernels/pages/page_view.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

enum class Kind { kAll, kWindow, kUnits, kTokens };

struct SelectionShape {
  Kind kind = Kind::kAll;
  int unit_tokens = 16;  // for kUnits
  int groups = 1;        // lists of a sequence
};

class RandomSelection {
 public:
  // Up to 40 sinks and up to 100 recent of each sequence's tokens.
  RandomSelection(Rng& rng, const SelectionShape& shape, const std::vector<int32_t>& lengths)
      : kind_(shape.kind), groups_(shape.groups) {
    if (kind_ == Kind::kUnits) unit_tokens_ = shape.unit_tokens;
    if (kind_ == Kind::kTokens) unit_tokens_ = 1;
    const int32_t longest = *std::max_element(lengths.begin(), lengths.end());
    stride_ = unit_tokens_ == 0 ? 0 : longest / unit_tokens_ + 1;
    units_.assign(lengths.size() * static_cast<size_t>(groups_ * stride_), 1 << 30);
    for (int32_t n : lengths) AddBounds(rng, n);
    for (size_t b = 0; b < lengths.size(); ++b) {
      for (int g = 0; g < groups_; ++g) AddList(rng, b, g);
    }
    d_units_ = DeviceArray<int32_t>(units_);
    d_counts_ = DeviceArray<int32_t>(counts_);
    d_sink_end_ = DeviceArray<int32_t>(sink_end_);
    d_recent_begin_ = DeviceArray<int32_t>(recent_begin_);
  }

  DeviceSelection Device() const {
    if (kind_ == Kind::kAll) return {};
    return {unit_tokens_,         groups_,         stride_,
            d_units_.get(),       d_counts_.get(), d_sink_end_.get(),
            d_recent_begin_.get()};
  }
  // The same on the host, for refs.
  DeviceSelection Host() const {
    if (kind_ == Kind::kAll) return {};
    return {unit_tokens_,        groups_, stride_, units_.data(), counts_.data(), sink_end_.data(),
            recent_begin_.data()};
  }
  // Whether there is nothing that a list could leave out.
  bool IsFull(int b) const {
    const auto at = static_cast<size_t>(b);
    return kind_ == Kind::kAll || recent_begin_[at] <= sink_end_[at];
  }
  // Whether position t of sequence b, which has n tokens, is attended.
  bool Has(int b, int head, int32_t n, int32_t t) const {
    const auto at = static_cast<size_t>(b);
    if (t < sink_end_[at] || (t >= recent_begin_[at] && t < n)) return true;
    if (unit_tokens_ == 0) return false;
    const size_t list =
        at * static_cast<size_t>(groups_) + static_cast<size_t>(groups_ == 1 ? 0 : head);
    const int32_t* first = &units_[list * static_cast<size_t>(stride_)];
    return std::binary_search(first, first + counts_[list], t / unit_tokens_);
  }
  std::vector<kvstrata::Run> Runs(int b, int head, int32_t n) const {
    std::vector<kvstrata::Run> runs;
    for (int32_t t = 0; t < n; ++t) {
      if (!Has(b, head, n, t)) continue;
      if (runs.empty() || runs.back().end != t) runs.push_back({t, t});
      runs.back().end = t + 1;
    }
    return runs;
  }

 private:
  void AddBounds(Rng& rng, int32_t n) {
    int32_t sinks = kind_ == Kind::kAll ? 0 : std::min(n, Below(rng, 40));
    int32_t recent = kind_ == Kind::kAll ? 0 : std::max(sinks, n - Below(rng, 100));
    if (unit_tokens_ > 1) {  // lists of units lie between whole units
      sinks = std::min(n, (sinks + unit_tokens_ - 1) / unit_tokens_ * unit_tokens_);
      recent = std::max(sinks, recent / unit_tokens_ * unit_tokens_);
    }
    sink_end_.push_back(sinks);
    recent_begin_.push_back(recent);
  }
  void AddList(Rng& rng, size_t b, int g) {
    if (unit_tokens_ == 0) return counts_.push_back(0);
    const int odds = 1 + Below(rng, 12);
    int32_t* list = &units_[(b * static_cast<size_t>(groups_) + static_cast<size_t>(g)) *
                            static_cast<size_t>(stride_)];
    int32_t count = 0;
    const int32_t first = (sink_end_[b] + unit_tokens_ - 1) / unit_tokens_;
    for (int32_t u = first; u < recent_begin_[b] / unit_tokens_; ++u) {
      if (Below(rng, odds) == 0) list[count++] = u;
    }
    counts_.push_back(count);
  }

  Kind kind_;
  int32_t unit_tokens_ = 0, groups_, stride_ = 0;
  std::vector<int32_t> units_, counts_, sink_end_, recent_begin_;
  DeviceArray<int32_t> d_units_, d_counts_, d_sink_end_, d_recent_begin_;
};

}  // namespace kvstrata::cuda
