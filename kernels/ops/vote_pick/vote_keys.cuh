// A CTA's part of the votes of a list that may be chosen, as keys for ListPicker (list_picker.cuh):
// summed from weights, and kept in shared memory where they fit.
#ifndef KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_KEYS_CUH_
#define KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_KEYS_CUH_

#include <cstdint>

#include "kernels/cuda/score_keys.cuh"
#include "kernels/cuda/warp_sums.cuh"
#include "kernels/ops/pick/picker_memory.cuh"
#include "kernels/ops/vote/vote_sums.cuh"

namespace kvstrata::cuda {

// What the second kernel leaves of a call's votes.
struct Tally {
  int32_t* histogram = nullptr;  // [batch][kv_heads][kBins]
  float2* totals = nullptr;      // [batch][query_heads], as HeadTotals has them
  uint32_t* best = nullptr;      // [batch][kv_heads][blocks], the largest key of each block
};

// Bins of votes, which are never negative: 16 an octave, from 2^-124 on; what is less is in bin 0.
__device__ inline int BinOf(uint32_t key) {
  const int bin = static_cast<int>((key & 0x7FFFFFFFu) >> 19) - 48;
  return key < 0x80000000u ? 0 : min(max(bin, 0), kBins - 1);
}
// The least key of a bin.
__device__ inline uint32_t LeastOf(int bin) {
  return bin == 0 ? kAbsent : 0x80000000u | static_cast<uint32_t>(bin + 48) << 19;
}

inline constexpr int kHeadsOfList = 8;         // query heads of a KV head, at most
inline constexpr int kVoteKeysOfWarp = 512;    // that it keeps
inline constexpr int kVoteBlocksOfCta = 2048;  // that it has a list of

// One list of a call.
struct VoteList {
  const uint2* weights;    // of its first query head in slot 0
  const float* block_max;  // the same
  const uint32_t* best;    // of slot 0
  int heads, query_heads;
  Candidates units;
  int first_block, blocks;
};

struct VoteKeysMemory {
  uint32_t keys[kPickWarpsMax][kVoteKeysOfWarp];
  int32_t units[kPickWarpsMax][kVoteKeysOfWarp];
  VoteList list;
  float2 totals[kHeadsOfList];  // of its heads, as HeadTotals has them
  int32_t warp_counts[kPickWarpsMax];
  int32_t blocks[kVoteBlocksOfCta];
};

class VoteKeys {
 public:
  // Those of CTA `cta` of `ctas` that are at least `low`. By all threads; list and totals are in
  // `m`, and a barrier since.
  __device__ VoteKeys(uint32_t low, int cta, int ctas, VoteKeysMemory& m) : low_(low), m_(m) {
    const int blocks = m.list.blocks, each = (blocks + ctas - 1) / ctas;
    first_ = min(cta * each, blocks);
    FindBlocks(min(each, blocks - first_));
    Stage();
  }

  // The token of key i.
  __device__ int32_t UnitAt(int i) const { return staged_ ? m_.units[Warp()][i] : i; }

  // As of ListKeys.
  template <typename Visit>
  __device__ void ForEachVector(Visit visit) const {
    if (!staged_) return ForEachSummed(visit);
    for (int base = 0; base < count_; base += 128) {
      const int i = base + 4 * Lane();
      uint4 v = {kAbsent, kAbsent, kAbsent, kAbsent};
      if (i < count_) v = *reinterpret_cast<const uint4*>(&m_.keys[Warp()][i]);
      const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
      visit(i, keys);
    }
  }
  template <typename Visit>
  __device__ void StageEach(Visit visit) {
    ForEachVector(visit);
  }

 private:
  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int Warps() { return static_cast<int>(blockDim.x) / 32; }

  // Of the CTA's `blocks` blocks, those that have a key of at least `low`, in order, in m_.blocks;
  // all of them, without a list, where it has no room. Each warp gets a run of them.
  __device__ void FindBlocks(int blocks) {
    const int each = (blocks + 32 * Warps() - 1) / (32 * Warps()) * 32;
    const int begin = min(Warp() * each, blocks), end = min(begin + each, blocks);
    const auto found = [&](int base) {
      const int i = base + Lane();
      return __ballot_sync(~0u, i < end && m_.list.best[first_ + i] >= low_);
    };
    int count = 0;
    for (int base = begin; base < end; base += 32) count += __popc(found(base));
    if (Lane() == 0) m_.warp_counts[Warp()] = count;
    __syncthreads();
    const int32_t of_warp = Lane() < Warps() ? m_.warp_counts[Lane()] : 0;
    int32_t all = __reduce_add_sync(~0u, of_warp);
    listed_ = all <= kVoteBlocksOfCta;
    if (!listed_) all = blocks;
    int at = __reduce_add_sync(~0u, Lane() < Warp() ? of_warp : 0);
    for (int base = begin; base < end && listed_; base += 32) {
      const uint32_t mask = found(base);
      if ((mask >> Lane() & 1) != 0) {
        m_.blocks[at + __popc(mask & ((1u << Lane()) - 1))] = base + Lane();
      }
      at += __popc(mask);
    }
    __syncthreads();
    const int run = (all + 2 * Warps() - 1) / (2 * Warps()) * 2;
    begin_ = min(Warp() * run, all);
    end_ = min(begin_ + run, all);
  }

  // visit(token, keys) for the four candidates of each lane in two blocks at a time.
  template <typename Visit>
  __device__ void ForEachSummed(Visit visit) const {
    for (int base = begin_; base < end_; base += 2) {
      const int at = base + Lane() / 16;
      const int slot = at >= end_ ? -1 : first_ + (listed_ ? m_.blocks[at] : at);
      const uint4 v = KeysOf(m_, slot);
      const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
      visit((m_.list.first_block + slot) * kBlockRows + 4 * (Lane() % 16), keys);
    }
  }

  // This lane's row of a block; all absent where slot is -1. Called, as it has many places.
  __device__ __noinline__ static uint4 KeysOf(const VoteKeysMemory& m, int slot) {
    uint32_t keys[4] = {kAbsent, kAbsent, kAbsent, kAbsent};
    if (slot < 0) return {kAbsent, kAbsent, kAbsent, kAbsent};
    const VoteList& list = m.list;
    const int row = Lane() % 16, token = (list.first_block + slot) * kBlockRows + 4 * row;
    const int64_t cell = int64_t{slot} * list.query_heads;
    const RowVotes votes = SumHeads<kHeadsOfList>(list.weights + cell * (kBlockRows / 4) + row,
                                                  list.block_max + cell, m.totals, list.heads);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool counts = token + j >= list.units.first && token + j < list.units.last;
      if (counts) keys[j] = cuda::KeyOf(votes.at[j]);
    }
    return {keys[0], keys[1], keys[2], keys[3]};
  }

  // Keeps the keys of this warp's blocks that are at least `low`, or none where they do not fit.
  __device__ void Stage() {
    ForEachSummed([&](int token, const uint32_t(&keys)[4]) {
      int count = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) count += keys[j] >= low_ && keys[j] != kAbsent;
      const int inclusive = WarpInclusiveSum(count), all = __shfl_sync(~0u, inclusive, 31);
      staged_ = staged_ && count_ + all <= kVoteKeysOfWarp;
      if (!staged_) return;
      int at = count_ + inclusive - count;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (keys[j] < low_ || keys[j] == kAbsent) continue;
        m_.keys[Warp()][at] = keys[j];
        m_.units[Warp()][at++] = token + j;
      }
      count_ += all;
    });
    // A vector's absent keys.
    if (staged_ && Lane() < 3 && count_ + Lane() < kVoteKeysOfWarp) {
      m_.keys[Warp()][count_ + Lane()] = kAbsent;
    }
    __syncwarp();
  }

  const uint32_t low_;
  VoteKeysMemory& m_;
  int first_, begin_ = 0, end_ = 0;  // the CTA's first block; the warp's run
  int count_ = 0;                    // keys that are kept
  bool listed_ = true, staged_ = true;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_KEYS_CUH_
