// SPDX-License-Identifier: Apache-2.0
// The importer when copies fail, hang or are no longer wanted.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "server/work/importer.h"
#include "server/work/tensor_releases.h"
#include "tests/server/importer_fixture.h"

namespace kvstrata {
namespace {

using namespace std::chrono_literals;
namespace fake_gpu = testing::fake_gpu;
using testing::Gate;
using testing::Ids;
using testing::kBlockLayouts;
using testing::kBlocks;
using testing::Lender;
using testing::LentBlocks;
using testing::RowOf;
using testing::Scattered;
using testing::ShapeOf;

TEST(ImporterTest, AFailedCopyIsToldOnceAndCanBeSealedAgain) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender(16);  // and 1 MiB of the device: 64 pages
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(kBlocks * 16);
  blocks.Put(at, kBlocks * 16, RowOf);
  const OpenedSequence s = lender.Open("full", {});
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {at[0]}, {ids.begin(), ids.begin() + 16}).ok());
  ASSERT_TRUE(
      lender.Seal(s.sequence, 16, {at.begin() + 1, at.end()}, {ids.begin() + 16, ids.end()}).ok());
  EXPECT_EQ(lender.Settle(s.sequence).reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 16u);
  lender.ExpectClean();
  ASSERT_TRUE(lender.Seal(s.sequence, 16, {at[1]}, {ids.begin() + 16, ids.begin() + 32}).ok());
  EXPECT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 32u);
  EXPECT_EQ(lender.Differing(s.sequence, 32), 0);
  lender.ExpectClean();
}

// What is not finite, in any layer, side and row, ends what is kept: blocks before it are pages.
TEST(ImporterTest, ABlockThatIsNotFiniteEndsWhatIsKept) {
  struct Case {
    int32_t block_tokens, bad;  // the position
    int32_t layer;
    int side, head;
    uint16_t value;
  };
  for (const Case& c :
       {Case{16, 37, 1, 0, 1, 0x7FC0}, Case{16, 79, 0, 1, 0, 0xFF80}, Case{8, 37, 0, 0, 0, 0x7F80},
        Case{64, 70, 1, 1, 1, 0xFFC1}, Case{16, 3, 1, 1, 0, 0x7F80}}) {
    SCOPED_TRACE("blocks of " + std::to_string(c.block_tokens) + ", position " +
                 std::to_string(c.bad));
    LentBlocks blocks(ShapeOf(c.block_tokens), kBlockLayouts[0]);
    Lender lender;
    lender.RegisterAll(blocks);
    constexpr int32_t kTokens = 128;
    std::vector<int32_t> at = Scattered(blocks.shape());
    at.resize(static_cast<size_t>(kTokens / c.block_tokens));
    const std::vector<int32_t> ids = Ids(kTokens);
    const auto put = [&](bool bad) {
      blocks.Put(at, kTokens, [&](int32_t layer, int side, int32_t head, int32_t p, std::byte* to) {
        RowOf(layer, side, head, p, to);
        const bool here = layer == c.layer && side == c.side && head == c.head && p == c.bad;
        if (bad && here) std::memcpy(to + 2 * 9, &c.value, 2);
      });
    };
    put(true);
    const OpenedSequence s = lender.Open("full", ids);
    ASSERT_TRUE(lender.Seal(s.sequence, 0, at, ids).ok());
    const Status failed = lender.Settle(s.sequence);
    EXPECT_EQ(failed.reason(), "TENSOR_NOT_FINITE");
    const auto block = static_cast<size_t>(c.bad / c.block_tokens);
    EXPECT_NE(failed.message().find("block " + std::to_string(at[block]) + ", position " +
                                    std::to_string(c.bad) + ": layer " + std::to_string(c.layer) +
                                    "'s " + (c.side == 0 ? "keys" : "values")),
              std::string::npos)
        << failed.ToString();
    const auto kept = static_cast<uint32_t>(block) * static_cast<uint32_t>(c.block_tokens);
    EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), kept);
    EXPECT_EQ(lender.Differing(s.sequence, static_cast<int32_t>(kept)), 0);
    uint64_t model = 0;
    const uint64_t other = lender.OpenSession(&model);
    EXPECT_EQ(lender.store().openings().OpenSequence(other, model, "full", ids)->held_tokens, kept);
    // Mended, it goes on from there.
    put(false);
    ASSERT_TRUE(lender.Seal(s.sequence, 0, at, ids).ok());
    EXPECT_TRUE(lender.Settle(s.sequence).ok());
    EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), static_cast<uint32_t>(kTokens));
    EXPECT_EQ(lender.Differing(s.sequence, kTokens), 0);
    lender.ExpectClean();
  }
}

TEST(ImporterTest, TooManyWaitingBlocksAreRefused) {
  ImporterOptions options;
  options.waiting_tokens = 64;
  options.devices = {{&fake_gpu::Ops(), 0}};
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender(512, options);
  lender.RegisterAll(blocks, true);
  const std::vector<int32_t> ids = Ids(80);
  blocks.Put({0, 1, 2, 3, 4}, 80, RowOf);
  const OpenedSequence s = lender.Open("full", ids);
  fake_gpu::copies.Shut();
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {0, 1, 2, 3}, {ids.begin(), ids.begin() + 64}).ok());
  ASSERT_TRUE(fake_gpu::copies.AwaitSomebody());
  EXPECT_EQ(lender.Seal(s.sequence, 64, {4}, {ids.begin() + 64, ids.end()}).reason(),
            "IMPORT_QUEUE");
  fake_gpu::copies.Open();
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_TRUE(lender.Seal(s.sequence, 64, {4}, {ids.begin() + 64, ids.end()}).ok());
  EXPECT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(lender.Differing(s.sequence, 80), 0);
}

// In the middle of a copy: a close, then the death of the session.
TEST(ImporterTest, NothingLeaksWhenTheEngineGoesInTheMiddleOfACopy) {
  ImporterOptions options;
  options.devices = {{&fake_gpu::Ops(), 0}};
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
    Lender lender(512, options);
    lender.RegisterAll(blocks, true);
    const std::vector<int32_t> ids = Ids(160);
    blocks.Put(Scattered(blocks.shape()), 160, RowOf);
    const OpenedSequence s = lender.Open("quest", ids);
    fake_gpu::copies.Shut();
    ASSERT_TRUE(lender.Seal(s.sequence, 0, Ids(10, 0), ids).ok());
    ASSERT_TRUE(fake_gpu::copies.AwaitSomebody());
    std::promise<Status> settled;
    lender.lending()->Settle(s.sequence, [&](const Status& status) { settled.set_value(status); });
    if (dies) {
      lender.lending().reset();
      lender.store().sessions().EndSession(lender.session(), SessionEnd::kDied);
    } else {
      lender.lending()->Closed(s.sequence);
      EXPECT_TRUE(lender.store().sequences().CloseSequence(lender.session(), s.sequence).ok());
    }
    EXPECT_EQ(settled.get_future().get().reason(), "SEQUENCE_CLOSED");
    lender.ExpectClean();
    EXPECT_NE(lender.UsedBytes(), 0u) << "pages that are being written were freed";
    fake_gpu::copies.Open();
    const auto end = std::chrono::steady_clock::now() + 10s;
    while (lender.UsedBytes() != 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    EXPECT_EQ(lender.UsedBytes(), 0u);
    lender.ExpectClean();
  }
}

TEST(ImporterTest, AReleaseThatHangsHoldsNobodyUp) {
  ImporterOptions options;
  options.devices = {{&fake_gpu::Ops(), 0}};
  const int before = fake_gpu::open;
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  {
    Lender lender(512, options);
    lender.RegisterAll(blocks, true);
    EXPECT_EQ(fake_gpu::open, before + 1) << "one memory is opened once";
    fake_gpu::releases.Shut();
    lender.lending().reset();  // returns at once
    EXPECT_TRUE(fake_gpu::releases.AwaitSomebody());
    PeerIdentity peer;
    peer.uid = geteuid();
    lender.lending() = lender.importer().NewSession(lender.session(), 0, peer);
    lender.RegisterAll(blocks, true);
    const std::vector<int32_t> ids = Ids(16);
    blocks.Put({0}, 16, RowOf);
    const OpenedSequence s = lender.Open("full", ids);
    ASSERT_TRUE(lender.Seal(s.sequence, 0, {0}, ids).ok());
    EXPECT_TRUE(lender.Settle(s.sequence).ok());
  }
  fake_gpu::releases.Open();
}

class CountedMemory final : public TensorMemory {
 public:
  CountedMemory(Gate* gate, std::atomic<int>* gone) : gate_(gate), gone_(gone) {}
  ~CountedMemory() override {
    if (gate_ != nullptr) gate_->Pass();
    ++*gone_;
  }
  Status Read(std::span<const Piece>, std::byte*) override { return OkStatus(); }

 private:
  Gate* const gate_;
  std::atomic<int>* const gone_;
};

TEST(TensorReleasesTest, WhatHangsIsGivenUpAndTheRestGoesOn) {
  Gate gate;
  std::atomic<int> gone{0};
  TensorReleases releases(0ms);
  gate.Shut();
  releases.Put(new CountedMemory(&gate, &gone));
  ASSERT_TRUE(gate.AwaitSomebody());
  for (int i = 0; i < 3; ++i) releases.Put(new CountedMemory(nullptr, &gone));
  EXPECT_EQ(gone, 0);
  EXPECT_EQ(releases.pending(), 4u);
  while (releases.GiveUpLate() == 0) std::this_thread::yield();
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (gone < 3 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(gone, 3);
  gate.Open();
  releases.Await(end);
  EXPECT_EQ(releases.pending(), 0u);
  EXPECT_EQ(releases.GiveUpLate(), 0u);
}

}  // namespace
}  // namespace kvstrata
