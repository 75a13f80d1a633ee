// SPDX-License-Identifier: Apache-2.0
// A CTA's part of the keys of a list: read from memory once and kept in shared memory where they
// fit, else read again each time.
#pragma once

#include <cstdint>

#include "kernels/cuda/warps/score_keys.cuh"
#include "kernels/ops/pick/pick_cuda.h"

namespace kvstrata::cuda {

class ListKeys {
 public:
  // A warp's run of n keys over `warps`; a vector of 4 is never cut but by the end of the list.
  KVS_HOST_DEVICE static int PerWarp(int n, int warps) {
    return ((n + warps - 1) / warps + 3) / 4 * 4;
  }

  // n keys of `list`, those of CTA `cta` of `ctas`. room: keys that `shared` has room for.
  __device__ ListKeys(const PickBatch& w, int list, int n, int cta, int ctas, uint32_t* shared,
                      int32_t room)
      : scores_(w.scores),
        f32_(w.dtype == DType::kF32),
        at_(int64_t{list} * w.score_stride),
        n_(n),
        shared_(shared) {
    const int warps = static_cast<int>(blockDim.x) / 32, per_warp = PerWarp(n, ctas * warps);
    chunk_ = cta * warps * per_warp;
    begin_ = min(chunk_ + static_cast<int>(threadIdx.x) / 32 * per_warp, n);
    end_ = min(begin_ + per_warp, n);
    staged_ = per_warp * warps <= room;
  }

  // visit(i, keys) for the warp's keys in vectors of 4, lane by lane in ascending order; all lanes
  // visit equally often, beyond the end keys that are absent. A lane always visits the same keys.
  // REQUIRES: StageEach before.
  template <typename Visit>
  __device__ void ForEachVector(Visit visit) const {
    for (int base = begin_; base < end_; base += 128) {
      const int i = base + FirstOfLane();
      uint4 v = {kAbsent, kAbsent, kAbsent, kAbsent};
      if (i < end_) {
        v = staged_ ? *reinterpret_cast<const uint4*>(&shared_[i - chunk_])
                    : KeysOf(f32_ ? Load<true>(i) : Load<false>(i), i);
      }
      VisitVector(visit, i, v);
    }
  }

  // The same, from memory: the first time. Keeps the keys where they fit.
  template <typename Visit>
  __device__ void StageEach(Visit visit) {
    constexpr int kAtOnce = 4;  // loads of a lane under way
    for (int base = begin_; base < end_; base += kAtOnce * 128) {
      uint4 raw[kAtOnce];
      if (f32_) {
        LoadAll<true>(base, raw);
      } else {
        LoadAll<false>(base, raw);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base + 128 * j >= end_) break;
        const int i = base + 128 * j + FirstOfLane();
        uint4 v = {kAbsent, kAbsent, kAbsent, kAbsent};
        if (i < end_) {
          v = KeysOf(raw[j], i);
          if (staged_) *reinterpret_cast<uint4*>(&shared_[i - chunk_]) = v;
        }
        VisitVector(visit, i, v);
      }
    }
  }

 private:
  __device__ static int FirstOfLane() { return 4 * static_cast<int>(threadIdx.x % 32); }

  template <typename Visit>
  __device__ static void VisitVector(Visit visit, int i, const uint4& v) {
    const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
    visit(i, keys);
  }

  // Scores i .. i + 3 as they lie in memory.
  template <bool kF32>
  __device__ uint4 Load(int i) const {
    if constexpr (kF32) {
      return *reinterpret_cast<const uint4*>(static_cast<const float*>(scores_) + at_ + i);
    } else {
      const auto* from = static_cast<const uint16_t*>(scores_) + at_ + i;
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      return {x.x, x.y, 0, 0};
    }
  }
  template <bool kF32, int kCount>
  __device__ void LoadAll(int base, uint4 (&raw)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = base + 128 * j + FirstOfLane();
      if (i < end_) raw[j] = Load<kF32>(i);
    }
  }

  __device__ uint4 KeysOf(uint4 x, int i) const {
    if (!f32_) x = {x.x << 16, x.x & 0xFFFF0000u, x.y << 16, x.y & 0xFFFF0000u};
    uint4 keys = {KeyOf(__uint_as_float(x.x)), KeyOf(__uint_as_float(x.y)),
                  KeyOf(__uint_as_float(x.z)), KeyOf(__uint_as_float(x.w))};
    if (i + 1 >= n_) keys.y = kAbsent;
    if (i + 2 >= n_) keys.z = kAbsent;
    if (i + 3 >= n_) keys.w = kAbsent;
    return keys;
  }

  const void* scores_;
  const bool f32_;
  const int64_t at_;  // the list's first score
  const int n_;
  uint32_t* shared_;
  int begin_, end_, chunk_;  // the warp's keys, and the CTA's first
  bool staged_;
};

}  // namespace kvstrata::cuda
