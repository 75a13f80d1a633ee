// SPDX-License-Identifier: Apache-2.0
#include "session/session_sequence.h"

#include <numeric>

#include "gtest/gtest.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

std::vector<int32_t> Numbers(size_t n) {
  std::vector<int32_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

std::vector<uint8_t> BoundaryOf(const SessionSequence& s) {
  const InspectArray array =
      s.state->Inspect(s.View(), **FindBackend("ref"), InlineExecutor(), "boundary").value();
  const auto* const bytes = reinterpret_cast<const uint8_t*>(array.bytes.data());
  return {bytes, bytes + array.bytes.size()};
}

// Opened with 40 tokens, of which 32 are held and 16 indexed.
std::unique_ptr<SessionSequence> Opened(std::span<const uint8_t> boundary = {}) {
  auto s = std::make_unique<SessionSequence>();
  s->id = 3;
  s->model = 5;
  s->boundary_tokens = Ascending({20, 4});
  BeginState(kSmall, ParsePlan("quest{min_tokens = 0}").value(), Numbers(40),
             {32, 16, 32, boundary}, s.get());
  return s;
}

TEST(SessionSequence, AnOpenedOneBeginsWithWhatIsHeld) {
  const auto s = Opened();
  EXPECT_EQ(s->state->tokens(), 32);
  EXPECT_EQ(s->state->indexed_tokens(), 16);
  EXPECT_EQ(s->told_indexed, 16u);
  const std::span<const int32_t> tail = s->state->TailIds(20);
  EXPECT_EQ((std::vector<int32_t>(tail.begin(), tail.end())),
            (std::vector<int32_t>{16, 17, 18, 19}));
  std::vector<uint8_t> ends(32, 0);
  ends[4] = ends[20] = 1;
  EXPECT_EQ(BoundaryOf(*s), ends);
}

TEST(SessionSequence, SentenceEndsThatWereStoredReplaceThoseOfIds) {
  std::vector<uint8_t> stored(16, 0);
  stored[9] = 1;
  const auto s = Opened(stored);
  stored.resize(32, 0);
  stored[20] = 1;  // behind what is stored
  EXPECT_EQ(BoundaryOf(*s), stored);
}

TEST(SessionSequence, AForkIsItsParent) {
  const auto parent = Opened();
  SessionSequence fork;
  fork.id = 4;
  ASSERT_TRUE(BeginFork(*parent, {32, 16, 0, {}}, &fork).ok());
  EXPECT_EQ(fork.model, 5u);
  EXPECT_EQ(fork.boundary_tokens, parent->boundary_tokens);
  EXPECT_EQ(fork.state->tokens(), 32);
  EXPECT_EQ(fork.told_indexed, 16u);
  EXPECT_EQ(BoundaryOf(fork), BoundaryOf(*parent));
}

TEST(SessionSequence, AForkThatTheStoreHoldsOtherwiseIsRefused) {
  const auto parent = Opened();
  SessionSequence fork;
  EXPECT_EQ(BeginFork(*parent, {31, 16, 0, {}}, &fork).reason(), "FORK_DIVERGED");
  EXPECT_EQ(BeginFork(*parent, {32, 0, 0, {}}, &fork).reason(), "FORK_DIVERGED");
  // The store may have been told of more than the parent indexed itself.
  EXPECT_TRUE(BeginFork(*parent, {32, 32, 0, {}}, &fork).ok());
  EXPECT_EQ(fork.told_indexed, 32u);
}

TEST(SessionSequence, WhatTheStoreKnowsIsNotToldAgain) {
  const auto s = Opened();
  std::vector<std::pair<uint32_t, uint32_t>> told;
  const auto tell = [&](uint32_t first, uint32_t indexed) {
    told.emplace_back(first, indexed);
    return OkStatus();
  };
  EXPECT_TRUE(TellIndexed(s.get(), tell).ok());
  EXPECT_TRUE(told.empty());
  s->state->NoteIndexed(32);
  const auto refuse = [](uint32_t, uint32_t) { return NotFound("GONE", "on purpose"); };
  EXPECT_EQ(TellIndexed(s.get(), refuse).reason(), "GONE");
  EXPECT_TRUE(TellIndexed(s.get(), tell).ok());
  EXPECT_TRUE(TellIndexed(s.get(), tell).ok());
  EXPECT_EQ(told, (std::vector<std::pair<uint32_t, uint32_t>>{{32, 32}}));
}

TEST(SessionSequence, PagesThatAreFullAreSealedWhateverTheirTableSays) {
  PublishedTables published;
  published.Publish(0, 9, 4);
  shm::Entries(published.table(0))[1] = {0, shm::kPageAbsent, 0, 0};
  shm::Entries(published.table(0))[2].flags = shm::kPageShared;
  auto s = SequenceOf(0, 9, 40);
  s->table = published.reader().Read(0, 9);
  EXPECT_EQ(PageEntryOf(*s, 0).flags, shm::kPageSealed);
  EXPECT_EQ(PageEntryOf(*s, 1).flags, shm::kPageAbsent);
  EXPECT_EQ(PageEntryOf(*s, 2).flags, shm::kPageShared);  // eight of its tokens are there
  EXPECT_EQ(PageEntryOf(*s, 3).flags, 0);
  TakeBack(s.get(), 32);
  EXPECT_EQ(PageEntryOf(*s, 0).flags, shm::kPageSealed);
  TakeBack(s.get(), 15);
  EXPECT_EQ(PageEntryOf(*s, 0).flags, 0);
}

TEST(SessionSequence, IndexRowsOfTokensThatAreTakenBackAreToldAnew) {
  const auto s = Opened();
  TakeBack(s.get(), 20);
  EXPECT_EQ(s->state->tokens(), 20);
  EXPECT_EQ(s->told_indexed, 16u);
  TakeBack(s.get(), 5);
  EXPECT_EQ(s->state->tokens(), 5);
  EXPECT_EQ(s->told_indexed, 5u);
}

}  // namespace
}  // namespace kvstrata::test
