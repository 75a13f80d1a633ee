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
    AppendRef(&work, 1, InlineExecutor());
    AppendWork other = work;
    other.pages = simd.pages.data();
    AppendSimd(&other, 1, InlineExecutor());
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
  AppendSimd(&work, 1, InlineExecutor());
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

KVS_INSTANTIATE_SIMD(Append);

}  // namespace
}  // namespace kvstrata
