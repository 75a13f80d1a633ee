// SPDX-License-Identifier: Apache-2.0
// What a warp has attended: weighted values of strips and lower digits of fine tokens, in sums that
// weights of any size fit.
//
// Weights are fp16, relative to a logit for each head. It is raised where a fine token, or a weight
// times a step of values, would be too large; what was summed before is scaled.
#pragma once

#include "kernels/ops/attend_planes/group_choice.cuh"

namespace kvstrata::cuda {

template <int kDim, int kHeads>
class AttendedSums {
 public:
  using Memory = WarpMemory<kDim, kHeads>;

  // What weights are relative to, of the lane's heads, above the reference.
  __device__ float raised(int head) const { return raised_[head]; }

  // Before the group whose values have arrived is added.
  __device__ __forceinline__ void FitSteps(Memory& memory) {
    const float step = LargestStep(memory);
    if (__any_sync(kAllLanes, step > Exp2(kMostProduct - limit_))) LowerLimit(memory, step);
  }

  // Before coarse weights of any size are made. logits: the lane's largest of its heads, relative
  // to the reference.
  __device__ __forceinline__ void FitLogits(Memory& memory, const float (&logits)[2]) {
    float top[2] = {logits[0] - limit_, logits[1] - limit_};
    if (!__any_sync(kAllLanes, top[0] > raised_[0] || top[1] > raised_[1])) return;
    if (kHeads == 4) {  // OwnSums
      for (float& x : top) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
    }
    Raise(memory, top);
  }

  // Tokens first .. first + count - 1 of the list, at most kFineTile: their weights join those of
  // the group.
  __device__ __forceinline__ void AddFine(Memory& memory, int first, int count,
                                          const FineForm& form, const float (&logits)[2]) {
    const int g = threadIdx.x % 32 / 4;
    const bool exists = g < count;
    const bool beyond = logits[0] - raised_[0] > limit_ || logits[1] - raised_[1] > limit_;
    if (__any_sync(kAllLanes, exists && beyond)) {
      const float top[2] = {exists ? logits[0] - limit_ : -INFINITY,
                            exists ? logits[1] - limit_ : -INFINITY};
      Raise(memory, top);
    }
    uint32_t weights = 0;
    if (exists) {
      weights = Element<__half>::Pack(Exp2(logits[0] - raised_[0]), Exp2(logits[1] - raised_[1]));
      StripWeights::Put(memory, memory.fine[first + g], weights);
    }
    __syncwarp();
    fine_steps_ += values_.AddLower(memory, first, Transpose8x8(weights), form);
  }

  // The group's strips, with all weights.
  __device__ __forceinline__ void AddStrips(const Memory& memory, const uint4* ones) {
    values_.Add(memory, ones);
  }

  // To the warp's memory.
  __device__ __forceinline__ void Store(Memory& memory, const ItemRule& rule) const {
    const int lane = threadIdx.x % 32;
    float l[2], more[2], of_fine = fine_steps_;
    for (int step = 1; step < 4; step *= 2) of_fine += __shfl_xor_sync(kAllLanes, of_fine, step);
    for (int head = 0; head < 2; ++head) {
      more[head] = (rule.form.centre() - kCoarseCentre) *
                   __shfl_sync(kAllLanes, of_fine, 4 * (2 * (lane % 4) + head));
    }
    values_.Store(memory.o, kCoarseCentre, more, l);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      if (lane >= kHeads / 2) continue;
      memory.m[2 * lane + head] = l[head] == 0 ? -INFINITY : rule.reference[head] + raised_[head];
      memory.l[2 * lane + head] = l[head];
    }
  }

 private:
  static constexpr float kMostProduct = 15;  // log2 of a weight times a step
  // So much more than a coarse token a fine one may weigh before sums are scaled; what coarse
  // weights lose below 2^-14 is nothing beside that.
  static constexpr float kRoom = 4;

  // So that weights fit fp16 when they are multiplied with a step of any lane.
  __device__ __forceinline__ void LowerLimit(Memory& memory, float step) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) step = fmaxf(step, __shfl_xor_sync(kAllLanes, step, i));
    const float limit = kMostProduct - ceilf(log2f(step));
    const float top[2] = {raised_[0] + limit_ - limit, raised_[1] + limit_ - limit};
    limit_ = limit;
    Raise(memory, top);
  }

  // What weights are relative to, to the largest of any lane where that is larger. One token may
  // weigh any number of times what the normaliser says.
  __device__ __forceinline__ void Raise(Memory& memory, const float (&to)[2]) {
    float factor[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float top = fmaxf(raised_[head], to[head]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      }
      factor[head] = Exp2(raised_[head] - top);
      raised_[head] = top;
    }
    values_.Scale(factor);
    const int g = threadIdx.x % 32 / 4;
    const float even = __shfl_sync(kAllLanes, factor[0], g / 2);
    const float odd = __shfl_sync(kAllLanes, factor[1], g / 2);
    const float of_head = g % 2 == 0 ? even : odd;
    fine_steps_ *= of_head;
    StripWeights::Scale(memory, of_head);
    __syncwarp();
  }

  ValueSums<kDim> values_;
  float raised_[2] = {kFineFrom + kRoom - kMostProduct, kFineFrom + kRoom - kMostProduct};
  float limit_ = kMostProduct;  // log2 of the largest weight
  float fine_steps_ = 0;        // fine tokens' weights times their steps, for head g
};

}  // namespace kvstrata::cuda
