// SPDX-License-Identifier: Apache-2.0
// Minimum and step of numbers that share them, in fp16 and rounded outwards, and the codes between
// (docs/spec/bits.md 2), as `ref` ops make them. Every operation is fp32 and rounded once.
//
// Threads: pure; any.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/pages/dtype.h"
#include "kernels/pages/quantised_group.h"

namespace kvstrata {

// A number as it counts: without infinities and NaN.
inline float Counted(float x) {
  return std::isnan(x) ? 0 : std::clamp(x, -kQuantisedMax, kQuantisedMax);
}

struct HalfRange {
  F16 minimum{0}, step{0};  // a zero is +0
  float low = 0;            // minimum
  float inverse = 0;        // 1 / step; 0 for a step of 0

  // Takes numbers from `least` to `largest`, both as they count, to codes 0 .. last.
  static HalfRange Of(float least, float largest, int32_t last) {
    HalfRange range;
    range.minimum = Outwards(least, false);
    range.low = ToFloat(range.minimum);
    range.step = Outwards((largest - range.low) / static_cast<float>(last), true);
    range.inverse = IsZero(range.step) ? 0 : 1 / ToFloat(range.step);
    return range;
  }
  // The code of a number in the range.
  uint32_t Code(float x) const {
    return static_cast<uint32_t>(std::nearbyint((x - low) * inverse));
  }

 private:
  static bool IsZero(F16 h) { return (h.bits & 0x7FFF) == 0; }
  // The neighbour in the order of values, which for one sign is that of bits.
  static F16 Next(F16 h, bool up) {
    if (IsZero(h)) return {static_cast<uint16_t>(up ? 0x0001 : 0x8001)};
    const bool away = up == (h.bits < 0x8000);
    return {static_cast<uint16_t>(away ? h.bits + 1 : h.bits - 1)};
  }
  // The least fp16 that is at least x (up), or the largest that is at most x.
  static F16 Outwards(float x, bool up) {
    F16 h = FromFloat<F16>(x);
    if (up ? ToFloat(h) < x : ToFloat(h) > x) h = Next(h, up);
    return IsZero(h) ? F16{0} : h;
  }
};

}  // namespace kvstrata
