// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/golden_bits.h"
#include "tests/kernels/quantised_keys.h"

namespace kvstrata {
namespace {

constexpr std::byte kPoison{0xA5};

std::vector<std::byte> Quantised(decltype(&QuantiseKeysRef) op, QuantiseKeysWork work) {
  std::vector<std::byte> out(static_cast<size_t>(work.format.bytes()) + 64, kPoison);
  work.out = out.data();
  op(&work, 1, InlineExecutor());
  for (size_t i = out.size() - 64; i < out.size(); ++i) EXPECT_EQ(out[i], kPoison);
  out.resize(out.size() - 64);
  return out;
}

// Every key within half a step of its quantised value, which no rounding of minimum or step leaves.
void ExpectWithinHalfAStep(const PagedFixture& keys, int begin, const QuantisedGroup& f,
                           const std::vector<std::byte>& group) {
  for (int t = 0; t < f.tokens; ++t) {
    for (int c = 0; c < f.dim; ++c) {
      const float key = keys.Get(begin + t, c);
      const double x = std::isnan(key) ? 0 : std::min(std::max(key, -65504.0f), 65504.0f);
      const double step = StepOf(f, group.data(), c);
      ASSERT_GE(step, 0);
      ASSERT_LE(MinimumOf(group.data(), c), x);
      ASSERT_GE(MinimumOf(group.data(), c) + step * ((1 << f.bits) - 1) * (1 + 1e-6), x);
      ASSERT_LE(std::abs(QuantisedAt(f, group.data(), t, c) - x), step / 2 * (1 + 0x1p-17))
          << "token " << t << " channel " << c << " key " << key << " step " << step;
    }
  }
}

class QuantiseKeys : public SimdTest {
 protected:
  // The bytes, which ref and simd agree on.
  std::vector<std::byte> ExpectLikeRef(const PagedFixture& keys, int begin, QuantisedGroup f) {
    const QuantiseKeysWork work{keys.rows, begin, f};
    const auto ref = Quantised(QuantiseKeysRef, work), simd = Quantised(QuantiseKeysSimd, work);
    EXPECT_TRUE(ref == simd) << NameOf(f);
    return simd;
  }
};

TEST_P(QuantiseKeys, EveryTypeAndFormat) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (const QuantisedGroup& f : GroupFormats()) {
      SCOPED_TRACE(NameOf(f));
      const PagedFixture keys(random_, dtype, 300, 16, f.dim, 8);
      const int begin = random_.Below(300 - f.tokens);
      ExpectWithinHalfAStep(keys, begin, f, ExpectLikeRef(keys, begin, f));
    }
  }
}

// Channels whose sizes range over all that fp32 holds, with offsets that dwarf their width, zeros
// of both signs, subnormals, what no fp16 holds, infinities and NaN.
TEST_P(QuantiseKeys, EveryMagnitude) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int bits : {2, 3, 4}) {
      const QuantisedGroup f{128, bits, 64};
      PagedFixture keys(random_, dtype, 64, 16, f.dim);
      for (int c = 0; c < f.dim; ++c) {
        const float width = std::ldexp(1.0f, random_.Below(60) - 40);
        const float offset =
            random_.Below(2) * random_.Normal() * std::ldexp(width, random_.Below(15));
        for (int t = 0; t < 64; ++t) keys.Set(t, c, offset + width * random_.Normal());
      }
      for (int t = 0; t < 64; ++t) {
        keys.Set(t, 0, random_.Below(2) == 0 ? 0.0f : -0.0f);
        keys.Set(t, 1, std::ldexp(static_cast<float>(random_.Below(9) - 4), -24));
        keys.Set(t, 2, std::ldexp(static_cast<float>(random_.Below(9) - 4), -149));
        keys.Set(t, 3, std::ldexp(random_.Normal(), 100));
        keys.Set(t, 4, random_.Below(2) == 0 ? kInf : -kInf);
        keys.Set(t, 5, random_.Below(2) == 0 ? kNaN : random_.Normal());
        keys.Set(t, 6, kNaN);
        keys.Set(t, 7, 65504.0f - static_cast<float>(random_.Below(100)));
      }
      ExpectWithinHalfAStep(keys, 0, f, ExpectLikeRef(keys, 0, f));
    }
  }
}

TEST_P(QuantiseKeys, ConstantChannelsHaveNoStep) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const QuantisedGroup f{64, 2, 16};
    PagedFixture keys(random_, dtype, 16, 16, f.dim);
    for (int c = 0; c < f.dim; ++c) {
      for (int t = 1; t < 16; ++t) keys.Set(t, c, keys.Get(0, c));
    }
    const auto group = ExpectLikeRef(keys, 0, f);
    for (int c = 0; c < f.dim; ++c) {
      EXPECT_EQ(MinimumOf(group.data(), c), keys.Get(0, c));
      EXPECT_EQ(StepOf(f, group.data(), c), 0);
      for (int t = 0; t < 16; ++t) EXPECT_EQ(CodeAt(f, group.data(), t, c), 0);
    }
  }
}

TEST_P(QuantiseKeys, KeysOnTheGridAreKeptExactly) {
  SCOPED_TRACE(random_.Trace());
  for (const QuantisedGroup& f : GroupFormats()) {
    PagedFixture keys(random_, DType::kF32, f.tokens, 16, f.dim);
    for (int c = 0; c < f.dim; ++c) {
      const float minimum = std::round(64 * random_.Normal()) / 64;
      const float step = std::ldexp(1.0f, random_.Below(8) - 6);
      for (int t = 0; t < f.tokens; ++t) {
        const int code = t == 0 ? 0 : t == 1 ? (1 << f.bits) - 1 : random_.Below(1 << f.bits);
        keys.Set(t, c, minimum + step * static_cast<float>(code));
      }
    }
    const auto group = ExpectLikeRef(keys, 0, f);
    for (int t = 0; t < f.tokens; ++t) {
      for (int c = 0; c < f.dim; ++c) ASSERT_EQ(QuantisedAt(f, group.data(), t, c), keys.Get(t, c));
    }
  }
}

TEST_P(QuantiseKeys, ALargerKeyNeverHasASmallerCode) {
  SCOPED_TRACE(random_.Trace());
  const QuantisedGroup f{64, 4, 64};
  const PagedFixture keys(random_, DType::kF32, 64, 16, f.dim);
  const auto group = ExpectLikeRef(keys, 0, f);
  for (int c = 0; c < f.dim; ++c) {
    for (int t = 1; t < 64; ++t) {
      const bool larger = keys.Get(t, c) >= keys.Get(t - 1, c);
      const int now = CodeAt(f, group.data(), t, c), before = CodeAt(f, group.data(), t - 1, c);
      EXPECT_TRUE(larger ? now >= before : now <= before);
    }
  }
}

TEST_P(QuantiseKeys, ManyItemsOverAPool) {
  SCOPED_TRACE(random_.Trace());
  const QuantisedGroup f{128, 2, 64};
  const PagedFixture keys(random_, DType::kBF16, 64 * 20, 16, f.dim);
  std::vector<std::byte> out(static_cast<size_t>(20 * f.bytes()));
  std::vector<QuantiseKeysWork> work;
  for (int g = 0; g < 20; ++g) work.push_back({keys.rows, 64 * g, f, out.data() + g * f.bytes()});
  QuantiseKeysSimd(work.data(), 20, *NewThreadPool(2));
  for (int g = 0; g < 20; ++g) {
    const auto one = Quantised(QuantiseKeysRef, work[g]);
    EXPECT_EQ(std::memcmp(one.data(), work[g].out, one.size()), 0) << g;
  }
}

KVS_INSTANTIATE_SIMD(QuantiseKeys);

// By hand: channel 0 of keys 1, 2, 4 and 13 ones. m = 1, s = 1, codes 0, 1, 3, 0, ...
TEST(QuantiseKeysRef, ByHand) {
  Random random;
  const QuantisedGroup f{64, 2, 16};
  PagedFixture keys(random, DType::kF32, 16, 16, 64);
  for (int t = 0; t < 16; ++t) {
    for (int c = 0; c < 64; ++c)
      keys.Set(t, c, c == 21 ? (t == 1 ? 2.0f : t == 2 ? 4.0f : 1.0f) : 0);
  }
  const auto group = Quantised(QuantiseKeysRef, {keys.rows, 0, f});
  EXPECT_EQ(HalfIn(group.data(), 42), 1);
  EXPECT_EQ(HalfIn(group.data(), 128 + 42), 1);
  // Channel 21 = 1 * 16 + 4 * 1 + 1: word 1, run 1, third byte.
  uint32_t words[16];
  std::memcpy(words, group.data() + 256 + 64, 64);
  EXPECT_EQ(words[0], 0u);
  EXPECT_EQ(words[1], 1u << 18);
  EXPECT_EQ(words[2], 3u << 18);
}

TEST(QuantiseKeysDeathTest, RefusesGroupsThatHaveNoLayout) {
  Random random;
  const PagedFixture keys(random, DType::kF32, 300, 16, 64);
  std::vector<std::byte> out(1 << 16);
  for (auto op : {QuantiseKeysRef, QuantiseKeysSimd}) {
    for (const QuantisedGroup& f :
         {QuantisedGroup{64, 2, 1}, QuantisedGroup{64, 2, 24}, QuantisedGroup{64, 2, 272},
          QuantisedGroup{64, 1, 64}, QuantisedGroup{64, 5, 64}, QuantisedGroup{128, 2, 64}}) {
      const QuantiseKeysWork work{keys.rows, 0, f, out.data()};
      EXPECT_DEATH(op(&work, 1, InlineExecutor()), "broken invariant") << NameOf(f);
    }
  }
}

// tests/golden: the bytes of every complete group, of every backend.
TEST(QuantiseKeysGolden, Groups) {
  for (int seed = 1; seed <= 8; ++seed) {
    const GoldenArrays golden(KVS_GOLDEN "/case_00" + std::to_string(seed) + ".npz");
    ASSERT_TRUE(golden.Has("bits.groups")) << seed;
    const GoldenArray &keys = golden.Get("keys_bf16", "<u2"),
                      &want = golden.Get("bits.groups", "|u1");
    const auto tokens = static_cast<int>(keys.shape[1]), heads = static_cast<int>(keys.shape[2]);
    const auto dim = static_cast<int>(keys.shape[3]), groups = static_cast<int>(want.shape[2]);
    const GoldenBits bits = GoldenBits::Of(golden);
    ASSERT_EQ(bits.format(dim).bytes(), want.shape[3]);
    ASSERT_EQ(groups, tokens / bits.group);
    ASSERT_GT(groups, 0);
    for (auto op : {QuantiseKeysRef, QuantiseKeysSimd}) {
      for (int64_t row = 0; row < keys.shape[0] * heads; ++row) {
        const GoldenKeys head(keys, static_cast<int>(row) / heads, static_cast<int>(row) % heads);
        for (int g = 0; g < groups; ++g) {
          const auto got = Quantised(op, {head.rows, g * bits.group, bits.format(dim)});
          const uint8_t* expected = want.As<uint8_t>() + (row * groups + g) * want.shape[3];
          EXPECT_EQ(std::memcmp(got.data(), expected, got.size()), 0) << seed << " group " << g;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvstrata
