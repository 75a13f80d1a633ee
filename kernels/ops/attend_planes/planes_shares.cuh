// SPDX-License-Identifier: Apache-2.0
// How the second kernel's CTAs are shared out among items: by what their samples say a group costs.
// Heads differ in what of them is fine, and sequences in how long they are.
#pragma once

#include "kernels/ops/attend_planes/group_choice.cuh"

namespace kvstrata::cuda {

// The largest score of each strip of some sampled groups, times log2(e), by query head.
template <int kHeads>
struct SampledTops {
  static constexpr int kMost = 128;  // groups
  float at[kMost][kGroupStrips][kHeads];

  // Every so many sampled groups are kept.
  __device__ static int Every(int sampled) { return max((sampled + kMost - 1) / kMost, 1); }
  __device__ static int Kept(int sampled) {
    return (sampled + Every(sampled) - 1) / Every(sampled);
  }

  // Sampled group `task`, by a warp. tops: of a lane's own tokens and heads.
  __device__ void Keep(int task, int sampled, const float (&tops)[2]) {
    const int every = Every(sampled), t = threadIdx.x % 4;
    float even = tops[0], odd = tops[1];
    for (int step = kHeads == 4 ? 2 : 4; step < 8; step *= 2) {
      even = fmaxf(even, __shfl_xor_sync(kAllLanes, even, step));
      odd = fmaxf(odd, __shfl_xor_sync(kAllLanes, odd, step));
    }
    if (task % every != 0 || threadIdx.x / 4 % 2 != 0 || 2 * t >= kHeads) return;
    float* const to = at[task / every][threadIdx.x % 32 / 8] + 2 * t;
    to[0] = even;
    to[1] = odd;
  }
};

// What a group costs a warp: some quarters of what scoring it does, by instructions. On an H200 1
// and 2, or 4 and 4, in place of the latter are no faster.
struct GroupCost {
  static constexpr int kScored = 4, kRead = 3, kFine = 3;  // fine: up to kFineTile tokens
  static constexpr int kInFull = kScored + kRead + kFine * kGroupTokens / kFineTile;

  // reference: of heads.
  template <int kHeads>
  __device__ static int Of(const float (&tops)[kGroupStrips][kHeads], const float* reference,
                           float read_from) {
    float top = -INFINITY;
    for (int strip = 0; strip < kGroupStrips; ++strip) {
      for (int head = 0; head < kHeads; ++head) {
        top = fmaxf(top, __ldcg(&tops[strip][head]) - reference[head]);
      }
    }
    return kScored + (top >= read_from ? kRead : 0) + (top >= kFineFrom ? kFine : 0);
  }
};

// A CTA's place in a grid that items share.
struct CtaShare {
  int item;
  int cta, ctas;  // its number among those of the item
  int first;      // the grid's number of the item's first

  // By a whole warp. costs: [items], at least 1 each. The largest work of a CTA is the least of 32
  // that are tried.
  __device__ static CtaShare Of(const float* costs, int items) {
    const int total = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    if (total <= items) return {cta, 0, 1, cta};
    const int lane = threadIdx.x % 32;
    const float first = lane < items ? __ldcg(costs + lane) : 0;  // all there are of most grids
    float sum = first;
    for (int i = lane + 32; i < items; i += 32) sum += __ldcg(costs + i);
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    const float times = 1 + static_cast<float>(lane * lane) / 256;
    const float tried = lane == 31 ? 0 : static_cast<float>(total) / (sum * times);
    int needed = 0;
    for (int begin = 0; begin < items; begin += 32) {
      const float cost = CostOf(costs, items, begin, first);
      for (int i = 0; i < min(items - begin, 32); ++i) {
        needed += CtasOf(__shfl_sync(kAllLanes, cost, i), tried);
      }
    }
    const uint32_t enough = __ballot_sync(kAllLanes, needed <= total);
    return Find(costs, items, first, __shfl_sync(kAllLanes, tried, __ffs(enough) - 1));
  }

 private:
  // each: CTAs over work.
  __device__ static int CtasOf(float cost, float each) {
    return max(static_cast<int>(ceilf(cost * each)), 1);
  }

  // The lane's of 32 items from `begin` on. first: of those from 0 on.
  __device__ static float CostOf(const float* costs, int items, int begin, float first) {
    const int item = begin + threadIdx.x % 32;
    if (begin == 0) return first;
    return item < items ? __ldcg(costs + item) : 0;
  }

  // What is left over goes to the last item. Results of reductions are known to be a warp's, which
  // a shuffle's are not: addresses that are made of them need no registers of their own.
  __device__ static CtaShare Find(const float* costs, int items, float of_first, float each) {
    const int lane = threadIdx.x % 32, cta = static_cast<int>(blockIdx.x);
    int before = 0;
    CtaShare share{};
    for (int first = 0; first < items; first += 32) {
      const float cost = CostOf(costs, items, first, of_first);
      const int own = first + lane < items ? CtasOf(cost, each) : 0;
      int upto = own;
      for (int step = 1; step < 32; step *= 2) {
        const int more = __shfl_up_sync(kAllLanes, upto, step);
        if (lane >= step) upto += more;
      }
      const int begin = before + upto - own;
      const bool is_last = first + lane == items - 1;
      const int end = is_last ? static_cast<int>(gridDim.x) : begin + own;
      if (cta >= begin && cta < end) share = {first + lane, cta - begin, end - begin, begin};
      before += __shfl_sync(kAllLanes, upto, 31);
    }
    return {__reduce_max_sync(kAllLanes, share.item), __reduce_max_sync(kAllLanes, share.cta),
            __reduce_max_sync(kAllLanes, share.ctas), __reduce_max_sync(kAllLanes, share.first)};
  }
};

}  // namespace kvstrata::cuda
