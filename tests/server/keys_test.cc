// Keys of sequences: one a user, free when its sequence goes, closed by any session of the user.
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

class KeysTest : public ::testing::Test {
 protected:
  ~KeysTest() override { ExpectClean(*store_); }
  static Result<OpenedSequence> Open(TestSession& session, std::string_view key) {
    return session.store()->GiveKey(session.id(), session.Open("full", Tokens(100)), key);
  }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(64, 0));
  TestSession worker_{store_.get()}, scheduler_{store_.get()};
};

TEST_F(KeysTest, AnotherSessionCloses) {
  const uint64_t sequence = Open(worker_, "a")->sequence;
  EXPECT_EQ(store_->Sequences(0).at(0).key, "a");
  ASSERT_TRUE(store_->CloseKey(scheduler_.id(), "a").ok());
  EXPECT_TRUE(store_->Sequences(0).empty());
  EXPECT_EQ(store_->CloseSequence(worker_.id(), sequence).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store_->CloseKey(scheduler_.id(), "a").reason(), "KEY_UNKNOWN");
}

TEST_F(KeysTest, AStepThatIsOpenKeepsWhatItReads) {
  TestSequence s = TestSequence::Prompt(&worker_, "full", Tokens(100));
  const OpenedSequence opened = s.opened();
  ASSERT_TRUE(store_->GiveKey(worker_.id(), opened, "a").ok());
  const int slot = worker_.reader().Enter();
  const shm::TableView table = s.Table();
  ASSERT_TRUE(store_->CloseKey(scheduler_.id(), "a").ok());
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
  EXPECT_EQ(store_->CloseKey(stranger.id(), "a").reason(), "KEY_UNKNOWN");
  EXPECT_TRUE(Open(stranger, "a").ok()) << "keys are a user's";
  EXPECT_EQ(store_->Sequences(0).size(), 2u) << "what was refused is closed again";
  store_->EndSession(worker_.id(), SessionEnd::kDied);
  EXPECT_TRUE(Open(scheduler_, "a").ok()) << "it goes with its session";
}

TEST_F(KeysTest, AForkHasNone) {
  const uint64_t sequence = Open(worker_, "a")->sequence;
  ASSERT_TRUE(store_->ForkSequence(worker_.id(), sequence).ok());
  ASSERT_TRUE(store_->CloseKey(scheduler_.id(), "a").ok());
  ASSERT_EQ(store_->Sequences(0).size(), 1u);
  EXPECT_EQ(store_->Sequences(0)[0].key, "");
}

TEST_F(KeysTest, TextsThatAreNone) {
  for (const std::string& key : {std::string(64, 'k'), std::string("two\nlines")}) {
    EXPECT_EQ(Open(worker_, key).status().reason(), "KEY_TEXT");
  }
  EXPECT_TRUE(store_->Sequences(0).empty());
  EXPECT_TRUE(Open(worker_, std::string(63, 'k')).ok());
}

}  // namespace
}  // namespace kvstrata::testing
