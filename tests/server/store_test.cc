// SPDX-License-Identifier: Apache-2.0
// The store as a client sees it: sharing, copy on write, moving, exhaustion, ends of sessions.
#include "server/store/store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <random>
#include <thread>

#include "server/memory/memory_resource.h"
#include "tests/fakes/failing_resource.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {
namespace {

using testing::ExpectClean;
using testing::NewStore;
using testing::SmallModel;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;
using testing::UsedBytes;

constexpr std::string_view kQuest = "quest{page = 16}";

// --- models, plans, arguments ---

TEST(Store, RegisteringAModelAgainGivesTheSameHandle) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession a(store.get()), b(store.get());
  EXPECT_EQ(a.model(), b.model());
  ModelDesc other = SmallModel();
  other.digest = "other";
  EXPECT_NE(*store->models().RegisterModel(a.id(), other), a.model());
  EXPECT_EQ(store->inspection().Models().size(), 2u);
}

TEST(Store, AModelGoesWithItsLastSessionAndItsLastPage) {
  auto store = NewStore(SmallPools(64, 64));
  const auto idle = std::make_unique<TestSession>(store.get());
  EXPECT_EQ(store->inspection().Models().size(), 1u);
  store->sessions().EndSession(idle->id(), SessionEnd::kDetached);
  EXPECT_TRUE(store->inspection().Models().empty()) << "no page was left";

  TestSession busy(store.get());
  TestSequence::Prompt(&busy, "full", Tokens(100));
  store->sessions().EndSession(busy.id(), SessionEnd::kDied);
  EXPECT_EQ(store->inspection().Models().size(), 1u) << "the next session finds its pages";
  (void)store->eviction().Evict(false);
  EXPECT_TRUE(store->inspection().Models().empty());
  ExpectClean(*store);
}

TEST(Store, AModelOfOneSessionTakesItsPagesAlong) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession own(store.get()), other(store.get());
  const std::vector<int32_t> tokens = Tokens(100);
  TestSequence::Prompt(&other, "full", tokens);
  store->sessions().EndSession(other.id(), SessionEnd::kDetached);
  const uint64_t others = UsedBytes(*store);
  ModelDesc alone = SmallModel();
  alone.digest = "session:alone";
  const uint64_t model = *store->models().RegisterModel(own.id(), alone);
  const auto opened = store->openings().OpenSequence(own.id(), model, "full", tokens);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  ASSERT_TRUE(store->steps().Commit(own.id(), opened->sequence, 0, tokens, 0).ok());
  ASSERT_TRUE(store->sequences().CloseSequence(own.id(), opened->sequence).ok());
  EXPECT_EQ(store->openings().OpenSequence(own.id(), model, "full", tokens)->held_tokens, 96u)
      << "within the session they are shared";
  EXPECT_EQ(store->inspection().Models().size(), 2u);
  store->sessions().EndSession(own.id(), SessionEnd::kDied);
  EXPECT_EQ(store->inspection().Models().size(), 1u);
  EXPECT_EQ(UsedBytes(*store), others);
  ExpectClean(*store);
}

TEST(Store, RefusesModelsThatItCannotServe) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  const auto reason = [&](auto change) {
    ModelDesc model = SmallModel();
    change(model);
    return store->models().RegisterModel(session.id(), model).status().reason();
  };
  EXPECT_EQ(reason([](ModelDesc& m) { m.digest.clear(); }), "MODEL_TEXT");
  EXPECT_EQ(reason([](ModelDesc& m) { m.name.assign(300, 'x'); }), "MODEL_TEXT");
  EXPECT_EQ(reason([](ModelDesc& m) { m.geometry.rotary = {0.5, 64}; }), "MODEL_ROPE");
  EXPECT_EQ(reason([](ModelDesc& m) { m.geometry.rotary = {10000, 66}; }), "MODEL_ROPE");
  EXPECT_EQ(reason([](ModelDesc& m) { m.geometry.rotary = {10000, 32, true}; }), "");
  EXPECT_EQ(reason([](ModelDesc& m) { m.ranks = 2; }), "MODEL_RANKS");
  EXPECT_EQ(reason([](ModelDesc& m) { m.geometry.layers = 512; }), "MODEL_PAGE_TOO_LARGE");
  EXPECT_FALSE(reason([](ModelDesc& m) { m.geometry.head_dim = 65; }).empty());
}

TEST(Store, NamedPlansComeBeforePresetsAndTakeNoOptions) {
  StoreOptions options = SmallPools(64, 64);
  options.named_plans = {{"mine", "quest{budget = 1024}"}, {"window", "full"}};
  auto store = NewStore(options);
  EXPECT_EQ(store->plans().ResolvePlan(" mine ")->minmax.budget, 1024);
  EXPECT_EQ(store->plans().ResolvePlan("window")->selector, SelectorKind::kFull);
  EXPECT_EQ(store->plans().ResolvePlan("quest")->selector, SelectorKind::kMinMax);
  const Status status = store->plans().ResolvePlan("mine{budget = 2}").status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("named plan"), std::string::npos) << status.message();
  options.named_plans = {{"bad", "no such plan"}};
  EXPECT_EQ(Store::Create(options).status().reason(), "PLAN_NAMED_INVALID");
}

// What a client parses, and what artefacts are keyed by, is a number.
TEST(Store, AutomaticMinTokensAreANumberOnceASequenceIsOpen) {
  for (const StepsOn where : {StepsOn::kCpu, StepsOn::kGpu}) {
    StoreOptions options = SmallPools(64, 64);
    options.steps_on = where;
    auto store = NewStore(options);
    TestSession session(store.get());
    const Plan plan = session.Open("quest{min_tokens = \"auto\"}", Tokens(20)).value().plan;
    EXPECT_EQ(plan.min_tokens,
              BreakEvenTokens(ParsePlan("quest").value(), SmallModel().geometry, where));
    EXPECT_EQ(session.Open("quest{min_tokens = 7}", {}).value().plan.min_tokens, 7);
  }
}

TEST(Store, UnknownHandlesAreNamed) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession a(store.get()), b(store.get());
  TestSequence s = TestSequence::Prompt(&a, "full", Tokens(20));
  EXPECT_EQ(store->models().RegisterModel(99, SmallModel()).status().reason(), "SESSION_UNKNOWN");
  EXPECT_EQ(store->openings().OpenSequence(a.id(), 99, "full", {}).status().reason(),
            "MODEL_UNKNOWN");
  EXPECT_EQ(store->lookups().Lookup(a.id(), 99, Tokens(1)).status().reason(), "MODEL_UNKNOWN");
  EXPECT_EQ(a.Open("ful", {}).status().reason(), "PLAN_UNKNOWN");
  // A sequence of another session is unknown to this one.
  EXPECT_EQ(store->sequences().CloseSequence(b.id(), s.id()).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store->steps().Grow(b.id(), s.id(), 1, 20, 0).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store->sequences().ForkSequence(b.id(), s.id()).status().reason(), "SEQUENCE_UNKNOWN");
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(store->steps().PrefillDone(a.id(), s.id()).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store->moves().Move(s.id(), Tier::kHost).status().reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store->inspection().Show(s.id()).status().reason(), "SEQUENCE_UNKNOWN");
  ExpectClean(*store);
}

TEST(Store, LimitsOfSessionsAndSequences) {
  StoreOptions options = SmallPools(16, 8192);
  options.max_sessions = 2;
  auto store = NewStore(options);
  TestSession a(store.get()), b(store.get());
  PeerIdentity peer{0, 0, 0, "uid:1"};
  EXPECT_EQ(store->sessions().OpenSession(peer, Transport::kLinked, "c", nullptr).status().reason(),
            "SESSION_LIMIT");
  for (int i = 0; i < shm::kMaxSequences; ++i) ASSERT_TRUE(a.Open("full", {}).ok()) << i;
  EXPECT_EQ(a.Open("full", {}).status().reason(), "SEQUENCE_LIMIT");
  ASSERT_TRUE(store->sequences().CloseSequence(a.id(), 1).ok());
  EXPECT_TRUE(a.Open("full", {}).ok());
  EXPECT_TRUE(b.Open("full", {}).ok());
  ExpectClean(*store);
}

TEST(Store, CommitSaysWhatIsWrong) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, kQuest, Tokens(20));
  const auto commit = [&](uint32_t first, int32_t n, uint32_t indexed) {
    return store->steps().Commit(session.id(), s.id(), first, Tokens(n), indexed).reason();
  };
  EXPECT_EQ(commit(19, 1, 0), "COMMIT_OUT_OF_ORDER");
  EXPECT_EQ(commit(20, 1, 22), "COMMIT_INDEX");
  EXPECT_EQ(commit(20, 1000, 0), "COMMIT_BEYOND_TABLE");
  ASSERT_TRUE(s.Fork().ok());
  EXPECT_EQ(commit(20, 1, 0), "COMMIT_TO_SHARED");
  EXPECT_EQ(store->steps().Grow(session.id(), s.id(), 20, 15, 0).reason(), "GROW_SEALED");
  EXPECT_EQ(store->steps().Grow(session.id(), s.id(), 1u << 31, 20, 0).reason(),
            "SEQUENCE_TOO_LONG");
  EXPECT_EQ(store->inspection().Show(s.id())->info.tokens, 20u);
  ExpectClean(*store);
}

TEST(Store, ReportsAreCheckedAndKeptAnywhereBelowTheTokens) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, "chess", Tokens(20));
  const float good[2] = {0.5f, 1.0f}, negative[2] = {0.5f, -1.0f};
  const float infinite[1] = {std::numeric_limits<float>::infinity()};
  const uint8_t flags[2] = {0, 1};
  const auto report = [&](uint32_t first, uint32_t n, const float* x, const float* e) {
    return store->steps().Report(session.id(), s.id(), first, n, x, e, flags).reason();
  };
  EXPECT_EQ(report(18, 2, good, good), "");
  EXPECT_EQ(report(18, 2, negative, nullptr), "REPORT_VALUE");
  EXPECT_EQ(report(18, 1, nullptr, infinite), "REPORT_VALUE");
  EXPECT_EQ(report(19, 2, good, nullptr), "REPORT_POSITION");
  EXPECT_EQ(report(0xFFFFFFFF, 2, good, nullptr), "REPORT_POSITION");
  EXPECT_TRUE(store->steps().PrefillDone(session.id(), s.id()).ok());
  EXPECT_EQ(store->steps().PrefillDone(session.id(), s.id()).reason(), "PREFILL_DONE");
  EXPECT_EQ(store->inspection().Show(s.id())->info.prompt_tokens, 20u);
}

TEST(Store, WhatWasReportedGoesWithThePages) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  const std::vector<int32_t> prompt = Tokens(50);
  TestSequence s = TestSequence::Prompt(&session, "full", std::span(prompt).first(40));
  const std::vector<float> nats(40, 2.0f);
  const auto report = [&](uint32_t first, uint32_t n) {
    return store->steps().Report(session.id(), s.id(), first, n, nats.data(), nullptr, nullptr);
  };
  const auto known = [&] {
    const Result<OpenedSequence> opened = session.Open("full", prompt);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    EXPECT_TRUE(store->sequences().CloseSequence(session.id(), opened->sequence).ok());
    return opened->surprisal_tokens;
  };
  EXPECT_EQ(known(), 0u);
  ASSERT_TRUE(report(1, 19).ok());  // the first token of a text has none
  EXPECT_EQ(known(), 20u);
  ASSERT_TRUE(report(20, 20).ok());
  EXPECT_EQ(known(), 32u) << "the third page is not full yet";
  ASSERT_TRUE(s.Append(std::span(prompt).subspan(40, 8)).ok());
  EXPECT_EQ(known(), 40u) << "what came before it was full";
  ASSERT_TRUE(store->moves().Move(s.id(), Tier::kHost).ok());
  EXPECT_EQ(known(), 40u);
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(known(), 40u);
  store->eviction().Evict(false);
  EXPECT_EQ(known(), 0u);
}

// Who computes anew what is held, to report of it, reports for those who are held after it.
TEST(Store, WhatIsReportedOfTheSameTokensGoesWithThePagesThatAreFound) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  const std::vector<int32_t> prompt = Tokens(50);
  const TestSequence first = TestSequence::Prompt(&session, "full", prompt);
  const Result<OpenedSequence> opened = store->openings().OpenSequence(
      session.id(), session.model(), "full", prompt, {.hold = {.max_tokens = 1}});
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  ASSERT_EQ(opened->held_tokens, 0u);
  TestSequence second(&session, *opened, prompt);
  ASSERT_TRUE(second.Append(prompt).ok());
  const std::vector<float> nats(50, 2.0f);
  ASSERT_TRUE(
      store->steps().Report(session.id(), second.id(), 0, 50, nats.data(), nullptr, nullptr).ok());
  ASSERT_TRUE(second.Close().ok());
  const Result<OpenedSequence> third = session.Open("full", prompt);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third->held_tokens, 48u);
  EXPECT_EQ(third->surprisal_tokens, 48u);
  ExpectClean(*store);
}

// --- sequences ---

TEST(Store, DecodingExtendsTheTableAheadOfNeed) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, kQuest, Tokens(30));
  const uint64_t version = s.Table().table->version;
  for (int32_t t = 30; t < 60; ++t) {
    EXPECT_GE(s.Table().pages * 16, s.size() + 16) << "headroom";
    ASSERT_TRUE(s.Append(t).ok());
  }
  EXPECT_EQ(s.Table().table->version, version) << "extended in place";
  for (int32_t t = 60; t < 1200; ++t) ASSERT_TRUE(s.Append(t).ok());
  EXPECT_GT(s.Table().table->version, version);
  EXPECT_LT(s.Table().table->version, version + 6) << "capacity doubles";
  s.ExpectIntact();
  ExpectClean(*store);
}

TEST(Store, AccessCountsAreKeptWhenATableGrows) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(40));
  auto* access_counters =
      reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(session.segments().header) +
                                  session.segments().header->access_counters_offset);
  access_counters[s.Table().table->first_access_counter + 1] = 42;
  ASSERT_TRUE(s.Append(Tokens(960, 40)).ok());
  EXPECT_GE(s.Table().table->access_counter_count, 1000u / 16);
  EXPECT_EQ(store->inspection().Show(s.id())->pages[1].selected, 42u);
  ExpectClean(*store);
}

TEST(Store, ASecondSessionFindsThePrefixReadOnly) {
  auto store = NewStore(SmallPools(128, 128));
  TestSession a(store.get()), b(store.get()), stranger(store.get(), "uid:2");
  const auto prompt = Tokens(1100);
  TestSequence first = TestSequence::Prompt(&a, kQuest, prompt);
  ASSERT_TRUE(first.Append(5000).ok());  // its begin brings the index up to date
  EXPECT_EQ(store->lookups().Lookup(b.id(), b.model(), prompt)->held_tokens(), 1088u);
  EXPECT_EQ(store->lookups().Lookup(b.id(), b.model(), Tokens(1088))->held_tokens(), 1072u)
      << "at most n - 1";
  EXPECT_EQ(store->lookups().Lookup(stranger.id(), stranger.model(), prompt)->held_tokens(), 0u);

  const Result<OpenedSequence> opened = b.Open(kQuest, prompt);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->held_tokens, 1088u);
  const auto block = static_cast<uint32_t>(IndexOf(opened->plan, opened->geometry).block_tokens);
  EXPECT_EQ(opened->indexed_tokens, 1088u / block * block);
  EXPECT_GT(opened->indexed_tokens, 0u);
  TestSequence second(&b, *opened, prompt);
  const shm::TableView table = second.Table();
  for (uint32_t i = 0; i < 1088 / 16; ++i) {
    EXPECT_EQ(table.page(i)->flags, shm::kPageShared | shm::kPageSealed);
    EXPECT_FALSE(b.grants().at(table.page(i)->arena)) << "read-only, and before the table";
  }
  EXPECT_EQ(table.page(1088 / 16)->flags, 0);
  EXPECT_TRUE(b.grants().at(table.page(1088 / 16)->arena));
  ASSERT_TRUE(second.Append(std::span(prompt).subspan(1088)).ok());
  second.ExpectIntact();
  first.ExpectIntact();
  EXPECT_EQ(store->inspection().Counters().lookup_hit_tokens, 1088u);
  ExpectClean(*store);
}

TEST(Store, AnotherPlanSharesPagesAndNotTheIndex) {
  auto store = NewStore(SmallPools(256, 256));
  TestSession session(store.get());
  const auto prompt = Tokens(1100);
  TestSequence first = TestSequence::Prompt(&session, kQuest, prompt);
  ASSERT_TRUE(first.Append(5000).ok());
  const Result<OpenedSequence> other = session.Open("quest{page = 32}", prompt);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->held_tokens, 1088u);
  EXPECT_EQ(other->indexed_tokens, 0u);
  ExpectClean(*store);
}

TEST(Store, ForkSharesAllAndCopiesTheTailWhenWritten) {
  auto store = NewStore(SmallPools(128, 128));
  TestSession session(store.get());
  TestSequence parent = TestSequence::Prompt(&session, kQuest, Tokens(40));
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  ExpectClean(*store);
  EXPECT_EQ(child->opened().held_tokens, 40u);
  const shm::PageEntry before = *parent.Table().page(2);
  EXPECT_EQ(before.flags, shm::kPageShared);
  EXPECT_EQ(child->Table().page(2)->offset, before.offset);
  EXPECT_EQ(child->Table().page(2)->flags, shm::kPageShared);

  ASSERT_TRUE(parent.Append(1000).ok());  // grows: its own copy
  EXPECT_NE(parent.Table().page(2)->offset, before.offset);
  EXPECT_EQ(parent.Table().page(2)->flags, 0);
  child->ExpectIntact();
  ExpectClean(*store);
  const uint64_t version = child->Table().table->version;
  ASSERT_TRUE(child->Append(2000).ok());  // nobody else refers to it: only the flag falls
  EXPECT_EQ(child->Table().page(2)->offset, before.offset);
  EXPECT_EQ(child->Table().page(2)->flags, 0);
  EXPECT_GT(child->Table().table->version, version);
  ASSERT_TRUE(parent.Append(Tokens(700, 3000)).ok());
  ASSERT_TRUE(child->Append(Tokens(700, 4000)).ok());
  parent.ExpectIntact();
  child->ExpectIntact();
  ASSERT_TRUE(parent.Close().ok());
  child->ExpectIntact();
  ExpectClean(*store);
}

// --- readers ---

TEST(Store, AParkedReaderKeepsItsBytesThroughAThousandPublications) {
  StoreOptions options = SmallPools(2048, 2048);
  auto store = NewStore(options);
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, kQuest, Tokens(40));
  const int reader = session.reader().Enter();
  const shm::TableView parked = s.Table();
  std::vector<shm::PageEntry> entries(parked.page(0), parked.page(0) + parked.pages);
  const TestSequence as_parked = s;

  const uint64_t from = store->inspection().Counters().publications;
  for (int i = 0; store->inspection().Counters().publications < from + 1000; ++i) {
    ASSERT_TRUE(store->moves().Move(s.id(), i % 2 == 0 ? Tier::kHost : Tier::kDevice).ok());
    Result<TestSequence> fork = s.Fork();
    ASSERT_TRUE(fork.ok());
    ASSERT_TRUE(s.Append(1000 + i).ok());
    ASSERT_TRUE(fork->Close().ok());
    store->references().Reclaim();
    if (i % 50 == 0) {
      ExpectClean(*store);
      as_parked.ExpectIntact(parked);
    }
  }
  EXPECT_EQ(std::memcmp(entries.data(), parked.page(0), entries.size() * sizeof(entries[0])), 0);
  as_parked.ExpectIntact(parked);
  s.ExpectIntact();
  EXPECT_GT(store->inspection().Counters().retired_bytes, 0u);

  session.reader().Leave(reader);
  store->references().Reclaim();
  EXPECT_EQ(store->inspection().Counters().retired_bytes, 0u);
  ExpectClean(*store);
  ASSERT_TRUE(s.Close().ok());
  store->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store), 0u);
  ExpectClean(*store);
}

// Memory that nobody reads is there for the next sequence at once; what somebody may read is not.
TEST(Store, ClosingFreesWhatNoReaderSees) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence first = TestSequence::Prompt(&session, kQuest, Tokens(10));
  const uint64_t offset = first.Table().page(0)->offset;
  ASSERT_TRUE(first.Close().ok());
  EXPECT_EQ(UsedBytes(*store), 0u);
  EXPECT_EQ(store->inspection().Counters().retired_bytes, 0u);
  TestSequence second = TestSequence::Prompt(&session, kQuest, Tokens(10, 500));
  EXPECT_EQ(second.Table().page(0)->offset, offset);

  const int reader = session.reader().Enter();
  const shm::TableView seen = second.Table();
  const TestSequence as_seen = second;
  ASSERT_TRUE(second.Close().ok());
  EXPECT_GT(UsedBytes(*store), 0u);
  TestSequence third = TestSequence::Prompt(&session, kQuest, Tokens(10, 900));
  EXPECT_NE(third.Table().page(0)->offset, offset);
  as_seen.ExpectIntact(seen);
  session.reader().Leave(reader);
  ASSERT_TRUE(third.Close().ok());
  EXPECT_EQ(UsedBytes(*store), 0u);
  EXPECT_EQ(store->inspection().Counters().retired_bytes, 0u);
  ExpectClean(*store);
}

TEST(Store, AParkedReaderHoldsBackNoOtherTenant) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession a(store.get(), "uid:1"), b(store.get(), "uid:2");
  a.reader().Enter();
  TestSequence s = TestSequence::Prompt(&b, "full", Tokens(10));
  ASSERT_TRUE(s.Close().ok());
  store->references().Reclaim();
  EXPECT_EQ(UsedBytes(*store), 0u);
}

TEST(Store, ADeadSessionsReadersHoldBackNothing) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession a(store.get()), b(store.get());
  a.reader().Enter();
  TestSequence s = TestSequence::Prompt(&b, "full", Tokens(10));
  ASSERT_TRUE(s.Close().ok());
  store->references().Reclaim();
  EXPECT_GT(UsedBytes(*store), 0u);
  store->sessions().EndSession(a.id(), SessionEnd::kEof);  // it may still be reading
  EXPECT_GT(UsedBytes(*store), 0u);
  store->sessions().EndSession(a.id(), SessionEnd::kDied);
  EXPECT_EQ(UsedBytes(*store), 0u);
}

// --- moving ---

TEST(Store, MoveTakesSealedPagesAndThePrefixWithThem) {
  auto store = NewStore(SmallPools(128, 128));
  TestSession a(store.get()), b(store.get());
  const auto prompt = Tokens(100);
  TestSequence s = TestSequence::Prompt(&a, "full", prompt);
  const Result<MoveResult> moved = store->moves().Move(s.id(), Tier::kHost);
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->pages, 6u);
  EXPECT_EQ(moved->bytes, 6 * 4096u);
  EXPECT_EQ(moved->version, s.Table().table->version);
  for (uint32_t i = 0; i < s.Table().pages; ++i) EXPECT_EQ(s.Table().page(i)->tier, i < 6 ? 1 : 0);
  s.ExpectIntact();
  store->references().Reclaim();
  EXPECT_EQ(store->inspection().Counters().retired_bytes, 0u) << "the originals are back";
  ExpectClean(*store);
  const TestSequence other = TestSequence::Prompt(&b, "full", prompt);
  EXPECT_EQ(other.Table().page(0)->tier, 1);
  EXPECT_FALSE(b.grants().at(other.Table().page(0)->arena));
  other.ExpectIntact();
  EXPECT_EQ(store->moves().Move(s.id(), Tier::kHost)->pages, 0u);
  // Moving one back leaves the other where it is.
  ASSERT_TRUE(store->moves().Move(s.id(), Tier::kDevice).ok());
  EXPECT_EQ(s.Table().page(0)->tier, 0);
  EXPECT_EQ(other.Table().page(0)->tier, 1);
  other.ExpectIntact();
  s.ExpectIntact();
  ExpectClean(*store);
}

TEST(Store, MoveToAFullPoolChangesNothing) {
  auto store = NewStore(SmallPools(64, 4));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(100));
  const uint64_t used = UsedBytes(*store);
  EXPECT_EQ(store->moves().Move(s.id(), Tier::kHost).status().reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(UsedBytes(*store), used);
  s.ExpectIntact();
  ExpectClean(*store);
}

// --- shortage ---

TEST(Store, SpillsToTheHostAndThenSaysExhausted) {
  auto store = NewStore(SmallPools(32, 32));
  TestSession session(store.get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(40 * 16));
  EXPECT_EQ(s.Table().page(0)->tier, 0);
  EXPECT_EQ(s.Table().page(39)->tier, 1);
  const uint64_t used = UsedBytes(*store);
  const Status status = session.Open("full", Tokens(30 * 16, 9000)).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(UsedBytes(*store), used) << "nothing was taken";
  ExpectClean(*store);
  // The running one goes on to the last page, and is told when there are none.
  const auto pages_left = static_cast<int32_t>(64 - s.Table().pages);
  for (int32_t t = 0; t < pages_left * 16 + 16; ++t) ASSERT_TRUE(s.Append(t).ok()) << t;
  EXPECT_EQ(s.Append(7).reason(), "POOL_EXHAUSTED");
  s.ExpectIntact();
  ExpectClean(*store);
}

TEST(Store, ShortageEvictsTheOldestCachedPrefixFromItsEnd) {
  auto store = NewStore(SmallPools(32, 0));
  TestSession session(store.get());
  for (int32_t i = 0; i < 2; ++i) {
    TestSequence s = TestSequence::Prompt(&session, "full", Tokens(160, 1000 * i));
    ASSERT_TRUE(s.Close().ok());
  }
  EXPECT_EQ(store->inspection().Pools()[0].cached_bytes, 20 * 4096u);
  // 15 pages and headroom: 12 are free, so 4 or more of the first prefix must go.
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(240, 5000));
  s.ExpectIntact();
  const uint32_t first =
      store->lookups().Lookup(session.id(), session.model(), Tokens(161, 0))->held_tokens();
  EXPECT_EQ(
      store->lookups().Lookup(session.id(), session.model(), Tokens(161, 1000))->held_tokens(),
      160u);
  EXPECT_LT(first, 160u);
  EXPECT_GT(first, 0u) << "its beginning is still of use";
  ExpectClean(*store);
}

TEST(Store, SpaceOfOtherSessionsReturnsWhenNobodyUsesIt) {
  auto store = NewStore(SmallPools(32, 0));  // one arena
  TestSession a(store.get(), "uid:1"), b(store.get(), "uid:2");
  TestSequence s = TestSequence::Prompt(&a, "full", Tokens(160));
  EXPECT_EQ(b.Open("full", Tokens(16)).status().reason(), "POOL_EXHAUSTED");
  ASSERT_TRUE(s.Close().ok());
  TestSequence other = TestSequence::Prompt(&b, "full", Tokens(16));  // drops a's cached pages
  other.ExpectIntact();
  EXPECT_EQ(store->lookups().Lookup(a.id(), a.model(), Tokens(160))->held_tokens(), 0u);
  ExpectClean(*store);
}

TEST(Store, EvictDropsWhatNobodyUses) {
  auto store = NewStore(SmallPools(64, 64));
  TestSession session(store.get());
  TestSequence a = TestSequence::Prompt(&session, "full", Tokens(160));
  TestSequence b = TestSequence::Prompt(&session, "full", Tokens(160, 500));
  ASSERT_TRUE(a.Close().ok());
  EXPECT_EQ(store->eviction().Evict(true).pages(), 10u);
  EXPECT_EQ(store->eviction().Evict(false).bytes(), 10 * 4096u);
  EXPECT_EQ(store->eviction().Evict(true).pages(), 0u);
  b.ExpectIntact();
  ExpectClean(*store);
}

TEST(Store, FailedMemoryIsAShortageAndTakesNothing) {
  for (uint64_t successes = 0; successes < 3; ++successes) {
    SCOPED_TRACE("allocation " + std::to_string(successes) + " fails");
    StoreOptions options = SmallPools(256, 256);
    Result<std::unique_ptr<Store>> created =
        Store::Create(options, NewFailingResource(NewEmulatedDevice(), successes),
                      NewFailingResource(NewHostMemory(), 0));
    ASSERT_TRUE(created.ok());
    Store* store = created->get();
    TestSession session(store);
    EXPECT_EQ(session.Open("full", Tokens(128 * 16)).status().reason(), "POOL_EXHAUSTED");
    EXPECT_EQ(UsedBytes(*store), 0u);
    ExpectClean(*store);
  }
}

// --- ends ---

TEST(Store, SessionEndReturnsPagesAndKeepsThePrefix) {
  for (const SessionEnd how : {SessionEnd::kDetached, SessionEnd::kEof, SessionEnd::kDied}) {
    auto store = NewStore(SmallPools(128, 128));
    const auto prompt = Tokens(100);
    TestSession a(store.get()), b(store.get());
    TestSequence s = TestSequence::Prompt(&a, kQuest, prompt);
    const TestSequence kept = TestSequence::Prompt(&b, "full", prompt);
    ASSERT_TRUE(s.Fork().ok());
    store->sessions().EndSession(a.id(), how);
    store->sessions().EndSession(a.id(), how);  // idempotent
    ExpectClean(*store);
    EXPECT_EQ(store->inspection().Sessions().size(), how == SessionEnd::kEof ? 2u : 1u) << "fenced";
    EXPECT_EQ(store->inspection().Sequences(0).size(), 1u);
    kept.ExpectIntact();
    EXPECT_EQ(store->lookups().Lookup(b.id(), b.model(), prompt)->held_tokens(), 96u);
    store->sessions().EndSession(a.id(), SessionEnd::kDied);
    store->sessions().EndSession(b.id(), SessionEnd::kDied);
    store->eviction().Evict(false);
    EXPECT_EQ(UsedBytes(*store), 0u);
    EXPECT_EQ(store->inspection().Pools()[0].arenas, 0u);
    ExpectClean(*store);
  }
}

TEST(Store, ArenasAreFencedUntilTheirWriterDied) {
  auto store = NewStore(SmallPools(32, 0));  // one arena
  TestSession a(store.get());
  TestSequence s = TestSequence::Prompt(&a, "full", Tokens(160));
  const uint32_t arena = s.Table().page(0)->arena;
  store->sessions().EndSession(a.id(), SessionEnd::kEof);
  TestSession b(store.get());
  EXPECT_EQ(b.Open("full", Tokens(16, 900)).status().reason(), "POOL_EXHAUSTED");
  store->sessions().EndSession(a.id(), SessionEnd::kDied);
  const TestSequence other = TestSequence::Prompt(&b, "full", Tokens(16, 900));
  EXPECT_EQ(other.Table().page(0)->arena, arena) << "the orphan arena has a new writer";
  EXPECT_TRUE(b.grants().at(arena));
  EXPECT_EQ(store->lookups().Lookup(b.id(), b.model(), Tokens(161))->held_tokens(), 160u)
      << "with the prefix still in it";
  ExpectClean(*store);
}

TEST(Store, AnArenaMappedReadOnlyNeverChangesItsWriterToThatSession) {
  auto store = NewStore(SmallPools(64, 0));
  TestSession a(store.get()), b(store.get());
  const auto prompt = Tokens(160);
  TestSequence s = TestSequence::Prompt(&a, "full", prompt);
  const uint32_t arena = s.Table().page(0)->arena;
  TestSequence other = TestSequence::Prompt(&b, "full", prompt);
  store->sessions().EndSession(a.id(), SessionEnd::kDetached);
  ASSERT_TRUE(other.Append(Tokens(100, 7000)).ok());
  EXPECT_FALSE(b.grants().at(arena));
  other.ExpectIntact();
  ExpectClean(*store);
}

// --- threads ---

// Engines in four threads, an operator beside them; run under TSan by the preset of that name.
TEST(Store, ManyThreads) {
  // A reader that waits for a core holds back all that the loop below retires meanwhile.
  auto store = NewStore(SmallPools(2048, 2048));
  constexpr int kThreads = 4;
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      TestSession session(store.get());
      for (int32_t round = 0; round < 12; ++round) {
        const auto prompt = Tokens(300, (round % 3) * 100);
        TestSequence s = TestSequence::Prompt(&session, kQuest, prompt);
        Result<TestSequence> fork = s.Fork();
        ASSERT_TRUE(fork.ok()) << fork.status().ToString();
        for (int32_t t = 0; t < 20; ++t) {
          ASSERT_TRUE(s.Append(thread * 1000 + t).ok());
          ASSERT_TRUE(fork->Append(thread * 1000 + 500 + t).ok());
        }
        const int reader = session.reader().Enter();
        s.ExpectIntact();
        fork->ExpectIntact();
        session.reader().Leave(reader);
        ASSERT_TRUE(s.Close().ok());
        ASSERT_TRUE(fork->Close().ok());
      }
      store->sessions().EndSession(session.id(), SessionEnd::kDetached);
      --running;
    });
  }
  for (uint64_t i = 0; running.load() > 0; ++i) {
    for (const SequenceInfo& s : store->inspection().Sequences(0)) {
      (void)store->moves().Move(s.sequence, i % 2 == 0 ? Tier::kHost : Tier::kDevice);
    }
    store->references().Reclaim();
    ExpectClean(*store);
    (void)store->eviction().Evict(i % 3 != 0);
    (void)store->inspection().Sessions();
    (void)store->inspection().Pools();
  }
  for (std::thread& t : threads) t.join();
  store->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store), 0u);
  ExpectClean(*store);
}

}  // namespace
}  // namespace kvstrata
