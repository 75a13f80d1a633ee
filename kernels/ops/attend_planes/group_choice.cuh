// SPDX-License-Identifier: Apache-2.0
// What of a scored group is fine and read (docs/spec/planes.md, "A step", rules 4 and 5), by a
// warp.
//
// Logits are relative: 2^6 is the weight from which on a token is fine. So coarse weights are below
// 64, and with any step of values (at most 514) fit fp16.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_GROUP_CHOICE_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_GROUP_CHOICE_CUH_

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/ops/attend_planes/coarse_values.cuh"
#include "kernels/ops/attend_planes/planes_normaliser.cuh"

namespace kvstrata::cuda {

inline constexpr float kFineFrom = 6;  // log2 of a relative weight

// What all groups of an item have in common, for one lane.
struct ItemRule {
  PlanesLengths lengths;
  LaneFactors factors;
  float of_logit[2];   // 1 / factors.code
  float reference[2];  // what logits, times log2(e), are relative to, of the lane's heads
  float read_from;     // log2 of the relative weight from which on a strip is read
  FineForm form;
};

// Report of one (sequence, KV head).
struct ItemReport {
  uint8_t *fine, *strips;  // null: not wanted

  __device__ static ItemReport Of(const PlanesReport& report, int64_t item) {
    return {
        report.fine == nullptr ? nullptr : report.fine + item * report.stride,
        report.strips == nullptr ? nullptr : report.strips + item * (report.stride / kStripTokens)};
  }
  // chosen: the lane's tokens (TokenOf).
  __device__ void Write(int group, uint32_t chosen, uint32_t strips_read) const {
    const int lane = threadIdx.x % 32;
    const auto flags = [](uint32_t bits) {
      return (bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21;
    };
    if (fine != nullptr && lane % 4 == 0) {
      auto* const to = reinterpret_cast<uint32_t*>(fine + int64_t{group} * kGroupTokens);
      to[TokenOf(lane, 0) / 4] = flags(chosen);
      to[TokenOf(lane, 4) / 4] = flags(chosen >> 4);
    }
    if (strips != nullptr && lane == 0) {
      reinterpret_cast<uint32_t*>(strips)[group] = flags(strips_read);
    }
  }
};

// A bit for each of the lane's tokens that is no candidate.
__device__ __forceinline__ uint32_t AlwaysOf(const PlanesLengths& lengths, int group) {
  const int first = group * kGroupTokens;
  uint32_t always = 0;
  if (first >= lengths.start && first + kGroupTokens <= lengths.stop) return 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = first + TokenOf(threadIdx.x % 32, i);
    if (!lengths.IsCandidate(token)) always |= 1u << i;
  }
  return always;
}

// A bit for each whose coarse sum is at least `from`, of any head.
__device__ __forceinline__ uint32_t AboveOf(const float (&from)[2], const GroupSums& sums) {
  uint32_t above = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool is_above = (sums.Of(i, 0) >= from[0]) | (sums.Of(i, 1) >= from[1]);
    above |= is_above ? 1u << i : 0;
  }
  above |= __shfl_xor_sync(kAllLanes, above, 1);
  return above | __shfl_xor_sync(kAllLanes, above, 2);
}

// A bit for each strip that has a lane of its keys in `lanes`.
__device__ __forceinline__ uint32_t StripsOf(uint32_t lanes) {
  return ((lanes & 0xFF) != 0 ? 1 : 0) | ((lanes & 0xFF00) != 0 ? 2 : 0) |
         ((lanes & 0xFF0000) != 0 ? 4 : 0) | ((lanes & 0xFF000000) != 0 ? 8 : 0);
}

// Rules 4 and 5: which candidates of the group are fine, and (returned) which strips are read.
// Without candidates: all of it is. base: of coarse logits.
__device__ __forceinline__ uint32_t Choose(const ItemRule& rule, bool is_full, uint32_t always,
                                           const GroupSums& sums, float (&base)[2],
                                           uint32_t& chosen) {
  float from[2];
  bool is_read = false, has_fine = false;
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    base[head] = sums.Base(rule.factors, head, kCoarseCentre) - rule.reference[head];
    from[head] = (kFineFrom - base[head]) * rule.of_logit[head];
    float top = sums.Of(0, head);
#pragma unroll
    for (int i = 1; i < 8; ++i) top = fmaxf(top, sums.Of(i, head));
    is_read |= !(fmaf(top, rule.factors.code[head], base[head]) < rule.read_from);
    has_fine |= top >= from[head];
  }
  chosen = is_full ? always : 0;
  if (__any_sync(kAllLanes, has_fine) && !is_full) {
    chosen = AboveOf(from, sums) & ~always;
  }
  return StripsOf(__ballot_sync(kAllLanes, is_read || (chosen | always) != 0));
}

// Coarse weights of the group, 0 of tokens that are `fine` and where strips are left out.
__device__ __forceinline__ StripWeights Weigh(const LaneFactors& factors, const float (&base)[2],
                                              uint32_t fine, uint32_t strips,
                                              const GroupSums& sums) {
  const bool is_read = strips >> (threadIdx.x % 32 / 8) & 1;
  const float even = is_read ? base[0] : -INFINITY, odd = is_read ? base[1] : -INFINITY;
  uint32_t weights[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = Element<__half>::Pack(Exp2(fmaf(sums.Of(i, 0), factors.code[0], even)),
                                                Exp2(fmaf(sums.Of(i, 1), factors.code[1], odd)));
    weights[i / 4][i % 4] = (fine >> i & 1) != 0 ? 0 : pair;
  }
  return StripWeights::Of(weights);
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_GROUP_CHOICE_CUH_
