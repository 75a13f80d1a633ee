// SPDX-License-Identifier: Apache-2.0
// The importer over a store in this process: what it copies, and what it refuses.
#include "server/work/importer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/segment/segmenter.h"
#include "tests/server/importer_fixture.h"

namespace kvstrata {
namespace {

namespace fake_gpu = testing::fake_gpu;
using testing::BlockLayout;
using testing::BlockShape;
using ::testing::HasSubstr;
using testing::Ids;
using testing::kBlockLayouts;
using testing::kBlocks;
using testing::kGeometry;
using testing::Lender;
using testing::LentBlocks;
using testing::RowOf;
using testing::Scattered;
using testing::ShapeOf;
using testing::TensorOf;

// --- what is copied ------------------------------------------------------------------------------

struct CopyCase {
  BlockLayout layout;
  int32_t block_tokens, page_tokens;
  bool gpu;
  friend void PrintTo(const CopyCase& c, std::ostream* out) {
    *out << c.layout.name << ", blocks of " << c.block_tokens << ", pages of " << c.page_tokens
         << (c.gpu ? ", cudaIpc" : ", memfd");
  }
};
std::vector<CopyCase> CopyCases() {
  std::vector<CopyCase> cases;
  for (const BlockLayout& layout : kBlockLayouts) {
    for (const auto& [block, page] : {std::pair(16, 16), {8, 16}, {64, 16}, {16, 32}}) {
      for (const bool gpu : {false, true}) cases.push_back({layout, block, page, gpu});
    }
  }
  return cases;
}

class ImportedTensorsTest : public ::testing::TestWithParam<CopyCase> {};
INSTANTIATE_TEST_SUITE_P(All, ImportedTensorsTest, ::testing::ValuesIn(CopyCases()));

TEST_P(ImportedTensorsTest, ScatteredBlocksBecomePagesBitByBit) {
  const CopyCase& c = GetParam();
  ImporterOptions options;
  if (c.gpu) options.devices = {{&fake_gpu::Ops(), 0}};
  const BlockShape shape = ShapeOf(c.block_tokens);
  LentBlocks blocks(shape, c.layout);
  Lender lender(512, options, c.page_tokens);
  lender.RegisterAll(blocks, c.gpu);
  const std::vector<int32_t> at = Scattered(shape);
  constexpr int32_t kTokens = 640;
  blocks.Put(at, kTokens, RowOf);
  const std::vector<int32_t> ids = Ids(kTokens);
  const OpenedSequence s = lender.Open("full", ids);
  // In pieces of one to three blocks, as decoding fills them.
  for (int32_t b = 0, n = 0; b < kTokens / c.block_tokens; b += n) {
    n = std::min(b % 3 + 1, kTokens / c.block_tokens - b);
    const Status sealed = lender.Seal(
        s.sequence, static_cast<uint32_t>(b * c.block_tokens), {at.begin() + b, at.begin() + b + n},
        {ids.begin() + b * c.block_tokens, ids.begin() + (b + n) * c.block_tokens});
    ASSERT_TRUE(sealed.ok()) << sealed.ToString();
  }
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), static_cast<uint32_t>(kTokens));
  EXPECT_EQ(lender.Differing(s.sequence, kTokens), 0);
  EXPECT_EQ(lender.store().inspection().Show(s.sequence)->pages.front().tier, Tier::kHost);
  lender.ExpectClean();
}

TEST(ImporterTest, AnotherSessionFindsPagesAndIndex) {
  for (const char* plan : {"quest", "chess"}) {
    SCOPED_TRACE(plan);
    LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
    Lender lender;
    lender.RegisterAll(blocks);
    const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(1040);
    blocks.Put(at, 1040, RowOf);
    const OpenedSequence s = lender.Open(plan, ids);
    for (uint32_t first = 0; first < 1040; first += 208) {
      ASSERT_TRUE(lender
                      .Seal(s.sequence, first,
                            {at.begin() + first / 16, at.begin() + first / 16 + 13},
                            {ids.begin() + first, ids.begin() + first + 208})
                      .ok());
    }
    ASSERT_TRUE(lender.Settle(s.sequence).ok());
    uint64_t model = 0;
    const uint64_t other = lender.OpenSession(&model);
    const Result<OpenedSequence> hit =
        lender.store().openings().OpenSequence(other, model, plan, ids);
    ASSERT_TRUE(hit.ok()) << hit.status().ToString();
    EXPECT_EQ(hit->held_tokens, 1024u);
    EXPECT_FALSE(hit->imported);
    EXPECT_EQ(lender.Differing(hit->sequence, 1024), 0);
    const IndexLayout index = IndexOf(hit->plan, kGeometry);
    const auto whole = static_cast<uint32_t>(1024 / index.block_tokens * index.block_tokens);
    EXPECT_EQ(hit->indexed_tokens, whole);
    // The index is what the segmenter makes of the same rows at once, incomplete blocks too.
    const SequenceDetail detail = *lender.store().inspection().Show(s.sequence);
    std::vector<std::byte*> pages, built;
    for (size_t i = 0; i < 65; ++i) {
      pages.push_back(const_cast<std::byte*>(lender.AddressOf(detail.pages[i])));
    }
    std::vector<std::vector<std::byte>> memory(
        static_cast<size_t>(index.BlocksFor(1040)),
        std::vector<std::byte>(static_cast<size_t>(index.block_bytes)));
    for (auto& block : memory) built.push_back(block.data());
    SequenceView view;
    view.pages = pages.data();
    view.index_blocks = built.data();
    view.tokens = 1040;
    SegmenterOf(hit->plan.segmenter())
        .Update(kGeometry, index, view, 0, 1040, Backends().front(), InlineExecutor());
    ASSERT_GE(detail.index_blocks.size(), built.size());
    for (size_t b = 0; b < built.size(); ++b) {
      EXPECT_EQ(std::memcmp(lender.AddressOf(detail.index_blocks[b]), built[b],
                            static_cast<size_t>(index.block_bytes)),
                0)
          << "index block " << b;
    }
    lender.ExpectClean();
  }
}

// Pages that the CPU cannot reach are filled through the host.
TEST(ImporterTest, SpillsToTheDevicePoolWhenHostIsFull) {
  LentBlocks blocks(ShapeOf(8), kBlockLayouts[1]);
  Lender lender(8);
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(320);
  blocks.Put(at, 320, RowOf);
  const OpenedSequence s = lender.Open("quest", ids);
  for (uint32_t first = 0; first < 320; first += 8) {
    ASSERT_TRUE(lender
                    .Seal(s.sequence, first, {at[first / 8]},
                          {ids.begin() + first, ids.begin() + first + 8})
                    .ok());
  }
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(lender.store().inspection().Show(s.sequence)->pages[19].tier, Tier::kDevice);
  EXPECT_EQ(lender.Differing(s.sequence, 320), 0);
  lender.ExpectClean();
}

TEST(ImporterTest, GoesOnBehindAPrefixHit) {
  LentBlocks blocks(ShapeOf(64), kBlockLayouts[0]);  // larger than a page: the hit ends inside one
  Lender lender;
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape());
  std::vector<int32_t> ids = Ids(128);
  blocks.Put(at, 128, RowOf);
  const OpenedSequence first = lender.Open("full", ids);
  ASSERT_TRUE(lender.Seal(first.sequence, 0, {at[0]}, {ids.begin(), ids.begin() + 64}).ok());
  ASSERT_TRUE(lender.Settle(first.sequence).ok());
  ids.resize(40);
  const OpenedSequence hit = lender.Open("full", ids);
  EXPECT_EQ(hit.held_tokens, 32u);
  ids = Ids(128);
  ASSERT_TRUE(lender.Seal(hit.sequence, 0, {at[0], at[1]}, ids).ok());
  ASSERT_TRUE(lender.Settle(hit.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(hit.sequence), 128u);
  EXPECT_EQ(lender.Differing(hit.sequence, 128), 0);
  // What contradicts the hit is another prompt's.
  const OpenedSequence again = lender.Open("full", Ids(40));
  std::vector<int32_t> wrong = Ids(64);
  wrong[31] = 7;
  EXPECT_EQ(lender.Seal(again.sequence, 0, {at[0]}, wrong).reason(), "BLOCKS_TOKENS");
  lender.ExpectClean();
}

// --- what is refused -----------------------------------------------------------------------------

TEST(ImporterTest, RefusesTensorsThatCannotBe) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]),
      open_ended(ShapeOf(16), kBlockLayouts[0], false);
  struct Case {
    const char* reason;
    std::string says;
    std::function<void(LentTensor*)> spoil;
  };
  const auto row = kGeometry.row_bytes();
  const Case cases[] = {
      {"TENSOR_DTYPE", "keys.dtype is 1", [](LentTensor* t) { t->layout.dtype = 1; }},
      {"TENSOR_SHAPE", "keys.heads is 3", [](LentTensor* t) { t->layout.heads = 3; }},
      {"TENSOR_SHAPE", "keys.head_dim is 128", [](LentTensor* t) { t->layout.head_dim = 128; }},
      {"TENSOR_SHAPE", "keys.blocks is 0", [](LentTensor* t) { t->layout.blocks = 0; }},
      {"TENSOR_SHAPE", "keys.blocks is -1", [](LentTensor* t) { t->layout.blocks = -1; }},
      {"TENSOR_SHAPE", "keys.block_tokens is 24",
       [](LentTensor* t) { t->layout.block_tokens = 24; }},
      {"TENSOR_SHAPE", "values.block_tokens is 16",
       [](LentTensor* t) { t->layout.block_tokens = 8; }},
      {"TENSOR_STRIDE", "keys.block_stride is -4096",
       [](LentTensor* t) { t->layout.block_stride = -4096; }},
      {"TENSOR_STRIDE", "keys.slot_stride is 127",
       [=](LentTensor* t) { t->layout.slot_stride = row - 1; }},
      {"TENSOR_STRIDE", "keys.head_stride is 129",
       [=](LentTensor* t) { t->layout.head_stride = row + 1; }},
      {"TENSOR_STRIDE", "keys.head_stride is 1099511627778",
       [](LentTensor* t) { t->layout.head_stride = (int64_t{1} << 40) + 2; }},
      {"TENSOR_OFFSET", "keys.offset is 18446744073709551614",
       [](LentTensor* t) { t->layout.offset = ~uint64_t{1}; }},
      {"TENSOR_OFFSET", "keys.offset is 1 ", [](LentTensor* t) { t->layout.offset = 1; }},
      {"TENSOR_OFFSET", "the memory's",
       [](LentTensor* t) {
         ++t->layout.blocks;
         t->layout.block_stride = int64_t{1} << 40;
       }},
      {"TENSOR_OFFSET", "the memory's",
       [&](LentTensor* t) { t->layout.offset = blocks.bytes() - 128; }},
      {"TENSOR_HANDLE", "bytes is 1000000000000",
       [](LentTensor* t) { t->handle.bytes = 1000000000000; }},
      {"TENSOR_HANDLE", "no memfd", [](LentTensor* t) { t->handle.fd = STDIN_FILENO; }},
      {"TENSOR_HANDLE", "F_SEAL_SHRINK", [&](LentTensor* t) { t->handle.fd = open_ended.fd(); }},
      {"TENSOR_KIND", "kind is 2", [](LentTensor* t) { t->handle.kind = TensorKind::kCudaFd; }},
  };
  Lender lender;
  for (const Case& c : cases) {
    LentTensor keys = TensorOf(blocks, 0, 0);
    c.spoil(&keys);
    const Status status =
        lender.lending()->Register(lender.model(), 0, keys, TensorOf(blocks, 0, 1));
    EXPECT_EQ(status.reason(), c.reason) << c.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
  const auto reg = [&](int32_t layer) {
    return lender.lending()->Register(lender.model(), layer, TensorOf(blocks, 0, 0),
                                      TensorOf(blocks, 0, 1));
  };
  EXPECT_EQ(reg(2).reason(), "TENSOR_LAYER");
  EXPECT_EQ(reg(-1).reason(), "TENSOR_LAYER");
  EXPECT_TRUE(reg(0).ok());
  EXPECT_EQ(reg(0).reason(), "TENSORS_REGISTERED");
  LentTensor foreign = fake_gpu::TensorOf(blocks, 0, 0);
  PeerIdentity stranger;
  stranger.uid = geteuid() + 1;
  const auto strangers = lender.importer().NewSession(lender.session(), 0, stranger);
  EXPECT_EQ(strangers->Register(lender.model(), 1, foreign, foreign).reason(), "TENSOR_IPC_USER");
  EXPECT_EQ(strangers->Register(99, 1, TensorOf(blocks, 0, 0), TensorOf(blocks, 0, 1)).reason(),
            "MODEL_UNKNOWN");
}

TEST(ImporterTest, RefusesBlocksThatCannotBe) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender;
  ASSERT_TRUE(lender.lending()
                  ->Register(lender.model(), 0, TensorOf(blocks, 0, 0), TensorOf(blocks, 0, 1))
                  .ok());
  const std::vector<int32_t> ids = Ids(64);
  const OpenedSequence s = lender.Open("full", ids);
  const std::vector<int32_t> one(ids.begin(), ids.begin() + 16);
  EXPECT_THAT(std::string(lender.Seal(s.sequence, 0, {0}, one).message()), HasSubstr("layer 1"));
  ASSERT_TRUE(lender.lending()
                  ->Register(lender.model(), 1, TensorOf(blocks, 1, 0), TensorOf(blocks, 1, 1))
                  .ok());
  EXPECT_EQ(lender.Seal(s.sequence, 0, {kBlocks}, one).reason(), "BLOCK_UNKNOWN");
  EXPECT_EQ(lender.Seal(s.sequence, 0, {-1}, one).reason(), "BLOCK_UNKNOWN");
  EXPECT_EQ(lender.Seal(s.sequence, 0, {0, 1}, one).reason(), "BLOCKS_TOKENS");
  EXPECT_EQ(lender.Seal(s.sequence, 16, {0}, one).reason(), "BLOCKS_OUT_OF_ORDER");
  EXPECT_EQ(lender.Seal(s.sequence, 8, {0}, one).reason(), "BLOCKS_OUT_OF_ORDER");
  EXPECT_EQ(lender.Seal(99, 0, {0}, one).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 0u);
  // The session may not do by itself what the daemon does for it.
  EXPECT_EQ(lender.store().steps().Grow(lender.session(), s.sequence, 80, 0, 0).reason(),
            "SEQUENCE_IMPORTED");
  EXPECT_EQ(lender.store().steps().Commit(lender.session(), s.sequence, 0, one, 0).reason(),
            "SEQUENCE_IMPORTED");
  EXPECT_EQ(lender.store().sequences().ForkSequence(lender.session(), s.sequence).status().reason(),
            "SEQUENCE_IMPORTED");
  lender.ExpectClean();
}

TEST(ImporterTest, SealedTwiceIsCopiedOnce) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender;
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(48);
  blocks.Put(at, 48, RowOf);
  const OpenedSequence s = lender.Open("full", ids);
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {at[0], at[1]}, {ids.begin(), ids.begin() + 32}).ok());
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  // The engine has its blocks back: what is in them now belongs to somebody else.
  std::memset(blocks.data(), 0xFF, blocks.bytes());
  blocks.Put({at[3], at[4], at[2]}, 48, RowOf);
  EXPECT_TRUE(lender.Seal(s.sequence, 0, {at[0], at[1]}, {ids.begin(), ids.begin() + 32}).ok());
  EXPECT_TRUE(lender.Seal(s.sequence, 16, {at[1], at[2]}, {ids.begin() + 16, ids.end()}).ok());
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 48u);
  EXPECT_EQ(lender.Differing(s.sequence, 48), 0);
  std::vector<int32_t> other(ids.begin() + 32, ids.end());
  other[5] = -3;
  const Status refused = lender.Seal(s.sequence, 32, {at[2]}, other);
  EXPECT_EQ(refused.reason(), "BLOCKS_TOKENS");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("position 37"));
}

}  // namespace
}  // namespace kvstrata
