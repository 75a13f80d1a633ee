// SPDX-License-Identifier: Apache-2.0
// Requests that grow with their tokens let others have the store's lock, and leave the books in
// order whatever comes in between.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "server/store/books/books.h"
#include "server/store/store_parts.h"
#include "tests/fakes/copying_codec.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {

// Looks at the store's lock and at whose it is.
struct AuditTestPeer {
  static uint32_t Waiting(const Store& store) { return store.parts_->books.mu.waiting(); }
  // Takes the lock as anybody does; whether a long request was under way then.
  static bool LooksInside(const Store& store) {
    StoreLock lock(store.parts_->books.mu);
    return std::ranges::any_of(store.parts_->catalog.sessions(), [](const auto& entry) {
      return entry.second->long_request != std::thread::id();
    });
  }
  // As LooksInside; if so, whether an artefact that nobody uses was evicted.
  static bool EvictsInside(Store& store) {
    StoreLock lock(store.parts_->books.mu);
    const bool inside = std::ranges::any_of(
        store.parts_->catalog.sessions(),
        [](const auto& entry) { return entry.second->long_request != std::thread::id(); });
    return inside && store.parts_->eviction.EvictArtefact(PoolId::Device(0));
  }
};

namespace {

using testing::ExpectClean;
using testing::TestSession;
using testing::Tokens;

constexpr auto kDeadline = std::chrono::seconds(120);
constexpr uint32_t kManyTokens = 1 << 20;

// Returns whether it came true.
bool Await(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// Calls `on_allocate` for each new arena, under the store's lock.
class ToldMemory final : public MemoryResource {
 public:
  explicit ToldMemory(const std::function<void()>* on_allocate) : on_allocate_(on_allocate) {}
  Result<MappedMemory> Allocate(uint64_t bytes) override {
    if (*on_allocate_) (*on_allocate_)();
    return memory_->Allocate(bytes);
  }
  void Free(MappedMemory memory) override { memory_->Free(std::move(memory)); }
  MemoryTraits traits() const override { return memory_->traits(); }

 private:
  const std::function<void()>* const on_allocate_;
  const std::unique_ptr<MemoryResource> memory_ = NewEmulatedDevice();
};

class LongRequestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreOptions options;
    options.device_bytes = uint64_t{2} << 30;
    options.host_bytes = 0;
    options.arena_bytes = uint64_t{8} << 20;
    store_ = *Store::Create(options, std::make_unique<ToldMemory>(&on_arena_), NewHostMemory());
  }

  // Whether any of several who take the lock again and again got in while `request` had it in
  // pieces. With so many, somebody waits whenever the request has the lock.
  bool LetsIn(const std::function<void()>& request) {
    std::atomic<bool> done{false}, let_in{false};
    std::vector<std::thread> others;
    for (int i = 0; i < 3; ++i) {
      others.emplace_back([&] {
        while (!done) {
          if (AuditTestPeer::LooksInside(*store_)) let_in = true;
        }
      });
    }
    EXPECT_TRUE(Await([&] { return AuditTestPeer::Waiting(*store_) >= 2; }));
    request();
    done = true;
    for (std::thread& other : others) other.join();
    return let_in;
  }

  std::function<void()> on_arena_;
  std::unique_ptr<Store> store_;
};

// At each arena that the growing thread takes it keeps the lock until somebody waits for it, so
// that this depends on no scheduler: who is let in once a piece has opened long before the last
// arena.
TEST_F(LongRequestTest, AnotherOpensBeforeALargeGrowthIsDone) {
  static thread_local bool growing = false;
  std::atomic<bool> begun{false}, opened{false}, done{false};
  on_arena_ = [&] {
    if (!growing) return;
    begun = true;
    EXPECT_TRUE(Await([&] { return opened || AuditTestPeer::Waiting(*store_) > 0; }));
  };
  TestSession victim(store_.get(), "uid:2");
  for (int round = 0; round < 8; ++round) {
    begun = opened = done = false;
    TestSession attacker(store_.get(), "uid:1");
    const uint64_t sequence = attacker.Open("full", {})->sequence;
    std::thread grower([&] {
      growing = true;
      EXPECT_TRUE(store_->steps().Grow(attacker.id(), sequence, kManyTokens, 0, 0).ok());
      done = true;
    });
    ASSERT_TRUE(Await([&] { return begun.load(); }));
    const Result<OpenedSequence> small = victim.Open("full", Tokens(100));
    EXPECT_FALSE(done) << "round " << round;
    opened = true;
    EXPECT_TRUE(small.ok());
    grower.join();
    EXPECT_TRUE(store_->sequences().CloseSequence(victim.id(), small->sequence).ok());
    store_->sessions().EndSession(attacker.id(), SessionEnd::kDied);
  }
  ExpectClean(*store_);
}

// All of them run in turn, until each has let somebody in: now and then a scheduler keeps all who
// would wait from doing so.
TEST_F(LongRequestTest, EveryLongRequestLetsOthersIn) {
  const auto id_of = [](const Result<OpenedSequence>& opened) {
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    return opened.ok() ? opened->sequence : 0;
  };
  std::set<std::string> all, let_in;
  for (int round = 0; round < 40 && (round == 0 || let_in != all); ++round) {
    TestSession session(store_.get()), reader(store_.get());
    const std::vector<int32_t> tokens = Tokens(1 << 18, round << 18);
    uint64_t first = 0, second = 0, child = 0;
    const uint64_t id = session.id();
    const std::pair<const char*, std::function<void()>> requests[] = {
        {"open", [&] { first = id_of(session.Open("full", tokens)); }},
        {"commit", [&] { EXPECT_TRUE(store_->steps().Commit(id, first, 0, tokens, 0).ok()); }},
        {"open what is held", [&] { second = id_of(reader.Open("full", tokens)); }},
        {"fork", [&] { child = id_of(store_->sequences().ForkSequence(id, first)); }},
        {"grow", [&] { EXPECT_TRUE(store_->steps().Grow(id, child, 1 << 19, 1 << 18, 0).ok()); }},
        {"close", [&] { EXPECT_TRUE(store_->sequences().CloseSequence(id, child).ok()); }},
        {"move", [&] { (void)store_->moves().Move(second, Tier::kHost); }},
        {"end", [&] { store_->sessions().EndSession(reader.id(), SessionEnd::kDied); }},
    };
    for (const auto& [name, request] : requests) {
      all.insert(name);
      if (LetsIn(request)) let_in.insert(name);
      ExpectClean(*store_);
    }
    store_->sessions().EndSession(id, SessionEnd::kDied);
    (void)store_->eviction().Evict(false);
  }
  EXPECT_EQ(let_in, all);
}

// An open on an artefact, which is evicted while the open looks at its pages: they are held no
// further than without it.
TEST_F(LongRequestTest, AnArtefactMayGoWhileAnOpenLooksForPages) {
  constexpr char kPlan[] = "window{codec = \"packed\", max_loss = 1, keep_raw = \"no\"}";
  constexpr int32_t kPages = 600, kReleased = 10;
  const auto control = std::make_shared<testing::CodecControl>();
  control->released_to = kReleased * 16;
  StoreOptions options = testing::SmallPools(4096, 64);
  options.new_recompressor = [&](const Plan&, const Geometry& geometry, auto) {
    return std::make_unique<testing::CopyingCodec>(control, geometry);
  };
  store_ = testing::NewStore(options);
  TestSession session(store_.get());
  const std::vector<int32_t> tokens = Tokens(kPages * 16 + 1);
  std::atomic<bool> evicted{false};
  for (int round = 0; round < 20 && !evicted; ++round) {
    testing::TestSequence made = testing::TestSequence::Prompt(&session, kPlan, tokens);
    ASSERT_TRUE(store_->steps().PrefillDone(session.id(), made.id()).ok());
    while (testing::Recompress(store_.get(), made.id()).ok()) {
    }
    // Pins its pages, and not the artefact.
    PrefixPin pin = store_->pins().PinSequence(made.id(), std::chrono::hours(1))->pin;
    ASSERT_EQ(pin.pages.size(), size_t{kPages - kReleased});
    ASSERT_TRUE(store_->pins().RemovePin(pin.id).ok());
    pin.artefact.clear();
    store_->pins().RestorePins({pin});
    ASSERT_TRUE(made.Close().ok());
    std::atomic<bool> done{false};
    std::vector<std::thread> others;  // with so many somebody waits whenever the open has the lock
    for (int i = 0; i < 3; ++i) {
      others.emplace_back([&] {
        while (!done) {
          if (AuditTestPeer::EvictsInside(*store_)) evicted = true;
        }
      });
    }
    EXPECT_TRUE(Await([&] { return AuditTestPeer::Waiting(*store_) >= 2; }));
    const Result<OpenedSequence> opened = session.Open(kPlan, tokens);
    done = true;
    for (std::thread& other : others) other.join();
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    EXPECT_EQ(opened->held_tokens, evicted ? 0u : kPages * 16u);
    ASSERT_TRUE(store_->sequences().CloseSequence(session.id(), opened->sequence).ok());
    ASSERT_TRUE(store_->pins().RemovePin(pin.id).ok());
    store_->eviction().Evict(false);
    ExpectClean(*store_);
  }
  EXPECT_TRUE(evicted);
}

TEST_F(LongRequestTest, WhatIsExhaustedHalfWayGivesAllBack) {
  TestSession session(store_.get());
  const uint64_t sequence = session.Open("full", Tokens(100))->sequence;
  const uint32_t pages = store_->inspection().Show(sequence)->info.pages;
  const Status status = store_->steps().Grow(session.id(), sequence, 1 << 24, 0, 0);  // 4 GiB
  EXPECT_EQ(status.reason(), "POOL_EXHAUSTED");
  const std::string needed = std::to_string((1 << 20) - pages);
  const std::string had = std::to_string((1 << 19) - pages);  // 2 GiB have so many
  EXPECT_TRUE(status.message().starts_with(needed + " pages of 4096 bytes are needed, " + had))
      << status.message();
  EXPECT_EQ(store_->inspection().Show(sequence)->info.pages, pages);
  EXPECT_EQ(testing::UsedBytes(*store_), pages * uint64_t{4096});
  EXPECT_TRUE(store_->steps().Grow(session.id(), sequence, kManyTokens, 0, 0).ok());
  ExpectClean(*store_);
}

// The session has gone, or not, when its request comes back; nothing else may.
TEST_F(LongRequestTest, ASessionEndsBehindItsRequest) {
  for (const SessionEnd how : {SessionEnd::kEof, SessionEnd::kDied}) {
    TestSession session(store_.get());
    const uint64_t sequence = session.Open("full", {})->sequence;
    std::atomic<bool> begun{false};
    on_arena_ = [&] { begun = true; };
    std::thread grower([&] {
      const Status status = store_->steps().Grow(session.id(), sequence, kManyTokens, 0, 0);
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
    ASSERT_TRUE(Await([&] { return begun.load(); }));
    store_->sessions().EndSession(session.id(), how);
    grower.join();
    on_arena_ = nullptr;
    EXPECT_EQ(store_->inspection().Sequences(0).size(), 0u);
    ExpectClean(*store_);
  }
  EXPECT_EQ(testing::UsedBytes(*store_), 0u);
}

// One client's calls, in a thread of its own: some of them fail, none of them breaks anything.
class Client {
 public:
  Client(Store* store, uint32_t seed, std::atomic<uint64_t>* session)
      : store_(store), random_(seed), shared_(session) {}

  void Run(int calls) {
    Attach();
    for (int i = 0; i < calls; ++i) Call();
    store_->sessions().EndSession(session_->id(), SessionEnd::kDied);
  }

 private:
  uint32_t Pick(uint32_t n) { return random_() % n; }

  void Attach() {
    session_ = std::make_unique<TestSession>(store_, Pick(2) == 0 ? "uid:1" : "uid:2");
    *shared_ = session_->id();
    sequences_.clear();
  }

  void Add(const Result<OpenedSequence>& opened) {
    if (opened.ok()) sequences_.push_back(opened->sequence);
    if (opened.status().reason() == "SESSION_UNKNOWN") Attach();
  }

  void Call() {
    const uint64_t id = session_->id();
    const uint64_t s = sequences_.empty() ? 0 : sequences_[Pick(sequences_.size())];
    const std::vector<int32_t> tokens = Tokens(static_cast<int32_t>(Pick(20'000)));
    switch (Pick(7)) {
      case 0:
      case 1:
        return Add(session_->Open(Pick(2) == 0 ? "full" : "quest", tokens));
      case 2:
        return Add(store_->sequences().ForkSequence(id, s));
      case 3:
        return (void)store_->steps().Grow(id, s, Pick(40'000), TokensOf(s), 0);
      case 4: {
        const uint32_t first = TokensOf(s);
        const auto more = Tokens(static_cast<int32_t>(Pick(10'000)), static_cast<int32_t>(first));
        (void)store_->steps().Grow(id, s, first + static_cast<uint32_t>(more.size()), first, 0);
        return (void)store_->steps().Commit(id, s, first, more, 0);
      }
      case 5:
        std::erase(sequences_, s);
        return (void)store_->sequences().CloseSequence(id, s);
      default:
        if (Pick(4) != 0) return;
        store_->sessions().EndSession(id, Pick(2) == 0 ? SessionEnd::kDied : SessionEnd::kDetached);
        return Attach();
    }
  }

  uint32_t TokensOf(uint64_t s) {
    const Result<SequenceDetail> shown = store_->inspection().Show(s);
    return shown.ok() ? shown->info.tokens : 0;
  }

  Store* const store_;
  std::mt19937 random_;
  std::atomic<uint64_t>* const shared_;  // whose session it is now
  std::unique_ptr<TestSession> session_;
  std::vector<uint64_t> sequences_;
};

// What the daemon's other threads and an operator do meanwhile.
void Disturb(Store* store, uint32_t seed, std::span<const std::atomic<uint64_t>> sessions,
             const std::atomic<bool>& done) {
  std::mt19937 random(seed);
  while (!done) {
    const std::vector<SequenceInfo> all = store->inspection().Sequences(0);
    const uint64_t some = all.empty() ? 0 : all[random() % all.size()].sequence;
    switch (random() % 7) {
      case 6:
        (void)store->moves().MoveSome(uint64_t{1} << 20);
        break;
      case 0:
        (void)store->moves().Move(some, random() % 2 == 0 ? Tier::kDevice : Tier::kHost);
        break;
      case 1:
        (void)store->eviction().Evict(false);
        break;
      case 2:
        store->references().Reclaim();
        break;
      case 3:
        (void)store->inspection().Show(some);
        break;
      case 4:
        if (random() % 8 == 0) {
          store->sessions().EndSession(sessions[random() % sessions.size()], SessionEnd::kEof);
        }
        break;
      default:
        ExpectClean(*store);
    }
  }
}

TEST(LongRequestsTest, RandomInterleavingsLeaveTheBooksInOrder) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  StoreOptions options = testing::SmallPools(6'000, 3'000);
  options.arena_bytes = 512 * 4096;
  const std::unique_ptr<Store> store = testing::NewStore(options);
  store->moves().SetMoveSink([] {});  // promotions are noted
  constexpr uint32_t kClients = 3;
  std::atomic<uint64_t> sessions[kClients] = {};
  std::atomic<bool> done{false};
  std::vector<std::thread> clients;
  for (uint32_t i = 0; i < kClients; ++i) {
    clients.emplace_back([&, i] { Client(store.get(), seed + i, &sessions[i]).Run(300); });
  }
  std::thread disturber([&] { Disturb(store.get(), seed + kClients, sessions, done); });
  for (std::thread& client : clients) client.join();
  done = true;
  disturber.join();
  ExpectClean(*store);
  for (const std::atomic<uint64_t>& id : sessions)
    store->sessions().EndSession(id, SessionEnd::kDied);
  EXPECT_EQ(store->inspection().Sequences(0).size(), 0u);
  (void)store->eviction().Evict(false);
  store->references().Reclaim();
  ExpectClean(*store);
  EXPECT_EQ(testing::UsedBytes(*store), 0u) << "but for fenced sessions nobody holds anything";
}

}  // namespace
}  // namespace kvstrata
