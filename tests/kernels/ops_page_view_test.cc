// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/pages/page_view.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

const Geometry kLlama{32, 32, 8, 128, 16, DType::kBF16};

TEST(Geometry, PageOfLlamaIsTwoMebibytes) {
  EXPECT_TRUE(Validate(kLlama).ok());
  EXPECT_EQ(kLlama.page_bytes(), 2 << 20);
  EXPECT_EQ(kLlama.group(), 4);
}

void ExpectRefused(const Geometry& g, const char* field, const char* value) {
  const Status status = Validate(g);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.reason(), "GEOMETRY_INVALID");
  EXPECT_THAT(status.message(), HasSubstr(field));
  EXPECT_THAT(status.message(), HasSubstr(value));
  EXPECT_THAT(status.message(), HasSubstr("allowed"));
}

TEST(Geometry, RefusalsNameFieldValueAndAllowed) {
  Geometry g = kLlama;
  g.layers = 0, ExpectRefused(g, "layers", "0");
  g = kLlama, g.layers = 513, ExpectRefused(g, "layers", "513");
  g = kLlama, g.kv_heads = -1, ExpectRefused(g, "kv_heads", "-1");
  g = kLlama, g.kv_heads = 257, ExpectRefused(g, "kv_heads", "257");
  g = kLlama, g.query_heads = 30, ExpectRefused(g, "query_heads", "30");
  g = kLlama, g.query_heads = 0, ExpectRefused(g, "query_heads", "0");
  g = kLlama, g.query_heads = 1 << 30, ExpectRefused(g, "query_heads", "1073741824");
  g = kLlama, g.head_dim = 96, ExpectRefused(g, "head_dim", "96");
  g = kLlama, g.page_tokens = 8, ExpectRefused(g, "page_tokens", "8");
  g = kLlama, g.dtype = static_cast<DType>(9), ExpectRefused(g, "dtype", "9");
}

TEST(PageLayout, EveryRowOfAPageHasItsOwnBytes) {
  const Geometry g{3, 4, 2, 64, 16, DType::kF16};
  const PageLayout p = PageLayout::Of(g);
  std::set<int64_t> offsets;
  for (int layer = 0; layer < 3; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int slot = 0; slot < 16; ++slot) {
        offsets.insert(p.KeyOffset(layer, head, slot));
        offsets.insert(p.ValueOffset(layer, head, slot));
      }
    }
  }
  EXPECT_EQ(offsets.size(), 3u * 2 * 2 * 16);
  EXPECT_EQ(*offsets.begin(), 0);
  EXPECT_EQ(*offsets.rbegin(), g.page_bytes() - g.row_bytes());
}

TEST(IndexLayout, QuestBlock) {
  const int32_t units[] = {16};
  const IndexLayout index = MakeIndexLayout(IndexLayout::Kind::kMinMax, kLlama, units, 1);
  EXPECT_EQ(index.block_tokens, 512);
  EXPECT_EQ(index.levels[0].units_per_block, 32);
  EXPECT_EQ(index.fields, 2);
  EXPECT_EQ(index.dtype, DType::kBF16);
  EXPECT_EQ(index.block_bytes, int64_t{32} * 2 * 8 * 32 * 256);
  EXPECT_EQ(index.BlocksFor(1025), 3);
  EXPECT_EQ(index.UnitsFor(0, 1025), 64);
}

TEST(IndexLayout, ChessBlockCoversItsGrid) {
  const int32_t units[] = {32, 8, 8};
  const IndexLayout index = MakeIndexLayout(IndexLayout::Kind::kMean, kLlama, units, 3);
  EXPECT_EQ(index.block_tokens, 2048);
  EXPECT_EQ(index.levels[0].units_per_block, 64);
  EXPECT_EQ(index.levels[1].unit_tokens, 256);
  EXPECT_EQ(index.levels[1].units_per_block, 8);
  EXPECT_EQ(index.levels[2].units_per_block, 1);
  EXPECT_EQ(index.levels[1].offset, int64_t{32} * 8 * 64 * 256);
  EXPECT_EQ(index.block_bytes, int64_t{32} * 8 * 73 * 256);
}

TEST(IndexLayout, BlockIsTheSmallestMultipleOfTheCoarsestUnit) {
  const auto tokens = [](int32_t unit) {
    return MakeIndexLayout(IndexLayout::Kind::kMean, kLlama, &unit, 1).block_tokens;
  };
  EXPECT_EQ(tokens(16), 512);
  EXPECT_EQ(tokens(48), 528);
  EXPECT_EQ(tokens(511), 1022);
  EXPECT_EQ(tokens(512), 512);
  EXPECT_EQ(tokens(513), 513);
}

TEST(IndexLayout, RowsFillTheBlockWithoutOverlap) {
  const Geometry g{2, 4, 2, 64, 16, DType::kF32};
  const int32_t units[] = {16, 3};
  const IndexLayout index = MakeIndexLayout(IndexLayout::Kind::kMean, g, units, 2);
  std::set<int64_t> offsets;
  for (int level = 0; level < 2; ++level) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int u = 0; u < index.levels[level].units_per_block; ++u) {
          offsets.insert(index.RowOffset(level, layer, 0, head, u));
        }
      }
    }
  }
  const int64_t row = 64 * 2;  // means are bf16 whatever the keys are
  EXPECT_EQ(offsets.size(), 4u * (33 + 11));
  EXPECT_EQ(*offsets.rbegin(), static_cast<int64_t>(offsets.size() - 1) * row);
  EXPECT_GE(index.block_bytes, static_cast<int64_t>(offsets.size()) * row);
  EXPECT_EQ(index.block_bytes % 64, 0);
}

TEST(IndexLayout, CoarseRowsAreFurtherFields) {
  const int32_t unit = 16;
  const auto layout = [&](IndexLayout::Kind kind, DType dtype, bool coarse) {
    const Geometry g{2, 4, 2, 64, 16, dtype};
    return MakeIndexLayout(kind, g, &unit, 1, coarse);
  };
  const auto minmax = IndexLayout::Kind::kMinMax, mean = IndexLayout::Kind::kMean;
  const IndexLayout none = layout(minmax, DType::kF16, false);
  const IndexLayout means = layout(minmax, DType::kF16, true);
  EXPECT_EQ(means.fields, 4);
  EXPECT_EQ(means.key_mean, 2);
  EXPECT_EQ(means.value_mean, 3);
  EXPECT_EQ(means.block_bytes, 2 * none.block_bytes);
  EXPECT_EQ(means.Rows(nullptr, 0, 0, 2, 0).dtype, DType::kBF16);
  EXPECT_EQ(means.Rows(nullptr, 0, 0, 1, 0).dtype, DType::kF16);
  EXPECT_FALSE(none == means);
  const IndexLayout wide = layout(minmax, DType::kF32, true);
  EXPECT_EQ(wide.Rows(nullptr, 0, 0, wide.value_mean, 0).dtype, DType::kF32);
  const IndexLayout shared = layout(mean, DType::kF32, true);
  EXPECT_EQ(shared.key_mean, 0);  // what the selector ranks by
  EXPECT_EQ(shared.fields, 2);
}

TEST(IndexLayout, GroupsOfBitsFillTheBlock) {
  const IndexLayout index = MakeBitsLayout(kLlama, 2, 64);
  EXPECT_EQ(index.kind, IndexLayout::Kind::kBits);
  EXPECT_EQ(index.block_tokens, 512);
  EXPECT_EQ(index.row_bytes(), 4 * 128 + 64 * 128 * 2 / 8);
  EXPECT_EQ(index.block_bytes, int64_t{32} * 8 * 8 * index.row_bytes());
  std::set<int64_t> offsets;
  for (int layer = 0; layer < 32; ++layer) {
    for (int head = 0; head < 8; ++head) {
      for (int u = 0; u < 8; ++u) offsets.insert(index.RowOffset(0, layer, 0, head, u));
    }
  }
  EXPECT_EQ(offsets.size(), size_t{32} * 8 * 8);
  EXPECT_EQ(*offsets.rbegin(), index.block_bytes - index.row_bytes());
  EXPECT_EQ(index.RowOffset(0, 0, 0, 0, 1), index.row_bytes()) << "groups of a head are together";
  // 7 to 9 % of keys and values in 16 bits.
  const double share = static_cast<double>(index.block_bytes) / index.block_tokens /
                       (static_cast<double>(kLlama.page_bytes()) / kLlama.page_tokens);
  EXPECT_NEAR(share, 2.0 / 32 + 1.0 / 64, 1e-9);
}

// It is found by the last page that it covers.
TEST(IndexLayout, BlocksOfBitsEndWithPages) {
  for (int32_t page : {16, 32, 64}) {
    for (int32_t unit = 16; unit <= 256; unit += 16) {
      Geometry g = kLlama;
      g.page_tokens = page;
      const IndexLayout index = MakeBitsLayout(g, 2, unit);
      EXPECT_EQ(index.block_tokens % page, 0) << page << " " << unit;
      EXPECT_EQ(index.block_tokens, index.levels[0].units_per_block * unit) << page << " " << unit;
      EXPECT_GE(index.block_tokens, 512);
      EXPECT_LE(index.block_tokens, 1024 + 512);
    }
  }
}

TEST(IndexLayout, EqualityComparesWhatIsUsed) {
  const int32_t units[] = {32, 8, 8}, other[] = {32, 8, 4};
  const IndexLayout a = MakeIndexLayout(IndexLayout::Kind::kMean, kLlama, units, 3);
  IndexLayout b = a;
  EXPECT_TRUE(a == b);
  b.levels[2].offset += 64;
  EXPECT_FALSE(a == b);
  EXPECT_FALSE(a == MakeIndexLayout(IndexLayout::Kind::kMean, kLlama, other, 3));
  IndexLayout c = MakeIndexLayout(IndexLayout::Kind::kMean, kLlama, units, 2), d = c;
  d.levels[2].unit_tokens = 77;  // beyond level_count
  EXPECT_TRUE(c == d);
  EXPECT_FALSE(MakeBitsLayout(kLlama, 2, 64) == MakeBitsLayout(kLlama, 3, 64));
  EXPECT_FALSE(MakeBitsLayout(kLlama, 2, 64) == MakeBitsLayout(kLlama, 2, 32));
  EXPECT_TRUE(MakeBitsLayout(kLlama, 2, 64) == MakeBitsLayout(kLlama, 2, 64));
  EXPECT_TRUE(MakeIndexLayout(IndexLayout::Kind::kNone, kLlama, nullptr, 0) == IndexLayout{});
}

}  // namespace
}  // namespace kvstrata
