// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "kernels/ops/append/append.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

constexpr int kHeads = 3, kLayers = 2;

// Tokens of random keys and values, with everything that is hard to convert among them.
struct Source {
  std::vector<std::byte> memory;
  SourceRows k, v;

  Source(Random& random, DType dtype, int tokens, int dim) {
    const int64_t head = (dim + 8) * SizeOf(dtype), token = kHeads * head + 64;
    memory.resize(static_cast<size_t>(2 * tokens * token));
    const float hard[] = {0.0f,
                          -0.0f,
                          kInf,
                          -kInf,
                          kNaN,
                          65504.0f,
                          1e6f,
                          1e-6f,
                          6e-8f,
                          -1e-30f,
                          std::bit_cast<float>(0x7FFFFFFFu)};
    for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      const int pick = random.Below(40);
      StoreAs(dtype, &memory[i], pick < 11 ? hard[pick] : random.Normal());
    }
    k = {memory.data(), token, head, dtype};
    v = {memory.data() + tokens * token, token, head, dtype};
  }
};

// Pages filled with 0xEE; append must leave the rest that way.
struct Pages {
  std::vector<std::byte> memory;
  std::vector<std::byte*> pages;

  Pages(const Geometry& g, int tokens) {
    const int count = (tokens + g.page_tokens - 1) / g.page_tokens;
    memory.assign(static_cast<size_t>(count * g.page_bytes()), std::byte{0xEE});
    for (int i = 0; i < count; ++i) {
      pages.push_back(memory.data() + (count - 1 - i) * g.page_bytes());
    }
  }
};

class Append : public SimdTest {
 protected:
  void ExpectLikeRef(DType from, DType to, int dim) {
    SCOPED_TRACE(random_.Trace() + " " + std::string(NameOf(from)) + " to " +
                 std::string(NameOf(to)) + " dim " + std::to_string(dim));
    const Geometry g{kLayers, kHeads, kHeads, dim, 16, to};
    const int position = random_.Below(20), tokens = 1 + random_.Below(40);
    const Source source(random_, from, tokens, dim);
    Pages ref(g, position + tokens), simd(g, position + tokens);
    const AppendWork work{ref.pages.data(), PageLayout::Of(g), 1,       position,
                          tokens,           source.k,          source.v};
    AppendWork other = work;
    other.pages = simd.pages.data();
    EXPECT_EQ(AppendRef(&work, 1, InlineExecutor()), AppendSimd(&other, 1, InlineExecutor()));
    for (size_t i = 0; i < ref.memory.size(); i += static_cast<size_t>(SizeOf(to))) {
      const float a = LoadAs(to, &ref.memory[i]), b = LoadAs(to, &simd.memory[i]);
      if (from != to && to != DType::kBF16 && std::isnan(a) && std::isnan(b)) continue;  // any NaN
      ASSERT_EQ(std::memcmp(&ref.memory[i], &simd.memory[i], static_cast<size_t>(SizeOf(to))), 0)
          << "byte " << i << ": " << a << " and " << b;
    }
  }
};

TEST_P(Append, BetweenAllTypes) {
  for (DType from : kDTypes) {
    for (DType to : kDTypes) {
      for (int dim : kDims) ExpectLikeRef(from, to, dim);
    }
  }
}

TEST_P(Append, NoTokensWriteNothing) {
  const Geometry g{kLayers, kHeads, kHeads, 64, 16, DType::kBF16};
  Pages pages(g, 16);
  AppendWork work{pages.pages.data(), PageLayout::Of(g), 0, 3, 0, {}, {}};
  EXPECT_TRUE(AppendSimd(&work, 1, InlineExecutor()));
  for (std::byte b : pages.memory) ASSERT_EQ(b, std::byte{0xEE});
}

TEST_P(Append, RowsLieWhereThePageLayoutSays) {
  const Geometry g{kLayers, kHeads, kHeads, 64, 16, DType::kBF16};
  const Source source(random_, DType::kBF16, 20, 64);
  Pages pages(g, 30);
  const PageLayout layout = PageLayout::Of(g);
  const AppendWork work{pages.pages.data(), layout, 1, 10, 20, source.k, source.v};
  AppendSimd(&work, 1, InlineExecutor());
  for (int i = 0; i < 20; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      const std::byte* key = KeysOf(pages.pages.data(), layout, 1, h).Row(10 + i);
      const std::byte* value = ValuesOf(pages.pages.data(), layout, 1, h).Row(10 + i);
      const int64_t at = i * source.k.token_stride + h * source.k.head_stride;
      EXPECT_EQ(std::memcmp(key, source.k.data + at, 128), 0) << i << " " << h;
      EXPECT_EQ(std::memcmp(value, source.v.data + at, 128), 0) << i << " " << h;
    }
  }
  // The other layer, and the rows before and behind, are untouched.
  EXPECT_EQ(*KeysOf(pages.pages.data(), layout, 0, 0).Row(10), std::byte{0xEE});
  EXPECT_EQ(*KeysOf(pages.pages.data(), layout, 1, 0).Row(9), std::byte{0xEE});
  EXPECT_EQ(*ValuesOf(pages.pages.data(), layout, 1, 2).Row(30), std::byte{0xEE});
}

// What ref says of a row whose every element is x, and that simd and FirstNotFinite say the same.
bool IsFiniteTo(DType from, DType to, uint32_t x) {
  constexpr int kDim = 64;
  std::vector<std::byte> row(static_cast<size_t>(kDim * SizeOf(from)));
  for (int c = 0; c < kDim; ++c) std::memcpy(&row[c * SizeOf(from)], &x, SizeOf(from));
  const Geometry g{1, 1, 1, kDim, 16, to};
  Pages pages(g, 1);
  const SourceRows rows{row.data(), 0, 0, from};
  const AppendWork work{pages.pages.data(), PageLayout::Of(g), 0, 0, 1, rows, rows};
  const bool finite = AppendRef(&work, 1, InlineExecutor());
  EXPECT_EQ(AppendSimd(&work, 1, InlineExecutor()), finite) << std::hex << x;
  EXPECT_EQ(!FirstNotFinite(work).has_value(), finite) << std::hex << x;
  EXPECT_EQ(std::isfinite(LoadAs(to, pages.pages[0])), finite) << std::hex << x;
  return finite;
}

// Some of all, and all of the exponents about which types differ.
TEST_P(Append, BitPatternsAreFiniteOrNot) {
  for (DType to : kDTypes) {
    for (uint32_t x = 0; x < 0x10000;) {
      IsFiniteTo(DType::kF16, to, x);
      IsFiniteTo(DType::kBF16, to, x);
      const uint32_t magnitude = x & 0x7FFF;
      const bool near = (magnitude >= 0x4740 && magnitude < 0x47C0) || magnitude >= 0x7B80;
      x += near ? 1 : 13;
    }
    for (int i = 0; i < 5000; ++i) {
      const auto x = static_cast<uint32_t>(random_.Below(1 << 16) << 16 | random_.Below(1 << 16));
      IsFiniteTo(DType::kF32, to, x);
    }
  }
  EXPECT_FALSE(HasFailure()) << random_.Trace();
}

TEST_P(Append, WhatOverflowsThePagesTypeIsNotFinite) {
  const auto finite = [](DType to, float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const bool positive = IsFiniteTo(DType::kF32, to, bits);
    EXPECT_EQ(IsFiniteTo(DType::kF32, to, bits | 0x80000000u), positive);
    return positive;
  };
  EXPECT_TRUE(finite(DType::kF16, std::nextafter(65520.0f, 0.0f)));  // rounds to 65504
  EXPECT_FALSE(finite(DType::kF16, 65520.0f));
  const float half_way = std::bit_cast<float>(0x7F7F8000u);  // from bf16's greatest to 2^128
  EXPECT_TRUE(finite(DType::kBF16, std::nextafter(half_way, 0.0f)));
  EXPECT_FALSE(finite(DType::kBF16, half_way));
  EXPECT_TRUE(finite(DType::kF32, std::numeric_limits<float>::max()));
  EXPECT_TRUE(IsFiniteTo(DType::kBF16, DType::kF16, FromFloat<BF16>(65280.0f).bits));
  EXPECT_FALSE(IsFiniteTo(DType::kBF16, DType::kF16, FromFloat<BF16>(65536.0f).bits));
}

// One bad element anywhere, of all items, is noticed, whatever else is written.
TEST_P(Append, OneElementIsEnough) {
  for (int round = 0; round < 300; ++round) {
    const DType from = kDTypes[random_.Below(3)], to = kDTypes[random_.Below(3)];
    const int dim = kDims[random_.Below(3)], tokens = 1 + random_.Below(40);
    const Geometry g{kLayers, kHeads, kHeads, dim, 16, to};
    const int64_t head = dim * SizeOf(from), token = kHeads * head;
    std::vector<std::byte> memory(static_cast<size_t>(2 * tokens * token));
    for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(SizeOf(from))) {
      StoreAs(from, &memory[i], random_.Normal());
    }
    const AppendedElement bad{random_.Below(2) == 1, random_.Below(tokens), random_.Below(kHeads),
                              random_.Below(dim)};
    Pages pages(g, tokens);
    const AppendWork whole{pages.pages.data(),
                           PageLayout::Of(g),
                           1,
                           0,
                           tokens,
                           {memory.data(), token, head, from},
                           {memory.data() + tokens * token, token, head, from}};
    const std::vector<AppendWork> works(3, whole);  // the same pages thrice
    EXPECT_TRUE(AppendRef(works.data(), 3, InlineExecutor()));
    EXPECT_TRUE(AppendSimd(works.data(), 3, InlineExecutor()));
    EXPECT_FALSE(FirstNotFinite(whole).has_value());
    const float values[] = {kNaN, kInf, -kInf};
    StoreAs(from,
            &memory[static_cast<size_t>((bad.is_value ? tokens * token : 0) + bad.token * token +
                                        bad.head * head + bad.channel * SizeOf(from))],
            values[random_.Below(3)]);
    EXPECT_FALSE(AppendRef(works.data(), 3, InlineExecutor())) << random_.Trace();
    EXPECT_FALSE(AppendSimd(works.data(), 3, InlineExecutor())) << random_.Trace();
    const std::optional<AppendedElement> found = FirstNotFinite(whole);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->is_value, bad.is_value);
    EXPECT_EQ(found->token, bad.token);
    EXPECT_EQ(found->head, bad.head);
    EXPECT_EQ(found->channel, bad.channel);
    EXPECT_FALSE(std::isfinite(found->source));
  }
}

KVS_INSTANTIATE_SIMD(Append);

}  // namespace
}  // namespace kvstrata
