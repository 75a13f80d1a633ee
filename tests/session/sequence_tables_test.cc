// SPDX-License-Identifier: Apache-2.0
#include "session/sequence_tables.h"

#include "gtest/gtest.h"
#include "tests/fakes/table_memory.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

class SequenceTablesTest : public ::testing::Test {
 protected:
  // A sequence of `tokens` tokens in a table of `pages` pages.
  std::unique_ptr<SessionSequence> Sequence(uint32_t slot, uint32_t tokens, uint32_t pages) {
    published_.Publish(slot, 10 + slot, pages);
    return SequenceOf(slot, 10 + slot, tokens);
  }
  // A claim for one more token.
  static TableClaim Next(SessionSequence* s) { return {s, s->state->tokens() + 1}; }
  Status Enter(std::vector<TableClaim> claims, int32_t* codes = nullptr) {
    return tables_.Enter(claims, codes).status();
  }
  shm::PageEntry& Page(uint32_t slot, uint32_t page) {
    return shm::Entries(published_.table(slot))[page];
  }

  PublishedTables published_;
  FakeMemory memory_;
  SequenceTables tables_{&memory_, published_.reader()};
};

TEST_F(SequenceTablesTest, AddressesAreThoseOfTheTableAndResolvedOnce) {
  const auto s = Sequence(0, 40, 4);
  {
    const TableClaim claim = Next(s.get());
    auto entered = tables_.Enter({&claim, 1}, nullptr);
    ASSERT_TRUE(entered.ok()) << entered.status().ToString();
    EXPECT_EQ(published_.readers(), 1);
    const SequenceView view = s->View();
    EXPECT_EQ(view.version, 1u);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(view.pages[i], memory_.base + i) << i;
  }
  EXPECT_EQ(published_.readers(), 0);
  EXPECT_EQ(memory_.asked_bytes, static_cast<uint64_t>(kSmall.page_bytes()));
  EXPECT_EQ(memory_.resolved, 4);
  // The store fills entries beyond the count, in the same version: these alone are new.
  Page(0, 4) = {1, 0, 0, 4};
  published_.table(0)->pages = 5;
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ(memory_.resolved, 5);
  EXPECT_EQ(s->pages.size(), 5u);
  // Another version is another table.
  published_.Publish(0, 10, 5);
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ(memory_.resolved, 10);
  EXPECT_EQ(memory_.grown, 0);
}

TEST_F(SequenceTablesTest, PagesThatWereGivenBackHaveNoAddress) {
  const auto s = Sequence(0, 40, 4);
  Page(0, 1) = {0, shm::kPageAbsent, 0, 0};
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ(s->View().pages[1], nullptr);
  EXPECT_NE(s->View().pages[2], nullptr);
}

TEST_F(SequenceTablesTest, AGpuIsToldWhichPagesAreTheHosts) {
  const auto s = Sequence(0, 40, 4);
  Page(0, 2).tier = 1;
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ(s->View().host_pages, nullptr);
  memory_.gpu = true;
  published_.table(0)->version = 2;
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ((std::vector<uint8_t>(s->View().host_pages, s->View().host_pages + 4)),
            (std::vector<uint8_t>{0, 0, 1, 0}));
}

TEST_F(SequenceTablesTest, ATableIsGrownWhereTheClaimDoesNotHold) {
  const auto s = Sequence(0, 40, 3);
  int readers = -1;
  memory_.grow = [&](const TableClaim& claim) {
    readers = published_.readers();
    published_.Publish(0, 10, static_cast<uint32_t>(claim.tokens_after + 15) / 16);
    return OkStatus();
  };
  ASSERT_TRUE(Enter({{s.get(), 48}}).ok());
  EXPECT_EQ(memory_.grown, 0);
  ASSERT_TRUE(Enter({{s.get(), 100}}).ok());
  EXPECT_EQ(memory_.grown, 1);
  EXPECT_EQ(readers, 0) << "the store may need what the epoch keeps";
  EXPECT_EQ(s->pages.size(), 7u);
  // What is shared is not written; behind what is committed nothing may be.
  Page(0, 1).flags = shm::kPageSealed;
  ASSERT_TRUE(Enter({{s.get(), 48}}).ok());
  EXPECT_EQ(memory_.grown, 1);
  Page(0, 2).flags = shm::kPageShared;
  ASSERT_TRUE(Enter({{s.get(), 40}}).ok());
  EXPECT_EQ(memory_.grown, 1);
  ASSERT_TRUE(Enter({{s.get(), 41}}).ok());
  EXPECT_EQ(memory_.grown, 2);
}

TEST_F(SequenceTablesTest, ATableThatStaysShortIsAnError) {
  const auto s = Sequence(0, 40, 3);
  EXPECT_EQ(Enter({{s.get(), 100}}).reason(), "TABLE_NOT_GROWN");
  EXPECT_EQ(memory_.grown, 4);
  EXPECT_EQ(published_.readers(), 0);
}

TEST_F(SequenceTablesTest, EachMemberThatFailsHasItsCode) {
  const auto good = Sequence(0, 40, 3), closed = Sequence(1, 40, 3), full = Sequence(2, 48, 3);
  published_.Close(1);
  memory_.grow = [](const TableClaim&) {
    return ResourceExhausted("POOL_EXHAUSTED", "on purpose");
  };
  std::vector<int32_t> codes(3, 0);
  const Status failed =
      Enter({Next(good.get()), Next(closed.get()), Next(full.get())}, codes.data());
  EXPECT_EQ(failed.reason(), "SEQUENCE_CLOSED");
  EXPECT_EQ(codes, (std::vector<int32_t>{0, 5, 8}));
  EXPECT_EQ(published_.readers(), 0);
  EXPECT_EQ(Enter({Next(full.get()), Next(good.get())}, nullptr).reason(), "POOL_EXHAUSTED");
}

TEST_F(SequenceTablesTest, ATableThatBreaksBoundsIsLostData) {
  const auto s = Sequence(0, 40, 3);
  published_.table(0)->page_capacity = 1u << 30;
  const Status failed = Enter({Next(s.get())});
  EXPECT_EQ(failed.code(), Code::kDataLoss);
  EXPECT_EQ(failed.reason(), "TABLE_INVALID");
}

TEST_F(SequenceTablesTest, ALoadThatFailedIsTakenUpAgain) {
  const auto s = Sequence(0, 40, 3);
  Page(0, 2).arena = 2;
  EXPECT_EQ(Enter({Next(s.get())}).reason(), "ARENA_UNKNOWN");
  Page(0, 2).arena = 1;
  ASSERT_TRUE(Enter({Next(s.get())}).ok());
  EXPECT_EQ(memory_.resolved, 3);
  EXPECT_EQ(s->pages.size(), 3u);
  EXPECT_EQ(s->host_pages.size(), 3u);
}

TEST_F(SequenceTablesTest, StepsHaveALimit) {
  const auto s = Sequence(0, 40, 3);
  const TableClaim claim = Next(s.get());
  std::vector<SequenceTables::EnteredEpoch> steps;
  for (int i = 0; i < shm::kMaxReaders; ++i) {
    steps.push_back(std::move(tables_.Enter({&claim, 1}, nullptr)).value());
  }
  EXPECT_EQ(Enter({claim}).reason(), "STEPS_OPEN");
  steps.pop_back();
  EXPECT_TRUE(Enter({claim}).ok());
}

TEST_F(SequenceTablesTest, ATruncationThatIsAskedForIsNoMoreThanThereIs) {
  const auto s = Sequence(0, 40, 3);
  EXPECT_EQ(tables_.TruncateTo(*s), std::nullopt);
  published_.tables()->slots[0].truncate_to = 1 + 33;
  EXPECT_EQ(tables_.TruncateTo(*s), 33u);
  published_.tables()->slots[0].truncate_to = 1 + 50;
  EXPECT_EQ(tables_.TruncateTo(*s), 40u);
}

}  // namespace
}  // namespace kvstrata::test
