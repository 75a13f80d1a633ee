// SPDX-License-Identifier: Apache-2.0
// The audit finds what is broken, and the store breaks nothing under random use.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "server/store/store_parts.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {

// Reaches into the store to break it.
struct AuditTestPeer {
  static Store::Parts& Of(Store& store) { return *store.parts_; }
  static Sequence& SequenceOf(Store& store, uint64_t id) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return *Of(store).catalog.SequenceOf(id);
  }
  static Session& SessionOf(Store& store, uint64_t id) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return *Of(store).catalog.SessionOf(id);
  }
  static PagePools& PoolsOf(Store& store) { return Of(store).books.pools; }
};

namespace {

using testing::ExpectClean;
using testing::NewStore;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;
using testing::UsedBytes;

class AuditTest : public ::testing::Test {
 protected:
  void ExpectFinding(const std::string& part) {
    const AuditReport report = store_->inspection().Audit();
    for (const std::string& finding : report.findings) {
      if (finding.find(part) != std::string::npos) return;
    }
    ADD_FAILURE() << "no finding says '" << part << "' among " << report.findings.size();
  }
  Sequence& sequence() { return AuditTestPeer::SequenceOf(*store_, s_.id()); }
  shm::PageEntry* entry(uint32_t i) { return shm::Entries(sequence().table) + i; }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(128, 128));
  TestSession session_{store_.get()};
  TestSequence s_ = TestSequence::Prompt(&session_, "quest{page = 16}", Tokens(40));
};

TEST_F(AuditTest, CountsWhatIsThere) {
  const AuditReport report = store_->inspection().Audit();
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.sessions, 1u);
  EXPECT_EQ(report.sequences, 1u);
  EXPECT_EQ(report.pages, s_.Table().pages + s_.Table().index_blocks);
  EXPECT_EQ(report.bytes, UsedBytes(*store_));
}

TEST_F(AuditTest, FindsAReferenceTooMany) {
  Page* page = sequence().pages[1];
  ++page->refs;
  ExpectFinding("counts 2 references, 1 were found");
  --page->refs;
  ExpectClean(*store_);
}

TEST_F(AuditTest, FindsALeakedPage) {
  std::vector<Page*> leaked;
  PagePools& pools = AuditTestPeer::PoolsOf(*store_);
  ASSERT_EQ(pools.Take(PoolId::Device(0), 0, session_.id(), 4096, 1, &leaked), 1u);
  ExpectFinding("reachable from nowhere");
  pools.Free(leaked);
  ExpectClean(*store_);
}

TEST_F(AuditTest, PagesGoBackInAnyOrder) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  PagePools& pools = AuditTestPeer::PoolsOf(*store_);
  const uint64_t used = UsedBytes(*store_);
  for (int round = 0; round < 20; ++round) {
    std::vector<Page*> pages;
    ASSERT_EQ(pools.Take(PoolId::Device(0), 0, session_.id(), 8192, 12, &pages), 12u);
    if (round > 1) std::shuffle(pages.begin(), pages.end(), random);
    if (round == 1) std::reverse(pages.begin(), pages.end());
    pools.Free(pages);
    ExpectClean(*store_);
    EXPECT_EQ(UsedBytes(*store_), used);
  }
}

TEST_F(AuditTest, FindsAPageInTwoStates) {
  Page* page = sequence().pages[1];
  page->retired = true;
  ExpectFinding("retired flag is wrong");
  ExpectFinding("retired but reachable");
  page->retired = false;
}

TEST_F(AuditTest, FindsOverlappingPages) {
  Page *a = sequence().pages[0], *b = sequence().pages[1];
  const uint64_t offset = b->offset;
  b->offset = a->offset;
  ExpectFinding("exists twice");
  b->offset = offset;
}

TEST_F(AuditTest, FindsATableThatNamesAnotherPlace) {
  entry(1)->offset += 4096;
  ExpectFinding("names another place");
  entry(1)->offset -= 4096;
  ExpectClean(*store_);
}

TEST_F(AuditTest, FindsASharedPageThatIsCalledPrivate) {
  ASSERT_TRUE(s_.Fork().ok());
  entry(2)->flags = 0;
  ExpectFinding("its table calls it private");
}

TEST_F(AuditTest, FindsALeaseOfNobody) {
  Session& session = AuditTestPeer::SessionOf(*store_, session_.id());
  std::unique_ptr<Sequence> lost = std::move(session.sequences.begin()->second);
  session.sequences.clear();
  ExpectFinding("0 owned by live sessions");
  session.sequences.emplace(lost->id, std::move(lost));
  ExpectClean(*store_);
}

TEST_F(AuditTest, FindsAMissingGrantAndAnIndexThatForgot) {
  Session& session = AuditTestPeer::SessionOf(*store_, session_.id());
  const auto granted = session.granted;
  session.granted.clear();
  ExpectFinding("was not granted");
  session.granted = granted;
  sequence().pages[0]->indexed = false;
  ExpectFinding("entries, 1 pages say so");
  sequence().pages[0]->indexed = true;
  ExpectClean(*store_);
}

// --- random use ---

// Two tenants, up to three sessions, each on some device; prompts from a small alphabet, so that
// prefixes meet.
class Driver {
 public:
  explicit Driver(uint32_t seed, uint32_t devices = 1) : random_(seed), devices_(devices) {
    std::vector<StoreDevice> emulated;
    for (uint32_t i = 0; i < devices; ++i) {
      emulated.push_back({"emulated-" + std::to_string(i), NewEmulatedDevice()});
    }
    store_ =
        std::move(Store::Create(SmallPools(96, 64), std::move(emulated), NewHostMemory())).value();
    store_->moves().SetMoveSink([] {});
  }

  void Step() {
    switch (Below(11)) {
      case 0:
        return Attach();
      case 1:
      case 2:
        return Open();
      case 3:
        return Fork();
      case 4:
      case 5:
      case 6:
        return Append();
      case 7:
        return Move();
      case 8:
        return Park();
      case 9:
        return Close();
      case 10:
        if (Below(6) == 0) return End();
        if (Below(8) == 0) (void)store_->eviction().Evict(false);
        if (Below(2) == 0) (void)store_->moves().MoveSome(8 * 4096);
        store_->references().Reclaim();
    }
  }
  void Check() {
    ExpectClean(*store_);
    for (const Live& live : live_) {
      live.sequence.ExpectIntact();
      const Result<SequenceDetail> detail = store_->inspection().Show(live.sequence.id());
      ASSERT_TRUE(detail.ok());
      ASSERT_EQ(detail->info.tokens, live.sequence.size());
    }
    for (const Parked& parked : parked_) parked.sequence.ExpectIntact(parked.table);
    ASSERT_EQ(store_->inspection().Sequences(0).size(), live_.size());
  }
  void Finish() {
    while (!sessions_.empty()) End();
    Check();
    store_->eviction().Evict(false);
    EXPECT_EQ(UsedBytes(*store_), 0u);
    ExpectClean(*store_);
  }
  int exhausted() const { return exhausted_; }
  uint64_t replicated() const { return store_->inspection().Counters().replicated_pages; }

 private:
  struct Live {
    TestSession* session;
    TestSequence sequence;
  };
  struct Parked {
    TestSession* session;
    int slot;
    TestSequence sequence;
    shm::TableView table;
  };

  size_t Below(size_t n) { return random_() % n; }
  // OK, or a shortage, which is counted.
  bool Passed(const Status& status) {
    if (status.ok()) return true;
    ++exhausted_;
    EXPECT_EQ(status.reason(), "POOL_EXHAUSTED") << status.ToString();
    return false;
  }
  void Attach() {
    if (sessions_.size() == 3) return;
    sessions_.push_back(
        std::make_unique<TestSession>(store_.get(), Below(3) == 0 ? "uid:2" : "uid:1",
                                      Transport::kLinked, static_cast<uint32_t>(Below(devices_))));
  }
  void Open() {
    if (sessions_.empty()) return;
    TestSession* session = sessions_[Below(sessions_.size())].get();
    const auto tokens =
        Tokens(static_cast<int32_t>(Below(640)), static_cast<int32_t>(Below(2)) * 64);
    const char* plans[] = {"full", "quest{page = 16}", "quest{page = 32}"};
    Result<OpenedSequence> opened = session->Open(plans[Below(3)], tokens);
    if (!Passed(opened.status())) return;
    TestSequence s(session, *opened, tokens);
    Passed(s.Append(std::span(tokens).subspan(opened->held_tokens)));
    live_.push_back({session, std::move(s)});
  }
  void Fork() {
    if (live_.empty()) return;
    Live& live = live_[Below(live_.size())];
    Result<TestSequence> fork = live.sequence.Fork();
    if (Passed(fork.status())) live_.push_back({live.session, std::move(*fork)});
  }
  void Append() {
    if (live_.empty()) return;
    Live& live = live_[Below(live_.size())];
    const auto n = static_cast<int32_t>(Below(4) == 0 ? 1 + Below(90) : 1);
    Passed(live.sequence.Append(Tokens(n, static_cast<int32_t>(Below(2)))));
  }
  void Move() {
    if (live_.empty()) return;
    const Live& live = live_[Below(live_.size())];
    Passed(store_->moves()
               .Move(live.sequence.id(), Below(2) == 0 ? Tier::kHost : Tier::kDevice)
               .status());
  }
  // A reader enters or the oldest one leaves, its bytes checked once more.
  void Park() {
    if (parked_.size() >= 2 || (Below(2) == 0 && !parked_.empty())) {
      parked_.front().sequence.ExpectIntact(parked_.front().table);
      parked_.front().session->reader().Leave(parked_.front().slot);
      parked_.erase(parked_.begin());
    } else if (!live_.empty()) {
      const Live& live = live_[Below(live_.size())];
      const int slot = live.session->reader().Enter();
      parked_.push_back({live.session, slot, live.sequence, live.sequence.Table()});
    }
  }
  void Close() {
    if (live_.empty()) return;
    const size_t i = Below(live_.size());
    ASSERT_TRUE(live_[i].sequence.Close().ok());
    live_.erase(live_.begin() + static_cast<ptrdiff_t>(i));
  }
  void End() {
    if (sessions_.empty()) return;
    const size_t i = Below(sessions_.size());
    TestSession* session = sessions_[i].get();
    std::erase_if(live_, [&](const Live& live) { return live.session == session; });
    if (Below(2) == 0) {
      store_->sessions().EndSession(session->id(), SessionEnd::kEof);
      Check();  // what the stopped process sees is still there
    }
    std::erase_if(parked_, [&](const Parked& parked) { return parked.session == session; });
    store_->sessions().EndSession(session->id(),
                                  Below(2) == 0 ? SessionEnd::kDied : SessionEnd::kDetached);
    sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i));
  }

  std::mt19937 random_;
  const uint32_t devices_;
  std::unique_ptr<Store> store_;
  std::vector<std::unique_ptr<TestSession>> sessions_;
  std::vector<Live> live_;
  std::vector<Parked> parked_;
  int exhausted_ = 0;
};

TEST(StoreRandom, TheBooksHoldAfterEveryOperation) {
  int exhausted = 0;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Driver driver(seed);
    for (int step = 0; step < 400; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      driver.Step();
      driver.Check();
      if (::testing::Test::HasFailure()) return;
    }
    driver.Finish();
    exhausted += driver.exhausted();
  }
  EXPECT_GT(exhausted, 0) << "the pools are small enough that shortage is met";
}

TEST(StoreRandom, TheBooksHoldOnSeveralDevices) {
  uint64_t replicated = 0;
  for (uint32_t seed = 101; seed <= 105; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Driver driver(seed, 3);
    for (int step = 0; step < 400; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      driver.Step();
      driver.Check();
      if (::testing::Test::HasFailure()) return;
    }
    driver.Finish();
    replicated += driver.replicated();
  }
  EXPECT_GT(replicated, 0u) << "prefixes are met from other devices";
}

}  // namespace
}  // namespace kvstrata
