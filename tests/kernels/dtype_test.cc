// SPDX-License-Identifier: Apache-2.0
// Conversions of single elements: every half there is, and the floats where rounding turns.
#include "kernels/pages/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kvstrata {
namespace {

constexpr uint16_t kInfinity = 0x7C00, kSign = 0x8000;

// A finite value, by the definition of the format.
double ValueOf(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & kSign ? -magnitude : magnitude;
}
uint16_t Rounded(float x) { return FromFloat<F16>(x).bits; }

TEST(Halves, KeepTheirValue) {
  for (uint16_t bits = 0; bits < kInfinity; ++bits) {
    for (const uint16_t half : {bits, static_cast<uint16_t>(bits | kSign)}) {
      const float value = ToFloat(F16{half});
      ASSERT_EQ(value, ValueOf(half)) << half;
      ASSERT_EQ(std::signbit(value), (half & kSign) != 0) << half;
      ASSERT_EQ(Rounded(value), half);
    }
  }
}

TEST(Halves, RoundToNearestTiesToEven) {
  for (uint16_t below = 0; below < kInfinity; ++below) {
    const uint16_t above = below + 1;
    // Infinity rounds as if it were the next finite value, 65536.
    const double next = above == kInfinity ? 65536 : ValueOf(above);
    const float tie = static_cast<float>((ValueOf(below) + next) / 2);
    ASSERT_EQ(Rounded(tie), below % 2 == 0 ? below : above) << tie;
    ASSERT_EQ(Rounded(std::nextafter(tie, 0.0f)), below) << tie;
    ASSERT_EQ(Rounded(std::nextafter(tie, 1e9f)), above) << tie;
    ASSERT_EQ(Rounded(-tie), kSign | Rounded(tie)) << tie;
  }
}

TEST(Halves, KeepInfinitiesAndNans) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ToFloat(F16{kInfinity}), infinity);
  EXPECT_EQ(ToFloat(F16{kInfinity | kSign}), -infinity);
  EXPECT_EQ(Rounded(infinity), kInfinity);
  EXPECT_EQ(Rounded(-infinity), kInfinity | kSign);
  EXPECT_EQ(Rounded(std::numeric_limits<float>::max()), kInfinity);
  for (uint16_t bits = kInfinity + 1; bits < kSign; ++bits) {
    ASSERT_TRUE(std::isnan(ToFloat(F16{bits}))) << bits;
    ASSERT_GT(Rounded(ToFloat(F16{bits})), kInfinity) << bits;
  }
  // A payload whose upper bits are zero must not become an infinity.
  EXPECT_GT(Rounded(std::bit_cast<float>(0x7F800001u)), kInfinity);
}

}  // namespace
}  // namespace kvstrata
