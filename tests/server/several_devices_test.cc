// SPDX-License-Identifier: Apache-2.0
// A store with a pool for each of three devices: who gets whose memory, prefixes that are met from
// another device, and what is told and changed by device. Runs on emulated devices, and on gpu
// ones, whose memory no other device's Copy can touch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fakes/copying_codec.h"
#include "tests/fakes/failing_resource.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kDevices = 3;
constexpr uint64_t kPage = 4096;
constexpr char kIndexed[] = "quest{page = 16, min_tokens = 0}";

class SeveralDevices : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { MakeStore(SmallPools(256, 256)); }

  void MakeStore(StoreOptions options) {
    sessions_.clear();
    device_of_.clear();
    store_.reset();
    options.on_pool_failure = [this](PoolId pool, const Status&) { told_.push_back(pool); };
    options.new_recompressor = [](const Plan& plan, const Geometry& geometry,
                                  ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector != SelectorKind::kWindow) return nullptr;
      return std::make_unique<CopyingCodec>(std::make_shared<CodecControl>(), geometry);
    };
    std::vector<StoreDevice> devices;
    for (uint32_t i = 0; i < kDevices; ++i) {
      lost_[i] = std::make_shared<std::atomic<bool>>(false);
      devices.push_back({NameOf(i), NewLosableResource(NewMemory(), lost_[i])});
    }
    Result<std::unique_ptr<Store>> store =
        Store::Create(options, std::move(devices), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    store_->moves().SetMoveSink([] {});
    for (uint32_t i = 0; i < kDevices; ++i) Attach(i);
  }
  void TearDown() override {
    ExpectClean(*store_);
    ExpectOwnArenas();
    for (const auto& session : sessions_) {
      store_->sessions().EndSession(session->id(), SessionEnd::kDetached);
    }
    (void)store_->eviction().Evict(false);
    EXPECT_EQ(UsedBytes(*store_), 0u);
    ExpectClean(*store_);
  }

  static std::unique_ptr<MemoryResource> NewMemory() {
    if (!GetParam()) return NewEmulatedDevice();
    return std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false));
  }
  static std::string NameOf(uint32_t device) { return "device-" + std::to_string(device); }
  TestSession* Attach(uint32_t device) {
    sessions_.push_back(
        std::make_unique<TestSession>(store_.get(), "uid:1", Transport::kLinked, device));
    device_of_.push_back(device);
    return sessions_.back().get();
  }
  // The session that SetUp attached with that device.
  TestSession* On(uint32_t device) { return sessions_[device].get(); }
  TestSequence Prompt(uint32_t device, const std::vector<int32_t>& tokens,
                      std::string_view plan = "full") {
    return TestSequence::Prompt(On(device), plan, tokens);
  }
  PoolInfo Pool(uint32_t device) const { return store_->inspection().Pools()[device]; }
  PoolInfo Host() const { return store_->inspection().Pools().back(); }
  uint64_t Replicated() const { return store_->inspection().Counters().replicated_pages; }
  uint32_t Held(const std::vector<int32_t>& prompt) {
    return store_->lookups().Lookup(On(0)->id(), On(0)->model(), prompt)->held_tokens();
  }
  void MoveAll() {
    for (int i = 0; store_->moves().MoveSome(4 * kPage); ++i)
      ASSERT_LT(i, 10'000) << "it runs in a circle";
  }
  // No arena was granted to sessions of two devices, but for those of the host.
  void ExpectOwnArenas() const {
    for (size_t i = 0; i < sessions_.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (device_of_[i] == device_of_[j]) continue;
        for (const auto& [arena, writable] : sessions_[i]->grants()) {
          if (!sessions_[j]->grants().contains(arena)) continue;
          EXPECT_TRUE(arena_on_host(arena)) << "arena " << arena << " went to two devices";
        }
      }
    }
  }

  bool arena_on_host(uint32_t arena) const {
    for (const SequenceInfo& info : store_->inspection().Sequences(0)) {
      const Result<SequenceDetail> detail = store_->inspection().Show(info.sequence);
      for (const PageInfo& page : detail->pages) {
        if (!page.absent && page.arena == arena) return page.tier == Tier::kHost;
      }
    }
    return true;  // nobody has it any more
  }

  std::array<std::shared_ptr<std::atomic<bool>>, kDevices> lost_;
  std::vector<PoolId> told_;
  std::unique_ptr<Store> store_;
  std::vector<std::unique_ptr<TestSession>> sessions_;
  std::vector<uint32_t> device_of_;
};

INSTANTIATE_TEST_SUITE_P(Memory, SeveralDevices, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "gpu" : "emulated"; });

TEST_P(SeveralDevices, PagesComeFromTheSessionsDevice) {
  std::vector<TestSequence> sequences;
  for (uint32_t i = 0; i < kDevices; ++i) {
    const auto n = static_cast<int32_t>(100 * (i + 1));
    sequences.push_back(Prompt(i, Tokens(n, static_cast<int32_t>(10'000 * i))));
  }
  for (const TestSequence& s : sequences) s.ExpectIntact();
  const std::vector<PoolInfo> pools = store_->inspection().Pools();
  ASSERT_EQ(pools.size(), kDevices + 1);
  for (uint32_t i = 0; i < kDevices; ++i) {
    EXPECT_EQ(pools[i].tier, Tier::kDevice);
    EXPECT_EQ(pools[i].device, NameOf(i));
    EXPECT_EQ(pools[i].capacity_bytes, 256 * kPage) << "each of its own";
    EXPECT_EQ(pools[i].used_bytes, store_->inspection().Show(sequences[i].id())->info.device_bytes);
  }
  EXPECT_EQ(pools.back().tier, Tier::kHost);
  EXPECT_EQ(pools.back().device, "");
  EXPECT_EQ(pools.back().used_bytes, 0u);
  EXPECT_EQ(store_->inspection().Sessions()[1].device, NameOf(1));
}

TEST_P(SeveralDevices, AnUnknownDeviceIsNamedWithThoseThereAre) {
  EXPECT_EQ(*store_->devices().FindDevice(""), 0u);
  EXPECT_EQ(*store_->devices().FindDevice("device-2"), 2u);
  EXPECT_EQ(store_->devices().DeviceName(2), "device-2");
  const Status unknown = store_->devices().FindDevice("GPU-9").status();
  EXPECT_EQ(unknown.reason(), "DEVICE_UNKNOWN");
  EXPECT_THAT(unknown.message(), HasSubstr("'device-0', 'device-1', 'device-2'"));
}

TEST_P(SeveralDevices, AFullDeviceTakesNoOthersMemory) {
  Result<OpenedSequence> big = On(0)->Open("full", Tokens(600 * 16));
  EXPECT_EQ(big.status().reason(), "POOL_EXHAUSTED") << "its device and host have 512 pages";
  EXPECT_THAT(big.status().message(), HasSubstr("pool 'device device-0'"));
  EXPECT_EQ(Pool(1).used_bytes, 0u);
}

TEST_P(SeveralDevices, APrefixOnAnotherDeviceIsCopiedOnce) {
  const auto tokens = Tokens(600);
  TestSequence first = Prompt(0, tokens, kIndexed);
  ASSERT_TRUE(first.Append(4000).ok()) << "the step that completes the index";
  EXPECT_EQ(Replicated(), 0u);
  TestSequence second = Prompt(1, tokens, kIndexed);
  EXPECT_EQ(second.opened().held_tokens, 592u);
  EXPECT_GT(second.opened().indexed_tokens, 0u) << "index blocks come with it";
  const uint64_t replicated = Replicated();
  EXPECT_GT(replicated, 37u);
  EXPECT_EQ(Pool(1).used_bytes, store_->inspection().Show(second.id())->info.device_bytes);
  // The next one of that device shares it.
  TestSession* const also = Attach(1);
  TestSequence third = TestSequence::Prompt(also, kIndexed, tokens);
  EXPECT_EQ(third.opened().held_tokens, 592u);
  EXPECT_EQ(Replicated(), replicated);
  EXPECT_GE(store_->inspection().Show(third.id())->info.shared_pages, 37u);
  // They go on apart.
  ASSERT_TRUE(first.Append(Tokens(100, 5000)).ok());
  ASSERT_TRUE(second.Append(Tokens(100, 6000)).ok());
  ASSERT_TRUE(third.Append(Tokens(100, 7000)).ok());
  for (const TestSequence* s : {&first, &second, &third}) s->ExpectIntact();
}

// With a queue the caller's thread copies nothing: opens of others are answered meanwhile, the
// second one of the prefix finds what the first one copied, and one whose session ended is told so.
TEST_P(SeveralDevices, AnOpenThatCopiesHoldsUpNobody) {
  std::vector<std::function<void()>> posted;
  store_->replication().SetReplicationQueue(
      [&](std::function<void()> open) { posted.push_back(open); });
  std::vector<Result<OpenedSequence>> opened;
  const auto open = [&](const TestSession* session, const std::vector<int32_t>& tokens) {
    store_->openings().OpenSequence(session->id(), session->model(), "full", tokens,
                                    [&](const Result<OpenedSequence>& o) { opened.push_back(o); });
  };
  const auto tokens = Tokens(100);
  const TestSequence first = Prompt(0, tokens);
  const TestSession* const gone = Attach(1);
  open(On(1), tokens);
  open(On(1), tokens);
  open(gone, tokens);
  ASSERT_EQ(posted.size(), 3u);
  ASSERT_TRUE(opened.empty());
  open(On(0), tokens);
  open(On(2), Tokens(50, 9000));
  ASSERT_EQ(opened.size(), 2u) << "nothing of theirs lies elsewhere";
  store_->sessions().EndSession(gone->id(), SessionEnd::kDied);

  for (const auto& copies : posted) copies();
  ASSERT_EQ(opened.size(), 5u);
  for (const int i : {2, 3}) {
    ASSERT_TRUE(opened[static_cast<size_t>(i)].ok());
    EXPECT_EQ(opened[static_cast<size_t>(i)]->held_tokens, 96u);
  }
  EXPECT_EQ(Replicated(), 6u) << "once";
  EXPECT_EQ(opened[4].status().reason(), "SESSION_UNKNOWN") << opened[4].status().ToString();
  store_->replication().SetReplicationQueue(nullptr);
}

// Computed on both before either could be found: nothing has to be copied for the next ones.
TEST_P(SeveralDevices, WhatTwoDevicesComputedIsFoundOnBoth) {
  const auto tokens = Tokens(100);
  std::vector<TestSequence> sequences;
  for (uint32_t i = 0; i < 2; ++i) {
    sequences.emplace_back(On(i), std::move(On(i)->Open("full", tokens)).value(), tokens);
  }
  for (TestSequence& s : sequences) ASSERT_TRUE(s.Append(tokens).ok());
  for (uint32_t i = 0; i < 2; ++i) {
    TestSequence next = Prompt(i, tokens);
    EXPECT_EQ(next.opened().held_tokens, 96u);
    EXPECT_GE(store_->inspection().Show(next.id())->info.shared_pages, 6u);
    next.ExpectIntact();
  }
  EXPECT_EQ(Replicated(), 0u);
}

TEST_P(SeveralDevices, AForkStaysOnItsDevice) {
  TestSequence s = Prompt(2, Tokens(100));
  TestSequence fork = std::move(s.Fork()).value();
  ASSERT_TRUE(fork.Append(Tokens(100, 5000)).ok());
  ASSERT_TRUE(s.Append(Tokens(50, 6000)).ok());
  s.ExpectIntact();
  fork.ExpectIntact();
  EXPECT_EQ(Pool(0).used_bytes + Pool(1).used_bytes + Host().used_bytes, 0u);
}

TEST_P(SeveralDevices, WhatAnotherDeviceReportedComesWithThePages) {
  const auto tokens = Tokens(100);
  TestSequence first = Prompt(0, tokens);
  const std::vector<float> surprisal(100, 1.5f);
  ASSERT_TRUE(store_->steps()
                  .Report(On(0)->id(), first.id(), 0, 100, surprisal.data(), nullptr, nullptr)
                  .ok());
  EXPECT_EQ(Prompt(1, tokens).opened().surprisal_tokens, 96u);
}

TEST_P(SeveralDevices, TheCopyStaysWhenTheOriginalGoes) {
  const auto tokens = Tokens(200);
  TestSequence first = Prompt(0, tokens);
  TestSequence second = Prompt(1, tokens);
  ASSERT_TRUE(first.Close().ok());
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(Pool(0).used_bytes, 0u);
  EXPECT_EQ(Held(tokens), 192u) << "on device-1";
  TestSequence third = Prompt(0, tokens);
  EXPECT_EQ(third.opened().held_tokens, 192u);
  third.ExpectIntact();
  second.ExpectIntact();
}

TEST_P(SeveralDevices, APrefixOnHostIsReadWhereItIs) {
  const auto tokens = Tokens(100);
  TestSequence first = Prompt(0, tokens);
  ASSERT_TRUE(store_->moves().Move(first.id(), Tier::kHost).ok());
  TestSequence second = Prompt(1, tokens);
  EXPECT_EQ(second.opened().held_tokens, 96u);
  EXPECT_EQ(Replicated(), 0u);
  // The mover takes it to the device of who opened on it; the first one stays on its own.
  MoveAll();
  EXPECT_EQ(store_->inspection().Show(second.id())->info.host_bytes, 0u);
  EXPECT_GT(store_->inspection().Show(first.id())->info.host_bytes, 0u);
  first.ExpectIntact();
  second.ExpectIntact();
  // And back to their own.
  ASSERT_TRUE(store_->moves().Move(first.id(), Tier::kDevice).ok());
  EXPECT_EQ(store_->inspection().Show(first.id())->info.host_bytes, 0u);
  first.ExpectIntact();
}

TEST_P(SeveralDevices, WithoutRoomThePrefixIsShorter) {
  StoreOptions options = SmallPools(64, 16);
  MakeStore(options);
  const auto tokens = Tokens(40 * 16 + 1);
  TestSequence first = Prompt(0, tokens);
  TestSequence other = Prompt(1, Tokens(48 * 16, 50'000));
  Result<OpenedSequence> second = On(1)->Open("full", tokens);
  EXPECT_EQ(second.status().reason(), "POOL_EXHAUSTED");
  first.ExpectIntact();
  other.ExpectIntact();
  ExpectClean(*store_);
  ASSERT_TRUE(other.Close().ok());
  TestSequence third = Prompt(1, tokens);
  EXPECT_EQ(third.opened().held_tokens, 640u) << "what nobody used gave way";
  third.ExpectIntact();
}

TEST_P(SeveralDevices, ALostDeviceLeavesTheOthers) {
  const auto shared = Tokens(100), only_there = Tokens(100, 20'000);
  TestSequence first = Prompt(0, shared), alone = Prompt(0, only_there);
  TestSequence second = Prompt(1, shared), third = Prompt(2, Tokens(100, 30'000));
  *lost_[0] = true;
  EXPECT_EQ(store_->moves().Move(first.id(), Tier::kHost).status().reason(), "DEVICE_FAILED");
  store_->references().Reclaim();
  EXPECT_THAT(told_, ElementsAre(PoolId::Device(0)));
  EXPECT_NE(Pool(0).failure, "");
  EXPECT_EQ(Pool(1).failure + Pool(2).failure + Host().failure, "");
  EXPECT_EQ(first.Append(Tokens(60, 500)).reason(), "DEVICE_FAILED");
  EXPECT_EQ(alone.Fork().status().reason(), "DEVICE_FAILED");
  for (TestSequence* s : {&second, &third}) {
    ASSERT_TRUE(s->Append(Tokens(60, 500)).ok());
    s->ExpectIntact();
    ASSERT_TRUE(store_->moves().Move(s->id(), Tier::kHost).ok());
    s->ExpectIntact();
  }
  EXPECT_EQ(Held(only_there), 0u);
  EXPECT_EQ(Held(shared), 96u) << "device-1 had a copy";
  // A session of the lost device is served from host.
  TestSequence again = Prompt(0, only_there);
  EXPECT_EQ(store_->inspection().Show(again.id())->info.device_bytes, 0u);
  again.ExpectIntact();
}

TEST_P(SeveralDevices, ACopyMayFindOutWhichDeviceIsLost) {
  const auto tokens = Tokens(100);
  TestSequence first = Prompt(0, tokens);
  *lost_[0] = true;
  TestSequence second = Prompt(1, tokens);
  EXPECT_EQ(second.opened().held_tokens, 0u);
  second.ExpectIntact();
  EXPECT_THAT(told_, ElementsAre(PoolId::Device(0)));
  EXPECT_EQ(Replicated(), 0u);
  // The other end.
  *lost_[2] = true;
  TestSequence third = Prompt(2, tokens);
  EXPECT_THAT(told_, ElementsAre(PoolId::Device(0), PoolId::Device(2)));
  EXPECT_EQ(Pool(1).failure, "");
  third.ExpectIntact();
  second.ExpectIntact();
}

TEST_P(SeveralDevices, PoolsAreResizedByDevice) {
  EXPECT_EQ(store_->moves().ResizePool(Tier::kDevice, 512 * kPage, "device-1")->capacity_bytes,
            512 * kPage);
  EXPECT_EQ(Pool(0).capacity_bytes, 256 * kPage);
  EXPECT_EQ(Pool(1).capacity_bytes, 512 * kPage);
  EXPECT_EQ(store_->moves().ResizePool(Tier::kDevice, 300 * kPage)->capacity_bytes, 900 * kPage)
      << "all of them";
  EXPECT_EQ(Pool(1).capacity_bytes, 300 * kPage);
  EXPECT_EQ(store_->moves().ResizePool(Tier::kDevice, 300 * kPage, "moon").status().reason(),
            "DEVICE_UNKNOWN");
  EXPECT_EQ(store_->moves().ResizePool(Tier::kHost, 300 * kPage, "device-1").status().reason(),
            "DEVICE_UNKNOWN");
}

TEST_P(SeveralDevices, WatermarksAreEachPoolsOwn) {
  const auto keeps = Tokens(60 * 16);
  ASSERT_TRUE(Prompt(0, keeps).Close().ok());
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(Prompt(1, Tokens(90 * 16, 100'000 * i)).Close().ok());
  }
  MoveAll();
  EXPECT_LE(Pool(1).used_bytes, 205 * kPage) << "80 % of 256";
  EXPECT_GT(Host().used_bytes, 0u);
  EXPECT_GE(Pool(0).used_bytes, 60 * kPage) << "nothing of device-0 had to go";
}

// Their pages stay elsewhere: they are dropped, not moved to host.
TEST_P(SeveralDevices, ReplicasGoBeforePages) {
  const auto shared = Tokens(100 * 16);
  ASSERT_TRUE(Prompt(0, shared).Close().ok());
  ASSERT_TRUE(Prompt(1, shared).Close().ok());
  ASSERT_EQ(Replicated(), 99u);
  ASSERT_TRUE(Prompt(1, Tokens(140 * 16, 100'000)).Close().ok());
  MoveAll();
  EXPECT_LE(Pool(1).used_bytes, 205 * kPage);
  EXPECT_EQ(Host().used_bytes, 0u);
  EXPECT_EQ(Held(shared), 1584u) << "on device-0";
}

TEST_P(SeveralDevices, APinKeepsThePageAndNotItsReplicas) {
  const auto tokens = Tokens(101);
  ASSERT_TRUE(Prompt(0, tokens).Close().ok());
  ASSERT_TRUE(
      store_->pins().PinPrefix("uid:1", On(0)->model(), tokens, std::chrono::seconds(100)).ok());
  ASSERT_TRUE(Prompt(1, tokens).Close().ok());
  ExpectClean(*store_);
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(Pool(0).used_bytes, 6 * kPage);
  EXPECT_EQ(Pool(1).used_bytes, 0u);
  ExpectClean(*store_);
  for (const PinInfo& pin : store_->pins().Pins())
    EXPECT_TRUE(store_->pins().RemovePin(pin.pin.id).ok());
}

TEST_P(SeveralDevices, ExtentsStayOnTheirDevice) {
  const auto tokens = Tokens(100);
  const auto recompressed = [&](uint32_t device) {
    TestSequence s = Prompt(device, tokens, "window");
    EXPECT_TRUE(store_->steps().PrefillDone(On(device)->id(), s.id()).ok());
    return s;
  };
  const auto run = [&](const TestSequence& s) {
    if (GetParam()) return;  // CopyingCodec reads what the host must not touch
    (void)Recompress(store_.get(), s.id());
    (void)Recompress(store_.get(), s.id());
  };
  TestSequence first = recompressed(0);
  run(first);
  TestSequence second = recompressed(1);
  EXPECT_TRUE(store_->inspection().Show(second.id())->extents.empty()) << "not those of device-0";
  run(second);
  first.ExpectIntact();
  second.ExpectIntact();
  if (GetParam()) return;
  EXPECT_FALSE(store_->inspection().Show(first.id())->extents.empty());
  EXPECT_FALSE(store_->inspection().Show(second.id())->extents.empty());
  EXPECT_EQ(store_->inspection().Counters().artefacts, 1u) << "of whoever was the last";
}

}  // namespace
}  // namespace kvstrata::testing
