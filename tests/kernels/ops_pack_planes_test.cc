// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/planes_fixture.h"

namespace kvstrata {
namespace {

double AsCounted(float x) { return std::isnan(x) ? 0 : std::clamp(x, -65504.0f, 65504.0f); }

double HalfAt(const std::byte* at) { return LoadAs(DType::kF16, at); }

// Each key within half of a cell; each value, as a row, within what half of a cell and the rotation
// make of it (docs/spec/planes.md, "Storage" 4; "Precision").
void ExpectNear(const PagedFixture& keys, const PagedFixture& values, int begin,
                PlanesGroup group) {
  const PlanesFormat& f = group.format;
  const double cell = f.keep == 8 ? 1 : 16, more = 1 + 0x1p-13;
  const auto [got_keys, got_values] = group.Unpacked();
  for (int t = 0; t < f.tokens; ++t) {
    double error = 0, size = 0;
    for (int c = 0; c < f.dim; ++c) {
      const double x = AsCounted(keys.Get(begin + t, c)),
                   step = HalfAt(group.Upper() + 2 * (f.dim + c));
      const double got = got_keys[t * f.dim + c];
      ASSERT_LE(std::abs(got - x), cell / 2 * step * more + 0x1p-23 * std::abs(got))
          << "token " << t << " channel " << c << " key " << x << " step " << step;
      const double v = AsCounted(values.Get(begin + t, c));
      error += std::pow(got_values[t * f.dim + c] - v, 2);
      size += v * v;
    }
    const double step =
        HalfAt(group.Upper() + 4 * f.dim + f.tokens * f.dim / 4 + 2 * (f.tokens + t));
    ASSERT_LE(std::sqrt(error),
              std::sqrt(f.dim) * cell / 2 * step * more + 0x1p-19 * std::sqrt(size))
        << "token " << t;
  }
}

TEST(PackPlanes, EveryTypeAndFormat) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (DType dtype : kDTypes) {
    for (const PlanesFormat& f : PlanesFormats()) {
      SCOPED_TRACE(NameOf(f));
      const PagedFixture keys(random, dtype, 200, 16, f.dim, 8),
          values(random, dtype, 200, 32, f.dim);
      const int begin = random.Below(200 - f.tokens);
      ExpectNear(keys, values, begin, PlanesGroup(keys, values, begin, f));
    }
  }
}

// Sizes over all that a dtype holds, zeros of both signs, subnormals, infinities and NaN.
struct EveryMagnitude {
  PagedFixture keys, values;

  EveryMagnitude(Random& random, DType dtype, const PlanesFormat& f)
      : keys(random, dtype, f.tokens, 16, f.dim), values(random, dtype, f.tokens, 16, f.dim) {
    for (int t = 0; t < f.tokens; ++t) {
      const float of_token = std::ldexp(1.0f, random.Below(44) - 30);
      for (int c = 0; c < f.dim; ++c) {
        keys.Set(t, c, std::ldexp(random.Normal(), c % 50 - 35));
        values.Set(t, c, of_token * random.Normal());
      }
      keys.Set(t, 0, random.Below(2) == 0 ? 0.0f : -0.0f);
      keys.Set(t, 1, std::ldexp(static_cast<float>(random.Below(9) - 4), -149));
      keys.Set(t, 2, random.Below(2) == 0 ? kInf : -kInf);
      keys.Set(t, 3, random.Below(2) == 0 ? kNaN : random.Normal());
      keys.Set(t, 4, kNaN);
    }
    values.Set(0, 5, kNaN);
    for (int c = 0; c < f.dim; ++c) values.Set(1, c, kNaN);
    values.Set(2, 9, 70000.0f);
  }
};

TEST(PackPlanes, EveryMagnitude) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const PlanesFormat f{128, 64, 8};
  for (DType dtype : kDTypes) {
    const EveryMagnitude rows(random, dtype, f);
    ExpectNear(rows.keys, rows.values, 0, PlanesGroup(rows.keys, rows.values, 0, f));
  }
}

class PackPlanesTwins : public SimdTest {};
KVS_INSTANTIATE_SIMD(PackPlanesTwins);

void ExpectTwins(const PagedRows& keys, const PagedRows& values, int begin, const PlanesFormat& f) {
  const PlanesGroup ref(keys, values, begin, f);
  PlanesGroup simd(f);
  const PackPlanesWork work{keys, values, begin, f, simd.Upper(), simd.Lower()};
  PackPlanesSimd(&work, 1, InlineExecutor());
  EXPECT_TRUE(ref.upper == simd.upper) << NameOf(f);
  EXPECT_TRUE(ref.lower == simd.lower) << NameOf(f);
}

TEST_P(PackPlanesTwins, GiveTheSameBytes) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (const PlanesFormat& f : PlanesFormats()) {
      const PagedFixture keys(random_, dtype, 200, 16, f.dim, 8),
          values(random_, dtype, 200, 32, f.dim);
      ExpectTwins(keys.rows, values.rows, random_.Below(200 - f.tokens), f);
      EveryMagnitude odd(random_, dtype, f);
      for (int c = 0; c < f.dim; ++c) odd.values.Set(3, c, c % 2 == 0 ? kInf : -kInf);
      ExpectTwins(odd.keys.rows, odd.values.rows, 0, f);
    }
  }
}

// tests/golden: every complete group.
TEST_P(PackPlanesTwins, GiveTheSameBytesOfTheVectors) {
  for (int seed : kGoldenPlanes) {
    const GoldenArrays golden = GoldenPlanesCase(seed);
    const GoldenArray &keys = golden.Get("keys_bf16", "<u2"),
                      &values = golden.Get("values_bf16", "<u2");
    const PlanesFormat f = GoldenPlanes::Of(golden, "planes").format;
    const auto heads = static_cast<int>(keys.shape[2]);
    for (int row = 0; row < keys.shape[0] * heads; ++row) {
      const GoldenKeys k(keys, row / heads, row % heads), v(values, row / heads, row % heads);
      for (int g = 0; g < keys.shape[1] / f.tokens; ++g)
        ExpectTwins(k.rows, v.rows, g * f.tokens, f);
    }
  }
}

// A row of infinities, rotated, has 0 in all channels but one, and that one counts as 65504, a
// sixteenth of what it is; so it does again where fp16 rounds the step up.
TEST(PackPlanes, NoGroupHasInfinities) {
  Random random;
  PagedFixture rows(random, DType::kF32, 16, 16, 256);
  for (int c = 0; c < 256; ++c) rows.Set(3, c, c % 2 == 0 ? kInf : -kInf);
  PlanesGroup group(rows, rows, 0, {256, 16, 8});
  EXPECT_EQ(HalfAt(group.Upper() + group.format.value_step() + 2 * 3), 257);
  const auto [keys, values] = group.Unpacked();
  for (float x : keys) ASSERT_TRUE(std::isfinite(x));
  for (float x : values) ASSERT_TRUE(std::isfinite(x));
  for (int c = 0; c < 256; ++c) EXPECT_EQ(values[3 * 256 + c], c % 2 == 0 ? 4094 : -4094);
}

// The same rows in other pages and another dtype: nothing else enters.
TEST(PackPlanes, BytesAreAFunctionOfTheRows) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (const PlanesFormat& f : PlanesFormats()) {
    const PagedFixture keys(random, DType::kBF16, 80, 16, f.dim),
        values(random, DType::kBF16, 80, 16, f.dim);
    PagedFixture same_keys(random, DType::kF32, 80, 32, f.dim, 4),
        same_values(random, DType::kF32, 80, 64, f.dim);
    for (int t = 0; t < f.tokens; ++t) {
      for (int c = 0; c < f.dim; ++c) {
        same_keys.Set(t, c, keys.Get(t + 7, c));
        same_values.Set(t, c, values.Get(t + 7, c));
      }
    }
    const PlanesGroup group(keys, values, 7, f), same(same_keys, same_values, 0, f);
    EXPECT_TRUE(group.upper == same.upper && group.lower == same.lower) << NameOf(f);
  }
}

// keep = 4 is keep = 8 without plane 2.
TEST(PackPlanes, UpperRunsAreAlikeForEveryKeep) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const PagedFixture keys(random, DType::kBF16, 64, 16, 64),
      values(random, DType::kBF16, 64, 16, 64);
  PlanesGroup all(keys, values, 0, {64, 64, 8}), some(keys, values, 0, {64, 64, 4});
  EXPECT_TRUE(all.upper == some.upper);
  for (int t = 0; t < 64; ++t) {
    for (int side = 0; side < 2; ++side) {
      EXPECT_EQ(
          std::memcmp(all.Lower() + 96 * t + 48 * side, some.Lower() + 32 * t + 16 * side, 16), 0);
    }
  }
}

// Channel 21 of keys: 255, 0b10010110 and zeros, so m = 0 and s = 1. Token 9 of values: rotated 1,
// 0, 1, 0, .., codes 255, 0, 255, 0, ...
TEST(PackPlanes, ByHand) {
  Random random;
  PagedFixture keys(random, DType::kF32, 16, 16, 64), values(random, DType::kF32, 16, 16, 64);
  for (int t = 0; t < 16; ++t) {
    for (int c = 0; c < 64; ++c) {
      keys.Set(t, c, c != 21 ? 0.0f : t == 0 ? 255.0f : t == 1 ? 0b10'01'0110 : 0.0f);
      values.Set(t, c, t == 9 && c < 2 ? 4.0f : 0.0f);
    }
  }
  PlanesGroup group(keys, values, 0, {64, 16, 8});
  const auto upper = [&](int64_t at) {
    uint32_t word;
    std::memcpy(&word, group.Upper() + at, 4);
    return word;
  };
  EXPECT_EQ(HalfAt(group.Upper() + 128 + 42), 1);
  // Channel 21 = 1 * 16 + 4 * 1 + 1: word 1, run 1, third byte.
  EXPECT_EQ(upper(256 + 4 * 16), 3u << 18);
  EXPECT_EQ(upper(256 + 4 * 17), 2u << 18);
  // Token 9 = 4 * 2 + 1 of its strip.
  EXPECT_EQ(upper(512 + 64 + 4 * 2), 3u << 20);
  EXPECT_EQ(upper(512 + 64 + 4 * 3), 0u);
  uint32_t row[24];
  std::memcpy(row, group.Lower() + 96, sizeof row);  // token 1's
  EXPECT_EQ(row[1], 1u << 18);
  // With four bits a code: channel 21 = 0 * 32 + 4 * 5 + 1: word 5 behind the four of plane 1.
  EXPECT_EQ(row[4 + 5], 0b0110u << 16);
}

TEST(PackPlanes, ManyItemsOverAPool) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const PlanesFormat f{128, 64, 8};
  const PagedFixture keys(random, DType::kBF16, 64 * 20, 16, 128),
      values(random, DType::kBF16, 64 * 20, 16, 128);
  std::vector<PlanesGroup> groups(20, PlanesGroup(f));
  std::vector<PackPlanesWork> work;
  for (int g = 0; g < 20; ++g) {
    work.push_back({keys.rows, values.rows, 64 * g, f, groups[g].Upper(), groups[g].Lower()});
  }
  PackPlanesRef(work.data(), 20, *NewThreadPool(2));
  for (int g = 0; g < 20; ++g) {
    const PlanesGroup one(keys, values, 64 * g, f);
    EXPECT_TRUE(one.upper == groups[g].upper && one.lower == groups[g].lower) << g;
  }
}

TEST(PackPlanesDeathTest, RefusesGroupsThatHaveNoLayout) {
  Random random;
  const PagedFixture rows(random, DType::kF32, 300, 16, 64), half(random, DType::kF16, 300, 16, 64);
  std::vector<std::byte> out(1 << 16);
  for (const PlanesFormat& f :
       {PlanesFormat{64, 1, 8}, PlanesFormat{64, 24, 8}, PlanesFormat{64, 272, 8},
        PlanesFormat{64, 64, 6}, PlanesFormat{128, 64, 8}}) {
    const PackPlanesWork work{rows.rows, rows.rows, 0, f, out.data(), out.data()};
    EXPECT_DEATH(PackPlanesRef(&work, 1, InlineExecutor()), "broken invariant") << NameOf(f);
    EXPECT_DEATH(PackPlanesSimd(&work, 1, InlineExecutor()), "broken invariant") << NameOf(f);
  }
  const PackPlanesWork mixed{rows.rows, half.rows, 0, {64, 64, 8}, out.data(), out.data()};
  EXPECT_DEATH(PackPlanesRef(&mixed, 1, InlineExecutor()), "broken invariant");
}

// tests/golden: the bytes of every complete group.
TEST(PackPlanesGolden, Groups) {
  for (int seed : kGoldenPlanes) {
    const GoldenArrays golden = GoldenPlanesCase(seed);
    ASSERT_TRUE(golden.Has("planes.upper")) << seed;
    const GoldenArray &keys = golden.Get("keys_bf16", "<u2"),
                      &values = golden.Get("values_bf16", "<u2");
    const GoldenArray &upper = golden.Get("planes.upper", "|u1"),
                      &lower = golden.Get("planes.lower", "|u1");
    const PlanesFormat f = GoldenPlanes::Of(golden, "planes").format;
    ASSERT_EQ(f.upper_bytes(), upper.shape[3]);
    ASSERT_EQ(f.lower_bytes(), lower.shape[3]);
    const auto heads = static_cast<int>(keys.shape[2]), groups = static_cast<int>(upper.shape[2]);
    ASSERT_EQ(groups, keys.shape[1] / f.tokens);
    ASSERT_GT(groups, 0);
    for (int row = 0; row < keys.shape[0] * heads; ++row) {
      const GoldenKeys k(keys, row / heads, row % heads), v(values, row / heads, row % heads);
      for (int g = 0; g < groups; ++g) {
        PlanesGroup got(k.rows, v.rows, g * f.tokens, f);
        const int64_t at = int64_t{row} * groups + g;
        EXPECT_EQ(
            std::memcmp(got.Upper(), upper.As<uint8_t>() + at * f.upper_bytes(), f.upper_bytes()),
            0)
            << seed << " group " << g;
        EXPECT_EQ(
            std::memcmp(got.Lower(), lower.As<uint8_t>() + at * f.lower_bytes(), f.lower_bytes()),
            0)
            << seed << " group " << g;
      }
    }
  }
}

// tests/golden: rows of the first group, bit for bit.
TEST(PackPlanesGolden, WidenedRows) {
  for (int seed : kGoldenPlanes) {
    const GoldenArrays golden = GoldenPlanesCase(seed);
    ASSERT_TRUE(golden.Has("planes.widened_keys")) << seed;
    PlanesGroup group(GoldenPlanes::Of(golden, "planes").format);
    std::memcpy(group.Upper(), golden.Get("planes.upper", "|u1").data.data(),
                group.format.upper_bytes());
    std::memcpy(group.Lower(), golden.Get("planes.lower", "|u1").data.data(),
                group.format.lower_bytes());
    const auto [keys, values] = group.Unpacked();
    EXPECT_EQ(std::memcmp(keys.data(), golden.Get("planes.widened_keys", "<f4").data.data(),
                          4 * keys.size()),
              0);
    EXPECT_EQ(std::memcmp(values.data(), golden.Get("planes.widened_values", "<f4").data.data(),
                          4 * values.size()),
              0);
  }
}

}  // namespace
}  // namespace kvstrata
