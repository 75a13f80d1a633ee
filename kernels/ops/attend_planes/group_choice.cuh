// SPDX-License-Identifier: Apache-2.0
// What of a scored group is fine and read (docs/spec/planes.md, "A step", rules 4 and 5), by a
// warp.
//
// Logits are relative: 2^6 is the weight from which on a token is fine. So coarse weights are below
// 64, and with any step of values (at most 514) fit fp16.
#pragma once

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/ops/attend_planes/coarse_values.cuh"
#include "kernels/ops/attend_planes/planes_normaliser.cuh"

namespace kvstrata::cuda {

inline constexpr float kFineFrom = 6;  // log2 of a relative weight

// What all groups of an item have in common, for one lane.
struct ItemRule {
  PlanesLengths lengths;
  LaneFactors factors;
  float rounding[2];   // FineForm::RoundingOf, of the lane's heads
  float reference[2];  // what logits, times log2(e), are relative to
  float read_from;     // log2 of the relative weight from which on a strip is read
  FineForm form;
};

// Which candidates are fine: those that weigh enough.
struct FineByWeight {
  static constexpr bool kIsBits = false;
};
// Those whose bits are set.
struct FineByBits {
  static constexpr bool kIsBits = true;
  const uint64_t* bits;  // the item's, a word a group

  // A bit for each of the lane's tokens (TokenOf).
  __device__ uint32_t Of(int group) const {
    const uint64_t own = __ldcg(bits + group) >> TokenOf(threadIdx.x % 32, 0);
    return static_cast<uint32_t>(own & 0xF) | static_cast<uint32_t>(own >> 8 & 0xF) << 4;
  }
};

// Report of one (sequence, KV head).
struct ItemReport {
  uint8_t *fine, *strips;  // null: not wanted

  __device__ static ItemReport Of(const PlanesReport& report, int64_t item) {
    return {
        report.fine == nullptr ? nullptr : report.fine + item * report.stride,
        report.strips == nullptr ? nullptr : report.strips + item * (report.stride / kStripTokens)};
  }
  __device__ bool IsWanted() const { return fine != nullptr || strips != nullptr; }
  // chosen: of the lane's tokens (TokenOf), which lanes of one g have together.
  __device__ void Write(int group, uint32_t chosen, uint32_t strips_read) const {
    const int lane = threadIdx.x % 32;
    chosen |= __shfl_xor_sync(kAllLanes, chosen, 2);
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

}  // namespace kvstrata::cuda
