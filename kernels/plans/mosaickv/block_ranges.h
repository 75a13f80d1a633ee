// SPDX-License-Identifier: Apache-2.0
// Blocks of packed segments as tokens: what selector `block` over codec `packed` chooses from, on
// the CPU (block.cc) and on a GPU (kernels/plans/mosaickv/gpu/cuda_packed.cc).
//
// Threads: immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "kernels/plans/mosaickv/packed.h"

namespace kvstrata {

// The blocks of one (layer, KV head), numbered over all segments from 0.
class BlockRanges {
 public:
  BlockRanges(const PackedStorage& packed, int layer, int head) {
    segments_.reserve(packed.segments().size());
    for (size_t s = 0; s < packed.segments().size(); ++s) {
      const Run tokens = packed.segments()[s].tokens;
      const int32_t block = packed.head(static_cast<int>(s), layer, head).block;
      segments_.push_back({count_, block, tokens});
      largest_ = std::max(largest_, block);
      const int32_t blocks = (tokens.end - tokens.begin + block - 1) / block;
      count_ += blocks;
    }
  }

  int32_t count() const { return count_; }
  int32_t largest() const { return largest_; }  // tokens of a block at most
  int32_t first(size_t segment) const { return segments_[segment].first; }
  int32_t end(size_t segment) const {
    return segment + 1 < segments_.size() ? segments_[segment + 1].first : count_;
  }
  Run Tokens(int32_t id) const {
    const auto next = std::ranges::upper_bound(segments_, id, {}, &Segment::first);
    const Segment& s = *std::prev(next);
    const int32_t begin = s.tokens.begin + (id - s.first) * s.block;
    return {begin, std::min(begin + s.block, s.tokens.end)};
  }
  int32_t Size(int32_t id) const {
    const Run tokens = Tokens(id);
    return tokens.end - tokens.begin;
  }

 private:
  struct Segment {
    int32_t first;  // id of its first block
    int32_t block;
    Run tokens;
  };
  std::vector<Segment> segments_;
  int32_t count_ = 0, largest_ = 0;
};

}  // namespace kvstrata
