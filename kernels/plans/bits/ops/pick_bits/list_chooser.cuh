// SPDX-License-Identifier: Apache-2.0
// A list's choice among the tokens that were kept of it, by a cluster: each CTA has the segments of
// an eighth of the list, so tokens that follow each other, and writes what of them is chosen.
#pragma once

#include "kernels/plans/bits/ops/pick_bits/kept_quads.cuh"

namespace kvstrata::cuda {

// Every thread of every CTA of the cluster calls every function.
class ListChooser {
 public:
  __device__ ListChooser(const Kept& kept, const Aim& aim, int list, int group, Candidates units,
                         ChooserMemory& s)
      : kept_(kept),
        aim_(aim),
        list_(list),
        group_(group),
        cta_(blockIdx.x),
        units_(units),
        quads_(kept, list, units, s),
        s_(s) {}

  // Needs nothing that the kernels before have kept.
  __device__ void ClearMarks() {
    const int end = MarkAt(WordsOfCta());
    for (int i = threadIdx.x; i < end; i += blockDim.x) s_.marks[i] = 0;
  }

  // Sums of heads, and where segments end. Barrier at the end. REQUIRES: ClearMarks.
  __device__ void Begin() {
    if (threadIdx.x < 32) quads_.FindEnds();
    SumHead(threadIdx.x / 32);
    __syncthreads();
  }

  // The largest factor by which a vote by the estimates is too small.
  __device__ float MostRatio() const { return Fold(s_.exact_of_estimate, 0, true); }
  __device__ float LeastRatio() const { return Fold(s_.exact_of_estimate, INFINITY, false); }
  __device__ bool AnyHuge() const {
    bool any = false;
    for (int h = 0; h < group_; ++h) any |= s_.huge[h];
    return any;
  }
  __device__ float log_sum(int head) const { return s_.log_sum[head]; }

  // Stages the tokens with a vote of at least `floor`; returns how many the list has.
  __device__ int32_t Collect(float floor) {
    floor_ = floor;
    range_ = {};
    ClusterBins& bins = NextBins();
    if (threadIdx.x == 0) s_.count = 0;
    bins.Clear();
    quads_.Visit<kQuadsAtOnce>(floor_, [&](uint32_t counts, const Place(&places)[4]) {
      const uint32_t before = (1u << threadIdx.x % 32) - 1;
      int32_t at = 0, all = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t reach = __ballot_sync(~0u, (counts >> i & 1) != 0);
        at += __popc(reach & before), all += __popc(reach);
      }
      if (all == 0) return;
      int32_t first = 0;
      if (threadIdx.x % 32 == 0) first = atomicAdd(&s_.count, all);
      at += __shfl_sync(~0u, first, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((counts >> i & 1) == 0) continue;
        bins.Count(range_.DigitOf(places[i] - Floor()));
        if (at < kStaged) s_.staged[at] = places[i];
        ++at;
      }
    });
    __syncthreads();
    count_ = s_.count;
    return bins.Share();
  }

  // The take-th largest place. REQUIRES: Collect gave at least take > 0.
  __device__ Place FindLast(int32_t take) {
    if (threadIdx.x == 0) s_.told = {0, 0};  // all have read the one before: bins were shared since
    Digit digit = bins_->Find(take);
    int32_t need = take - digit.above;
    range_ = range_.Narrowed(digit.digit);
    while (digit.population > kRanked) {
      ClusterBins& bins = NextBins();
      bins.Clear();
      ForEach([&](Place place) {
        const Place x = place - Floor();
        if (range_.Holds(x)) bins.Count(range_.DigitOf(x));
      });
      bins.Share();
      digit = bins.Find(need);
      need -= digit.above;
      range_ = range_.Narrowed(digit.digit);
    }
    return RankAmong(need);
  }

  // Writes all tokens down to `last`, in order; once. REQUIRES: FindLast.
  __device__ void Write(Place last, int32_t* out) {
    const int words = WordsOfCta(), first = FirstOfCta();
    ForEach([&](Place place) {
      const int at = TokenOf(place) - first;
      if (place >= last) atomicOr(&s_.marks[MarkAt(at / 32)], 1u << at % 32);
    });
    __syncthreads();
    const int each = (words + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    const int begin = min(static_cast<int>(threadIdx.x) * each, words);
    const int end = min(begin + each, words);
    int32_t own = 0;
    for (int i = begin; i < end; ++i) own += __popc(s_.marks[MarkAt(i)]);
    int32_t at = ExclusiveSum(own);
    for (int j = 0; j < cta_; ++j) at += s_.taken[j];
    for (int i = begin; i < end; ++i) {
      for (uint32_t marks = s_.marks[MarkAt(i)]; marks != 0; marks &= marks - 1) {
        out[at++] = first + 32 * i + __ffs(marks) - 1;
      }
    }
  }

 private:
  static constexpr int kQuadsAtOnce = 4;

  // The CTA's tokens, chosen or not: from the first one of its first segment's turns.
  __device__ int WordsOfCta() const {
    return kept_.splits * TurnRuns::Of(kept_, units_).turns * kept_.turn_tokens / 32;
  }
  __device__ int FirstOfCta() const {
    return TurnRuns::Of(kept_, units_).first_turn * kept_.turn_tokens + cta_ * 32 * WordsOfCta();
  }

  // By a whole warp.
  __device__ void SumHead(int head) {
    const int lane = threadIdx.x % 32;
    const float estimate = aim_.log_sum[head], scale = aim_.scale;
    const HeadPart* const parts = kept_.parts + int64_t{list_} * kept_.splits * 8 + head;
    float sum = 0, huge = -INFINITY;
    for (int i = lane; i < kept_.splits && head < group_; i += 32) {
      const HeadPart part = parts[i * 8];
      sum += part.sum;
      huge = fmaxf(huge, part.huge);
    }
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      huge = fmaxf(huge, __shfl_xor_sync(~0u, huge, step));
    }
    if (lane != 0) return;
    const bool there = head < group_ && sum > 0;
    // Estimated sum / exact sum.
    const float ratio = there ? fmaxf(1 / sum, 0x1p-100f) : 0.0f;
    s_.exact_of_estimate[head] = ratio;
    s_.weights[head] = ratio / scale;
    s_.huge[head] = huge > -INFINITY;
    s_.log_sum[head] = s_.huge[head] ? estimate + huge : there ? estimate + log2f(sum) : INFINITY;
  }

  __device__ float Fold(const float* of_heads, float x, bool largest) const {
    for (int h = 0; h < group_; ++h) x = largest ? fmaxf(x, of_heads[h]) : fminf(x, of_heads[h]);
    return x;
  }

  __device__ Place Floor() const { return uint64_t{__float_as_uint(floor_)} << 32; }
  __device__ ClusterBins& NextBins() {
    bins_ = bins_ == &s_.bins[0] ? &s_.bins[1] : &s_.bins[0];
    return *bins_;
  }

  // The need-th largest place of the range, by a look at all that it holds; how many each CTA
  // takes.
  __device__ Place RankAmong(int32_t need) {
    int32_t own_above = 0;
    ForEach([&](Place place) {
      const Place x = place - Floor();
      if (range_.Holds(x)) {
        s_.ranked[atomicAdd(&s_.told.y, 1)] = place;
      } else if (x >= range_.low) {
        ++own_above;
      }
    });
    own_above = __reduce_add_sync(~0u, own_above);
    if (threadIdx.x % 32 == 0) atomicAdd(&s_.told.x, own_above);
    MeetCluster();
    static_assert(kWarps == kClusterCtas);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // warp j reads what CTA j has
    const int2 told = LoadFromCta(&s_.told, lane % kClusterCtas);
    const int32_t inclusive = WarpInclusiveSum(lane < kClusterCtas ? told.y : 0);
    const int32_t end = __shfl_sync(~0u, inclusive, warp), n = __shfl_sync(~0u, told.y, warp);
    const int32_t above = __shfl_sync(~0u, told.x, warp), all = __shfl_sync(~0u, inclusive, 31);
    for (int i = lane; i < n; i += 32) {
      const int2 x = LoadFromCta(reinterpret_cast<const int2*>(&s_.ranked[i]), warp);
      s_.all_ranked[end - n + i] =
          uint64_t{static_cast<uint32_t>(x.y)} << 32 | static_cast<uint32_t>(x.x);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < all) {
      const Place own = s_.all_ranked[threadIdx.x];
      int32_t larger = 0;
      for (int i = 0; i < all; ++i) larger += s_.all_ranked[i] > own ? 1 : 0;
      if (larger == need - 1) s_.last = own;
    }
    __syncthreads();
    const Place last = s_.last;
    int32_t taken = 0;
    for (int i = lane; i < n; i += 32) taken += s_.all_ranked[end - n + i] >= last ? 1 : 0;
    taken = __reduce_add_sync(~0u, taken);
    if (lane == 0) s_.taken[warp] = above + taken;  // read behind Write's barriers
    return last;
  }

  // Over the CTA.
  __device__ int32_t ExclusiveSum(int32_t x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t inclusive = WarpInclusiveSum(x);
    if (lane == 31) s_.sums[warp] = inclusive;
    __syncthreads();
    int32_t before = inclusive - x;
    for (int i = 0; i < warp; ++i) before += s_.sums[i];
    return before;
  }

  // visit(place) of what Collect found in this CTA's segments.
  template <typename Visit>
  __device__ void ForEach(Visit visit) const {
    if (count_ <= kStaged) {
      for (int i = threadIdx.x; i < count_; i += blockDim.x) visit(s_.staged[i]);
      return;
    }
    quads_.Visit<1>(floor_, [&](uint32_t counts, const Place(&places)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((counts >> i & 1) != 0) visit(places[i]);
      }
    });
  }

  const Kept& kept_;
  const Aim& aim_;
  const int list_, group_, cta_;
  const Candidates units_;
  const KeptQuads quads_;
  ChooserMemory& s_;
  ClusterBins* bins_ = nullptr;
  PlaceRange range_;
  int32_t count_ = 0;  // tokens of this CTA that Collect found
  float floor_ = 0;
};

// Where a list's choice goes.
__device__ inline int32_t* ListOf(const PickBatch& pick, int list) {
  return pick.lists != nullptr ? reinterpret_cast<int32_t*>(pick.lists[list])
                               : pick.units + int64_t{list} * pick.list_stride;
}

}  // namespace kvstrata::cuda
