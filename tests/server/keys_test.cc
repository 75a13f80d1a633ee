// SPDX-License-Identifier: Apache-2.0
// Keys of sequences: one a user, free when its sequence goes, closed by any session of the user.
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

class KeysTest : public ::testing::Test {
 protected:
  ~KeysTest() override { ExpectClean(*store_); }
  static Result<OpenedSequence> Open(TestSession& session, std::string_view key) {
    return session.store()->sequences().GiveKey(session.id(), session.Open("full", Tokens(100)),
                                                key);
  }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(64, 0));
  TestSession worker_{store_.get()}, scheduler_{store_.get()};
};

TEST_F(KeysTest, AnotherSessionCloses) {
  const uint64_t sequence = Open(worker_, "a")->sequence;
  EXPECT_EQ(store_->inspection().Sequences(0).at(0).key, "a");
  ASSERT_TRUE(store_->sequences().CloseKey(scheduler_.id(), "a").ok());
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
  EXPECT_EQ(store_->sequences().CloseSequence(worker_.id(), sequence).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store_->sequences().CloseKey(scheduler_.id(), "a").reason(), "KEY_UNKNOWN");
}

TEST_F(KeysTest, AStepThatIsOpenKeepsWhatItReads) {
  TestSequence s = TestSequence::Prompt(&worker_, "full", Tokens(100));
  const OpenedSequence opened = s.opened();
  ASSERT_TRUE(store_->sequences().GiveKey(worker_.id(), opened, "a").ok());
  const int slot = worker_.reader().Enter();
  const shm::TableView table = s.Table();
  ASSERT_TRUE(store_->sequences().CloseKey(scheduler_.id(), "a").ok());
  for (const int tokens : {300, 150}) {  // that take what is free
    TestSequence other = TestSequence::Prompt(&scheduler_, "full", Tokens(tokens, tokens * 10));
    ASSERT_TRUE(other.Close().ok());
  }
  s.ExpectIntact(table);
  EXPECT_EQ(s.Table().table, nullptr);
  EXPECT_TRUE(worker_.reader().Closed(opened.slot, s.id()));
  worker_.reader().Leave(slot);
}

TEST_F(KeysTest, OneLiveSequenceOfAUserHasIt) {
  TestSession stranger(store_.get(), "uid:2");
  ASSERT_TRUE(Open(worker_, "a").ok());
  const Status refused = Open(scheduler_, "a").status();
  EXPECT_EQ(refused.reason(), "KEY_IN_USE");
  EXPECT_EQ(refused.code(), Code::kAlreadyExists);
  EXPECT_NE(refused.message().find("session " + std::to_string(worker_.id())), std::string::npos);
  EXPECT_EQ(store_->sequences().CloseKey(stranger.id(), "a").reason(), "KEY_UNKNOWN");
  EXPECT_TRUE(Open(stranger, "a").ok()) << "keys are a user's";
  EXPECT_EQ(store_->inspection().Sequences(0).size(), 2u) << "what was refused is closed again";
  store_->sessions().EndSession(worker_.id(), SessionEnd::kDied);
  EXPECT_TRUE(Open(scheduler_, "a").ok()) << "it goes with its session";
}

TEST_F(KeysTest, AForkHasNone) {
  const uint64_t sequence = Open(worker_, "a")->sequence;
  ASSERT_TRUE(store_->sequences().ForkSequence(worker_.id(), sequence).ok());
  ASSERT_TRUE(store_->sequences().CloseKey(scheduler_.id(), "a").ok());
  ASSERT_EQ(store_->inspection().Sequences(0).size(), 1u);
  EXPECT_EQ(store_->inspection().Sequences(0)[0].key, "");
}

// What the sequence's slot asks of its owner.
std::optional<uint32_t> AskedOf(TestSession& owner, const OpenedSequence& s) {
  return owner.reader().TruncateTo(s.slot, s.sequence);
}

TEST_F(KeysTest, AnotherSessionTruncates) {
  TestSession stranger(store_.get(), "uid:2");
  TestSequence s = TestSequence::Prompt(&worker_, "full", Tokens(100));
  const OpenedSequence opened = s.opened();
  ASSERT_TRUE(store_->sequences().GiveKey(worker_.id(), opened, "a").ok());
  const auto truncate = [&](uint32_t tokens) {
    return store_->sequences().TruncateKey(scheduler_.id(), "a", tokens);
  };
  EXPECT_EQ(store_->sequences().TruncateKey(stranger.id(), "a", 50).reason(), "KEY_UNKNOWN");
  EXPECT_EQ(truncate(1000).reason(), "TRUNCATE_TOKENS");
  EXPECT_EQ(AskedOf(worker_, opened), std::nullopt);
  ASSERT_TRUE(truncate(60).ok());
  ASSERT_TRUE(truncate(50).ok());
  ASSERT_TRUE(truncate(70).ok());
  EXPECT_EQ(AskedOf(worker_, opened), 50u) << "the least";
  const auto cut = [&](uint32_t tokens) {
    return store_->sequences().Truncate(worker_.id(), s.id(), tokens, Tokens(tokens % 16));
  };
  ASSERT_TRUE(cut(51).ok());
  EXPECT_EQ(AskedOf(worker_, opened), 50u) << "that was not it";
  ASSERT_TRUE(cut(49).ok());
  EXPECT_EQ(AskedOf(worker_, opened), std::nullopt) << "so few are as good";
  ASSERT_TRUE(truncate(52).ok());
  EXPECT_EQ(AskedOf(worker_, opened), 52u) << "its owner may have so many, and not have told yet";
  ASSERT_TRUE(truncate(49).ok());
  EXPECT_EQ(AskedOf(worker_, opened), 49u) << "what it has not told yet goes too";
  ASSERT_TRUE(cut(49).ok());
  EXPECT_EQ(AskedOf(worker_, opened), std::nullopt);
}

TEST_F(KeysTest, AWishThatCannotBeDoneAnyMoreIsRefusedOnce) {
  TestSequence s = TestSequence::Prompt(&worker_, "full", Tokens(100));
  ASSERT_TRUE(store_->sequences().GiveKey(worker_.id(), s.opened(), "a").ok());
  ASSERT_TRUE(store_->sequences().TruncateKey(scheduler_.id(), "a", 48).ok());
  ASSERT_TRUE(store_->steps().PrefillDone(worker_.id(), s.id()).ok());
  EXPECT_EQ(store_->sequences().Truncate(worker_.id(), s.id(), 32, {}).reason(), "TRUNCATE_PROMPT");
  EXPECT_EQ(AskedOf(worker_, s.opened()), 48u);
  EXPECT_EQ(store_->sequences().Truncate(worker_.id(), s.id(), 48, {}).reason(), "TRUNCATE_PROMPT");
  EXPECT_EQ(AskedOf(worker_, s.opened()), std::nullopt);
  EXPECT_EQ(store_->sequences().TruncateKey(scheduler_.id(), "a", 48).reason(), "TRUNCATE_PROMPT");
}

TEST_F(KeysTest, OfARemoteOwnerTheDaemonKnowsAll) {
  TestSession remote(store_.get(), "uid:1", Transport::kRemote);
  TestSequence s = TestSequence::Prompt(&remote, "full", Tokens(100));
  ASSERT_TRUE(store_->sequences().GiveKey(remote.id(), s.opened(), "r").ok());
  EXPECT_EQ(store_->sequences().TruncateKey(scheduler_.id(), "r", 101).reason(), "TRUNCATE_TOKENS");
  ASSERT_TRUE(store_->sequences().TruncateKey(scheduler_.id(), "r", 100).ok());
}

TEST_F(KeysTest, AWishIsItsSequencesAlone) {
  TestSequence s = TestSequence::Prompt(&worker_, "full", Tokens(100));
  ASSERT_TRUE(store_->sequences().GiveKey(worker_.id(), s.opened(), "a").ok());
  ASSERT_TRUE(store_->sequences().TruncateKey(scheduler_.id(), "a", 48).ok());
  const OpenedSequence fork = *store_->sequences().ForkSequence(worker_.id(), s.id());
  EXPECT_EQ(AskedOf(worker_, fork), std::nullopt);
  EXPECT_EQ(AskedOf(worker_, s.opened()), 48u);
  ASSERT_TRUE(s.Close().ok());
  const OpenedSequence next = *worker_.Open("full", Tokens(100));
  EXPECT_EQ(next.slot, s.opened().slot);
  EXPECT_EQ(AskedOf(worker_, next), std::nullopt);
}

TEST_F(KeysTest, TextsThatAreNone) {
  for (const std::string& key : {std::string(64, 'k'), std::string("two\nlines")}) {
    EXPECT_EQ(Open(worker_, key).status().reason(), "KEY_TEXT");
  }
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
  EXPECT_TRUE(Open(worker_, std::string(63, 'k')).ok());
}

}  // namespace
}  // namespace kvstrata::testing
