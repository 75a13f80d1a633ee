// SPDX-License-Identifier: Apache-2.0
// Which blocks of 64 candidates of quantised keys a warp reads, and in which order.
#pragma once

#include <cstdint>

#include "kernels/ops/quantise_keys/device_groups.h"
#include "kernels/ops/vote/vote_weights.cuh"

namespace kvstrata::cuda {

inline constexpr int kTileTokens = 32;
inline constexpr int kBlockTiles = kBlockRows / kTileTokens;

// How warps take turns. A turn is a whole group, or two where a group is no multiple of a block.
struct Turns {
  int32_t group_tokens = 0, groups = 0;
  uint32_t block_inverse = 0;  // 2^31 / groups of an index block, rounded up

  static Turns Of(const DeviceGroups& groups) {
    const auto n = static_cast<uint32_t>(groups.block_groups);
    return {groups.format.tokens, groups.format.tokens % kBlockRows == 0 ? 1 : 2,
            (0x80000000u + n - 1) / n};
  }
  // The index block of a group. REQUIRES: (group + 1) * groups of a block < 2^31.
  __device__ int BlockOf(int group) const {
    return static_cast<int>(__umulhi(2 * static_cast<uint32_t>(group), block_inverse));
  }
};

// Which turns there are: all of them from `first` on, or one of each `every` (a power of two).
struct AllTurns {
  int first;
  __device__ int operator()(int i) const { return first + i; }
};
struct SomeTurns {
  int first, every;
  __device__ int operator()(int i) const {
    const uint32_t place = static_cast<uint32_t>(i) * 2654435761u >> 16;  // not at a fixed distance
    return first + i * every + static_cast<int>(place & static_cast<uint32_t>(every - 1));
  }
};

// The blocks of a warp, in order: of every `step`-th turn from number `turn` on. A tile is fresh if
// it is the first of its group in a turn. kWhole: groups are of whole blocks.
template <typename TurnAt = AllTurns, bool kWhole = false>
class BlockWalk {
 public:
  // Over the tokens [begin, end), whole blocks.
  __device__ BlockWalk(const Turns& turns, TurnAt turn_at, int turn, int step, int begin, int end)
      : turns_(turns), turn_at_(turn_at), begin_(begin), end_(end), turn_(turn), step_(step) {
    Enter();
  }
  // Warps take turns over all CTAs: what is read at one time lies side by side.
  __device__ BlockWalk(const Turns& turns, TurnAt turn_at, int begin, int end)
      : BlockWalk(turns, turn_at, static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32),
                  static_cast<int>(gridDim.x) * kWarps, begin, end) {}

  __device__ bool done() const { return token_ >= end_; }
  __device__ int token() const { return token_; }  // the block's first
  __device__ int group() const { return group_; }  // group of the first tile
  __device__ int in_group() const { return in_group_; }
  __device__ bool first_fresh() const { return fresh_; }
  __device__ bool second_fresh() const {
    return !kWhole && in_group_ + kTileTokens == turns_.group_tokens;
  }

  __device__ void Next() {
    token_ += kBlockRows;
    if (token_ == turn_end_) {
      turn_ += step_;
      return Enter();
    }
    in_group_ += kBlockRows;
    if constexpr (kWhole) {
      fresh_ = false;
      return;
    }
    fresh_ = in_group_ == turns_.group_tokens;
    if (in_group_ >= turns_.group_tokens) NextGroup();
  }

 private:
  __device__ void Enter() {
    const int groups = kWhole ? 1 : turns_.groups;
    const int tokens = turns_.group_tokens * groups, turn = turn_at_(turn_);
    const int first = turn * tokens;
    token_ = max(first, begin_);
    turn_end_ = min(first + tokens, end_);
    group_ = turn * groups;
    in_group_ = token_ - first;
    if (!kWhole && in_group_ >= turns_.group_tokens) NextGroup();
    fresh_ = true;
  }
  __device__ void NextGroup() {
    in_group_ -= turns_.group_tokens;
    ++group_;
  }

  const Turns& turns_;
  const TurnAt turn_at_;
  const int begin_, end_;
  int turn_;
  const int step_;
  int token_ = 0, turn_end_ = 0, group_ = 0, in_group_ = 0;
  bool fresh_ = true;
};

}  // namespace kvstrata::cuda
