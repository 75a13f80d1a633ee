// SPDX-License-Identifier: Apache-2.0
// Blocks of 64 candidates, two tiles of 32 tokens (bits_tile.cuh), scored by whole warps. Tiles
// come through a ring in shared memory, several ahead. What a lane copies of the codes it alone
// reads; the scales of a group are the whole warp's.
#pragma once

#include <cstdint>

#include "kernels/ops/score_bits/bits_query.cuh"
#include "kernels/ops/vote/block_walk.cuh"

namespace kvstrata::cuda {

// What a ring holds of a block: its first token, and of which tiles there are scales.
struct BlockNote {
  int32_t token = 0;
  bool first_fresh = false, second_fresh = false;
};

template <int kDim, int kBits>
struct BitsRing {
  static constexpr int kPieces = BitsTile<kDim, kBits>::kPieces;
  static constexpr int kStages = kPieces <= 1 ? 4 : kPieces <= 4 ? 3 : 2;
  static constexpr int kScales = kDim / 4;  // 16-byte pieces of minima and steps
  uint4 codes[kStages][kBlockTiles][kPieces][32];
  uint4 scales[kStages][kBlockTiles][kScales];
  BlockNote notes[kStages];
};

// Copies a warp's blocks into its ring, several ahead of what is scored.
template <int kDim, int kBits, typename TurnAt = AllTurns, bool kWhole = false>
class BlockCopier {
 public:
  using Ring = BitsRing<kDim, kBits>;
  using Tile = BitsTile<kDim, kBits>;

  // Tiles from token `last` on are not read, where they are of another group than the tile before.
  __device__ BlockCopier(const DeviceGroups& groups, const GroupOffsets& f, const Turns& turns,
                         int64_t sequence, int head, const BlockWalk<TurnAt, kWhole>& walk,
                         int last, Ring* ring)
      : groups_(groups),
        f_(f),
        turns_(turns),
        blocks_(groups.blocks + sequence * groups.block_stride),
        head_offset_(groups.offset + head * groups.head_stride),
        last_(last),
        ring_(ring),
        walk_(walk) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once_));
    AskForIndexBlock();
  }

  // Starts the copy of the next block; of nothing after the last, but as a group of copies. The
  // note of the block that is not there has a token beyond all.
  __device__ void Issue(int stage) {
    BlockNote note{walk_.token(), walk_.first_fresh(), false};
    if (!walk_.done()) {
      if (note.first_fresh) {
        group_at_ = AddressOf(walk_.group(), index_block_at_);
        CopyScales(stage, 0);
      }
      const char* const from = group_at_ + walk_.in_group() * (Tile::kTileStride / kTileTokens);
      if (walk_.second_fresh()) {
        CopyTile(stage, 0, from);
        note.second_fresh = note.token + kTileTokens < last_;
        if (note.second_fresh) {
          const int group = walk_.group() + 1;
          group_at_ = AddressOf(group, blocks_[turns_.BlockOf(group)]);
          CopyScales(stage, 1);
          CopyTile(stage, 1, group_at_);
        }
      } else {
        CopyTile(stage, 0, from);
        CopyTile(stage, 1, from + Tile::kTileStride);
      }
      walk_.Next();
      AskForIndexBlock();
    }
    ring_->notes[stage] = note;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  // A block ahead of the copy that needs it, which would wait for the L2 otherwise.
  __device__ void AskForIndexBlock() {
    if (!walk_.done() && walk_.first_fresh()) {
      index_block_at_ = blocks_[turns_.BlockOf(walk_.group())];
    }
  }

  __device__ const char* AddressOf(int group, uint64_t index_block) const {
    const int first = turns_.BlockOf(group) * groups_.block_groups;
    return reinterpret_cast<const char*>(index_block) + head_offset_ + (group - first) * f_.bytes;
  }

  __device__ void CopyScales(int stage, int tile) const {
#pragma unroll
    for (int i = threadIdx.x % 32; i < Ring::kScales; i += 32) {
      Copy(&ring_->scales[stage][tile][i], group_at_ + 16 * i);
    }
  }

  // from: the group, moved to the tile's tokens.
  __device__ void CopyTile(int stage, int tile, const char* from) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Ring::kPieces; ++i) {
      constexpr int kWords = Tile::Shape::kWords;
      const int plane = i < kWords ? Tile::LowAt(f_, lane) : Tile::HighAt(f_, lane);
      Copy(&ring_->codes[stage][tile][i][lane], from + (plane + i % kWords * Tile::WordStride(f_)));
    }
  }

  // The L2 drops these bytes before what else is in it.
  __device__ void Copy(uint4* to, const char* from) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "l"(once_)
                 : "memory");
  }

  const DeviceGroups& groups_;
  const GroupOffsets& f_;
  const Turns& turns_;
  const uint64_t* blocks_;
  const int64_t head_offset_;
  const int last_;
  Ring* ring_;
  uint64_t once_;
  BlockWalk<TurnAt, kWhole> walk_;
  uint64_t index_block_at_ = 0;  // address of the block that has the walk's group
  const char* group_at_ = nullptr;
};

// The logits of block after block, before their factor. By whole warps. kWhole: without what all
// tokens of the block have of a sum (base), so that products with codes need not wait for it.
template <int kDim, int kBits, typename TurnAt = AllTurns, bool kWhole = false>
class BlockScorer {
 public:
  using Ring = BitsRing<kDim, kBits>;

  // Loads begin here; the ring is the warp's own.
  __device__ BlockScorer(const GroupOffsets& f, Ring* ring,
                         BlockCopier<kDim, kBits, TurnAt, kWhole>* copier)
      : f_(f), ring_(ring), copier_(copier) {
#pragma unroll
    for (int stage = 0; stage < Ring::kStages; ++stage) copier_->Issue(stage);
  }

  // The next block: c[tile][i] of the tile's tokens 4g + 2i (c0, c1) and 4g + 2i + 1 (c2, c3). Of a
  // tile that was not read they are anything. Returns the first token; `end` or more: there is
  // none.
  __device__ int Next(const LaneQueryPairs<kDim, kBits>& query, int group, int end,
                      float (&c)[kBlockTiles][2][4]) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Ring::kStages - 1) : "memory");
    __syncwarp();
    const BlockNote note = ring_->notes[stage_];
    if (note.token >= end) return note.token;
    if constexpr (kWhole) {
      ScoreWhole(note.first_fresh, query, group, c);
    } else {
      if (note.first_fresh) FoldTile(0, query, group);
      Multiply(0, c[0]);
      if (note.second_fresh) FoldTile(1, query, group);
      Multiply(1, c[1]);
      CopyNext();
    }
    return note.token;
  }

  // What is to be added to c of the last block behind JoinColumns, with kWhole.
  template <bool kWide>
  __device__ void JoinBase(float (&base)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = base_[i];
      if constexpr (!kWide) base[i] += __shfl_xor_sync(~0u, base[i], 2);
    }
  }

 private:
  __device__ void FoldTile(int tile, const LaneQueryPairs<kDim, kBits>& query, int group) {
    Fold(reinterpret_cast<const char*>(ring_->scales[stage_][tile]), f_, query, group, folded_,
         base_);
  }

  // The warp has read the stage: the block after those under way is copied there.
  __device__ void CopyNext() {
    __syncwarp();
    copier_->Issue(stage_);
    stage_ = stage_ + 1 == Ring::kStages ? 0 : stage_ + 1;
  }

  // Both tiles share their folded query, so all words are loaded at once, their stage is copied to
  // before they are multiplied, and four chains of products hide each other's latency.
  __device__ void ScoreWhole(bool fresh, const LaneQueryPairs<kDim, kBits>& query, int group,
                             float (&c)[kBlockTiles][2][4]) {
    if (fresh) FoldTile(0, query, group);
    BitsTile<kDim, kBits> words[kBlockTiles];
#pragma unroll
    for (int tile = 0; tile < kBlockTiles; ++tile) Take(tile, words[tile]);
    CopyNext();
#pragma unroll
    for (int i = 0; i < 8 * kBlockTiles; ++i) c[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (int u = 0; u < BitsTile<kDim, kBits>::Shape::kWords; ++u) {
#pragma unroll
      for (int tile = 0; tile < kBlockTiles; ++tile) words[tile].MultiplyWord(u, folded_, c[tile]);
    }
  }

  __device__ void Take(int tile, BitsTile<kDim, kBits>& words) const {
    const int lane = threadIdx.x % 32;
    words.Take(lane, [&](int i) { return ring_->codes[stage_][tile][i][lane]; });
  }

  __device__ void Multiply(int tile, float (&c)[2][4]) const {
    BitsTile<kDim, kBits> words;
    Take(tile, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = base_[i % 2];
    words.Multiply(folded_, c);
  }

  const GroupOffsets& f_;
  Ring* ring_;
  BlockCopier<kDim, kBits, TurnAt, kWhole>* copier_;
  int stage_ = 0;
  LanePairs<kDim, kBits> folded_ = {};
  float base_[2] = {};
};

// The logits of a block's tiles that lie outside [first, last) become -inf.
__device__ inline void Mask(float (&c)[kBlockTiles][2][4], int token, Candidates units) {
#pragma unroll
  for (int i = 0; i < kBlockTiles * 4; ++i) {
    const int at = token + i / 4 * kTileTokens + static_cast<int>(threadIdx.x) % 32 / 4 * 4 + i % 4;
    if (at >= units.first && at < units.last) continue;
    c[i / 4][i % 4 / 2][2 * (i % 2)] = c[i / 4][i % 4 / 2][2 * (i % 2) + 1] = -INFINITY;
  }
}

// In groups up to 4, lanes t and t + 2 hold a query and what is left of it: lanes t < 2 get the
// sums of the first tile in c[0], lanes t >= 2 those of the second.
__device__ inline void JoinColumns(float (&c)[kBlockTiles][2][4]) {
  const bool second = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float &a = c[0][i / 4][i % 4], &b = c[1][i / 4][i % 4];
    const float other = __shfl_xor_sync(~0u, second ? a : b, 2);
    a = (second ? b : a) + other;
  }
}

}  // namespace kvstrata::cuda
