// SPDX-License-Identifier: Apache-2.0
// RedisValueTier on real clusters that fail: servers killed, stopped, full, locked; slots that
// move. A call ends by its deadline, other shards are not held up, and no byte is wrong.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <future>
#include <map>
#include <thread>

#include "server/tier/blocking_calls.h"
#include "server/tier/redis/write_health.h"
#include "tests/server/tier/redis_servers.h"
#include "tests/server/tier/redis_tiers.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

const std::vector<uint64_t> kSizes = {3000, 500};

Deadline In(milliseconds time) { return Clock::now() + time; }

std::unique_ptr<RedisValueTier> OpenTier(RedisTierOptions options,
                                         remote::RemoteFormat format = TestFormat()) {
  options.survey_interval = milliseconds(20);
  Result<std::unique_ptr<RedisValueTier>> opened = RedisValueTier::Open(options, format);
  KVS_CHECK(opened.ok());
  return std::move(*opened);
}

class RedisCluster : public ::testing::Test {
 protected:
  void Begin(const RedisServersOptions& options, RedisTierOptions tier = {}) {
    servers_ = std::make_unique<RedisServers>(options);
    if (tier.servers.empty()) tier.servers = servers_->addresses();
    tier_ = OpenTier(tier);
  }
  static std::string KeyOf(int i) { return "key " + std::to_string(i); }
  size_t ShardOf(int i) const {
    const uint16_t slot = redis::SlotOf(TestFormat().NameOf(KeyOf(i), ""));
    for (size_t shard = 0; shard < servers_->masters(); ++shard) {
      if (slot < redis::kSlots * (shard + 1) / servers_->masters()) return shard;
    }
    return 0;
  }
  // How many of keys 0 to n - 1 end so.
  std::map<std::string, int> PutAll(int n, Deadline deadline = Soon()) {
    std::vector<TierPut> puts;
    for (int i = 0; i < n; ++i) puts.push_back(PutOf(KeyOf(i), ValueOf(KeyOf(i), 0, kSizes)));
    PutAndWait(tier_.get(), puts, deadline);
    std::map<std::string, int> ends;
    for (const TierPut& put : puts) ++ends[put.status.ok() ? "OK" : put.status.reason()];
    return ends;
  }
  std::map<std::string, int> GetAll(int n, Deadline deadline = Soon()) {
    std::vector<TierGet> gets;
    std::vector<AlignedBuffers> into;
    for (int i = 0; i < n; ++i) {
      into.emplace_back(kSizes);
      gets.push_back({KeyOf(i), into.back().buffers(), into.back().owner(), {}});
    }
    GetAndWait(tier_.get(), gets, deadline);
    std::map<std::string, int> ends;
    for (int i = 0; i < n; ++i) {
      const Status& status = gets[static_cast<size_t>(i)].status;
      ++ends[status.ok() ? "OK" : status.reason()];
      if (status.ok()) {
        EXPECT_TRUE(SameBytes(into[static_cast<size_t>(i)], ValueOf(KeyOf(i), 0, kSizes)));
      }
    }
    return ends;
  }
  // Tries until `so`, which fails the test after a minute.
  template <typename F>
  void Until(const char* what, const F& so) {
    const Deadline end = Soon();
    while (!so()) ASSERT_LT(Clock::now(), end) << what;
  }
  int Open() const {
    int open = 0;
    for (const redis::RedisServerStats& server : tier_->Servers()) open += server.open;
    return open;
  }

  std::unique_ptr<RedisServers> servers_;
  std::unique_ptr<RedisValueTier> tier_;
};

using Ends = std::map<std::string, int>;

TEST_F(RedisCluster, ValuesAreOnAllShardsAndAProbeFindsThem) {
  Begin({.masters = 3, .cluster = true});
  EXPECT_EQ(PutAll(300), (Ends{{"OK", 300}}));
  EXPECT_EQ(GetAll(300), (Ends{{"OK", 300}}));
  std::vector<std::string> keys;
  for (int i = 0; i < 10000; ++i) keys.push_back(KeyOf(i));
  std::vector<TierProbe> probes(keys.begin(), keys.end());
  std::promise<void> end;
  tier_->Probe(probes, {Soon(), {}, [&] { end.set_value(); }});
  end.get_future().wait();
  for (size_t i = 0; i < probes.size(); ++i) {
    ASSERT_TRUE(std::ranges::equal(probes[i].sizes.all(), i < 300 ? kSizes : decltype(kSizes){}));
  }
  int walked = 0;
  EXPECT_TRUE(WalkAndWait(tier_.get(), Soon(), [&](const TierValue& value) {
                EXPECT_EQ(value.sizes, kSizes);
                ++walked;
              }).ok());
  EXPECT_EQ(walked, 300);
  for (size_t i = 0; i < 3; ++i) EXPECT_GT(servers_->Ask(i, {"DBSIZE"}).integer, 30);
}

TEST_F(RedisCluster, ValuesOfSeveralStripesSealedOrNot) {
  Begin({.masters = 3, .cluster = true});
  const std::vector<uint64_t> sizes = {5 << 20, 100, 6 << 20};
  const auto sealed =
      OpenTier({.servers = servers_->addresses()}, TestFormat("other", remote::Seal::kGcm));
  for (ValueTier* const tier :
       {static_cast<ValueTier*>(tier_.get()), static_cast<ValueTier*>(sealed.get())}) {
    TierPut put = PutOf("large", ValueOf("large", 0, sizes));
    PutAndWait(tier, {&put, 1}, Soon());
    ASSERT_TRUE(put.status.ok()) << put.status.ToString();
    const AlignedBuffers into(sizes);
    TierGet get{"large", into.buffers(), into.owner(), {}};
    GetAndWait(tier, {&get, 1}, Soon());
    ASSERT_TRUE(get.status.ok()) << get.status.ToString();
    EXPECT_TRUE(SameBytes(into, ValueOf("large", 0, sizes)));
    EXPECT_TRUE(ForgetAndWait(tier, std::vector<std::string>{"large"}, Soon()).ok());
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(servers_->Ask(i, {"DBSIZE"}).integer, 0);
}

TEST_F(RedisCluster, SlotsThatMoveAreFollowed) {
  Begin({.masters = 3, .cluster = true}, {.refresh_interval = std::chrono::hours(1)});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  for (int i = 0; i < 10; ++i) {  // ASK while a slot is on its way, MOVED afterwards
    const uint16_t slot = redis::SlotOf(TestFormat().NameOf(KeyOf(i), ""));
    const size_t from = ShardOf(i), to = (from + 1) % 3;
    servers_->BeginMove(slot, from, to);
    servers_->MoveKeys(slot, from, to, 100);
    EXPECT_EQ(GetAll(100), (Ends{{"OK", 100}})) << i;
    servers_->EndMove(slot, from, to);
    EXPECT_EQ(GetAll(100), (Ends{{"OK", 100}})) << i;
  }
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
}

TEST_F(RedisCluster, AMasterThatIsKilledCostsItsShardAlone) {
  Begin({.masters = 3, .cluster = true});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  int lost = 0;
  for (int i = 0; i < 100; ++i) lost += ShardOf(i) == 1;
  servers_->Kill(1);
  for (int round = 0; round < 5; ++round) {
    Ends ends = GetAll(100);
    EXPECT_EQ(ends["OK"], 100 - lost);
    EXPECT_EQ(ends["REDIS_MISS"], 0);
  }
  Until("it says so", [&] { return !tier_->Stats().illness.empty(); });
  servers_->Start(1);  // empty
  Until("it serves again", [&] { return GetAll(100)["REDIS_MISS"] == lost; });
}

TEST_F(RedisCluster, ReplicasServeReadsOfAMasterThatIsKilled) {
  Begin({.masters = 3, .replicas = 1, .cluster = true});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  for (size_t i = 0; i < 3; ++i) servers_->Ask(i, {"WAIT", "1", "10000"});
  servers_->Kill(1);
  Ends all;
  for (int round = 0; round < 10; ++round) {
    for (const auto& [end, n] : GetAll(100)) all[end] += n;
  }
  EXPECT_EQ(all, (Ends{{"OK", 1000}}));
  Until("its replica takes over", [&] { return PutAll(150)["OK"] == 150; });
  EXPECT_EQ(GetAll(150), (Ends{{"OK", 150}}));
  // Every slot has a master that answers. The lost one, which was named, is none of the cluster's.
  Until("all is well", [&] { return tier_->Stats().illness.empty(); });
  const auto lists = [&](const redis::RedisServerStats& server) {
    return server.address.port == servers_->port(1);
  };
  Until("it is not listed", [&] { return std::ranges::none_of(tier_->Servers(), lists); });
  EXPECT_EQ(Open(), 0);
}

// Who begins, as doctor does, asks those that were not named, too.
TEST_F(RedisCluster, TheFirstPingIsOfAllServers) {
  servers_ = std::make_unique<RedisServers>(RedisServersOptions{.masters = 3, .cluster = true});
  servers_->Kill(1);
  const auto pings =
      OpenTier({.servers = {servers_->address(0), servers_->address(1)}})->PingAndWait(Soon());
  ASSERT_EQ(pings.size(), 3U);
  for (const RedisPing& ping : pings) {
    EXPECT_EQ(ping.status.ok(), ping.server.port != servers_->port(1)) << ping.server.ToString();
    EXPECT_EQ(ping.role, "master");
  }
}

TEST_F(RedisCluster, AServerThatIsStoppedHoldsUpNobodyElse) {
  Begin({.masters = 3, .cluster = true});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  int stopped = 0;
  for (int i = 0; i < 100; ++i) stopped += ShardOf(i) == 2;
  servers_->Stop(2);
  Ends ends = GetAll(100, In(milliseconds(500)));
  EXPECT_EQ(ends["OK"], 100 - stopped);
  EXPECT_EQ(ends["OK"] + ends["REDIS_SLOW"] + ends["TIER_DEADLINE"], 100);
  Until("its breaker opens", [&] {
    (void)GetAll(100, In(milliseconds(200)));
    return Open() == 1;
  });
  // Now nobody waits for it: far from the deadline, the call is over.
  ends = GetAll(100);
  EXPECT_EQ(ends["OK"], 100 - stopped);
  EXPECT_EQ(ends["REDIS_LEFT_ALONE"], stopped);
  servers_->Continue(2);
  Until("it serves again", [&] { return GetAll(100)["OK"] == 100; });
}

// It serves the client as it waits, for the others, too.
TEST_F(RedisCluster, WhoWaitsForAStoppedServerHoldsUpNobodyElse) {
  Begin({.masters = 3, .cluster = true});
  RedisTierOptions patient;  // which asks for nothing of its own meanwhile
  patient.servers = servers_->addresses();
  patient.connect_timeout = patient.stall_timeout = std::chrono::minutes(2);
  patient.refresh_interval = patient.survey_interval = std::chrono::minutes(2);
  tier_ = std::move(*RedisValueTier::Open(patient, TestFormat()));
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  std::vector<TierPut> stopped, others;
  for (int i = 0; i < 100; ++i) {
    (ShardOf(i) == 2 ? stopped : others).push_back(PutOf(KeyOf(i), ValueOf(KeyOf(i), 0, kSizes)));
  }
  servers_->Stop(2);
  std::atomic<bool> ended = false;
  std::thread waiting([&] {
    std::thread::id ended_in;
    TierCall call{Soon(), {}, [&] { ended_in = std::this_thread::get_id(); }};
    call.waits = true;
    tier_->Put(stopped, call);
    EXPECT_EQ(ended_in, std::this_thread::get_id());
    ended = true;
  });
  for (int round = 0; round < 20; ++round) {
    PutAndWait(tier_.get(), others, Soon());
    for (const TierPut& put : others) {
      EXPECT_TRUE(put.status.ok()) << put.status.ToString();
      const AlignedBuffers into(kSizes);
      TierGet get{put.key, into.buffers(), into.owner(), {}};
      GetAndWait(tier_.get(), {&get, 1}, Soon());
      EXPECT_TRUE(get.status.ok()) << get.status.ToString();
    }
  }
  EXPECT_FALSE(ended);
  servers_->Continue(2);
  waiting.join();
  for (const TierPut& put : stopped) EXPECT_TRUE(put.status.ok()) << put.status.ToString();
}

TEST_F(RedisCluster, ReplicasServeReadsOfAMasterThatIsStopped) {
  Begin({.masters = 3, .replicas = 1, .cluster = true});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  for (size_t i = 0; i < 3; ++i) servers_->Ask(i, {"WAIT", "1", "10000"});
  servers_->Stop(0);
  Ends all;
  for (int round = 0; round < 5; ++round) {
    for (const auto& [end, n] : GetAll(100)) all[end] += n;
  }
  EXPECT_EQ(all, (Ends{{"OK", 500}}));
  servers_->Continue(0);
}

TEST_F(RedisCluster, WhatAReplicaAloneLacksIsNoMiss) {
  // Silence for long is no failure here, neither of a connection nor of one that is being made.
  Begin({.masters = 3, .replicas = 1, .cluster = true},
        {.connect_timeout = milliseconds(60000), .stall_timeout = milliseconds(60000)});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  // However long a slow machine takes: the master is not given up, nor does an empty replica follow
  // it.
  for (size_t i = 0; i < servers_->count(); ++i) {
    servers_->Ask(i, {"CONFIG", "SET", "cluster-node-timeout", "600000"});
  }
  for (size_t i = 0; i < 3; ++i) {
    servers_->Ask(i, {"WAIT", "1", "10000"});
    servers_->Ask(3 + i, {"CONFIG", "SET", "replica-read-only", "no"});
    servers_->Ask(3 + i, {"FLUSHALL"});
    EXPECT_EQ(servers_->Ask(3 + i, {"DBSIZE"}).integer, 0);
  }
  servers_->Stop(0);
  std::future<Ends> ends = std::async(std::launch::async, [&] { return GetAll(100); });
  Until("its replica is asked", [&] {
    return std::ranges::any_of(tier_->Servers(), [&](const redis::RedisServerStats& server) {
      return server.address.port == servers_->port(0) && server.hedges != 0;
    });
  });
  servers_->Continue(0);
  EXPECT_EQ(ends.get(), (Ends{{"OK", 100}}));
}

TEST_F(RedisCluster, WithoutServersEveryCallEndsAtOnce) {
  Begin({.masters = 3, .cluster = true});
  EXPECT_EQ(PutAll(10), (Ends{{"OK", 10}}));
  for (size_t i = 0; i < 3; ++i) servers_->Kill(i);
  for (int round = 0; round < 3; ++round) EXPECT_EQ(GetAll(10)["OK"], 0);
  EXPECT_EQ(PutAll(10)["OK"], 0);
  Until("it says so", [&] { return tier_->Stats().illness.starts_with("no server answers"); });
}

TEST_F(RedisCluster, AFullServerRefusesOrEvicts) {
  for (const char* policy : {"noeviction", "allkeys-lru"}) {
    Begin({.max_memory = 4 << 20, .policy = policy});
    const Ends ends = PutAll(2500);
    const bool evicts = policy == std::string("allkeys-lru");
    EXPECT_EQ(ends.contains("REDIS_FULL"), !evicts) << policy;
    AwaitSurvey(*tier_);
    EXPECT_EQ(tier_->Stats().evicted != 0, evicts);
    EXPECT_FALSE(GetAll(2500).contains("REDIS_CORRUPT"));
  }
}

TEST_F(RedisCluster, AServerThatTakesNoMoreIsIllUntilItDoes) {
  Begin({.masters = 3, .cluster = true});
  EXPECT_EQ(PutAll(100), (Ends{{"OK", 100}}));
  EXPECT_EQ(tier_->Stats().illness, "");
  servers_->Ask(1, {"CONFIG", "SET", "maxmemory-policy", "noeviction"});
  // Less than it has, and far more than a value: what no server may hold is not even sent.
  const std::string memory = servers_->Ask(1, {"INFO", "memory"}).text;
  const uint64_t used = std::stoull(memory.substr(memory.find("used_memory:") + 12));
  ASSERT_GT(used, 100'000u);
  servers_->Ask(1, {"CONFIG", "SET", "maxmemory", std::to_string(used / 2)});
  EXPECT_GT(PutAll(400)["REDIS_FULL"], WriteHealth::kMany);  // the other servers take theirs
  const std::string illness = tier_->Stats().illness;
  EXPECT_TRUE(illness.starts_with("server " + servers_->address(1) + " fails writes: ")) << illness;
  servers_->Ask(1, {"CONFIG", "SET", "maxmemory", "0"});
  EXPECT_EQ(PutAll(400), (Ends{{"OK", 400}}));
  EXPECT_EQ(tier_->Stats().illness, "");
}

TEST(WriteHealthTest, SomeThatFailAreEnoughAndSomeThatDoNotMendIt) {
  const auto all = [](const std::string&) { return true; };
  const WriteHealth::Time now = Clock::now();
  const Status full = ResourceExhausted("REDIS_FULL", "why");
  WriteHealth health;
  for (int i = 0; i < WriteHealth::kMany; ++i) {  // every second write
    EXPECT_EQ(health.Illness(all, now), "") << i;
    health.Note("s:1", OkStatus(), now);
    health.Note("s:1", Unavailable("REDIS_LEFT_ALONE", "told by another"), now);
    health.Note("s:1", full, now);
  }
  EXPECT_EQ(health.Illness(all, now),
            "server s:1 fails writes: RESOURCE_EXHAUSTED REDIS_FULL: why");
  EXPECT_EQ(health.Illness([](const std::string&) { return false; }, now), "");
  EXPECT_EQ(health.Illness(all, now + WriteHealth::kForgotten), "");
  for (int i = 0; i < WriteHealth::kMany; ++i) {
    EXPECT_NE(health.Illness(all, now), "") << i;
    health.Note("s:1", OkStatus(), now);
  }
  EXPECT_EQ(health.Illness(all, now), "");
}

TEST_F(RedisCluster, AUserWhoMayNotWriteIsAnIllness) {
  Begin({});
  EXPECT_EQ(PutAll(1), (Ends{{"OK", 1}}));
  servers_->Ask(0, {"ACL", "SETUSER", "default", "-set"});
  std::vector<TierPut> puts;
  for (int i = 0; i < 20; ++i) {
    puts.push_back(PutOf("more " + KeyOf(i), ValueOf("more " + KeyOf(i), 0, kSizes)));
  }
  PutAndWait(tier_.get(), puts, Soon());
  for (const TierPut& put : puts) {
    EXPECT_EQ(put.status.reason(), "REDIS_LOGIN");
    EXPECT_TRUE(put.status.message().starts_with(servers_->address(0))) << put.status.ToString();
  }
  const std::string illness = tier_->Stats().illness;
  EXPECT_NE(illness.find("NOPERM"), illness.npos) << illness;
}

TEST_F(RedisCluster, AWrongPasswordIsAnIllnessAndNoHit) {
  servers_ = std::make_unique<RedisServers>(RedisServersOptions{.password = "right"});
  const ScratchDir folder;
  const auto with = [&](const std::string& password) {
    std::ofstream(folder.path() + "/password") << password << "\n";
    return OpenTier(
        {.servers = servers_->addresses(), .password_file = folder.path() + "/password"});
  };
  tier_ = with("right");
  EXPECT_EQ(PutAll(1), (Ends{{"OK", 1}}));
  tier_ = with("wrong");
  EXPECT_EQ(GetAll(1), (Ends{{"REDIS_DOWN", 1}}));
  const std::string illness = tier_->Stats().illness;
  EXPECT_NE(illness.find("refuses user or password"), std::string::npos) << illness;
  EXPECT_EQ(illness.find("wrong\""), std::string::npos);
  tier_ = OpenTier({.servers = servers_->addresses()});
  EXPECT_EQ(GetAll(1).contains("OK"), false);
}

TEST_F(RedisCluster, AnotherTenantFindsNothing) {
  Begin({});
  EXPECT_EQ(PutAll(5), (Ends{{"OK", 5}}));
  tier_ = OpenTier({.servers = servers_->addresses()}, TestFormat("other"));
  EXPECT_EQ(GetAll(5), (Ends{{"REDIS_MISS", 5}}));
}

TEST_F(RedisCluster, TlsChecksCertificates) {
  servers_ = std::make_unique<RedisServers>(RedisServersOptions{.tls = true});
  RedisTierOptions options{.servers = servers_->addresses()};
  options.tls = {.on = true, .authorities_file = servers_->authority_file()};
  tier_ = OpenTier(options);
  EXPECT_EQ(PutAll(50), (Ends{{"OK", 50}}));
  EXPECT_EQ(GetAll(50), (Ends{{"OK", 50}}));
  options.tls.server_name = "elsewhere";
  tier_ = OpenTier(options);
  EXPECT_EQ(GetAll(1), (Ends{{"REDIS_DOWN", 1}}));
  EXPECT_NE(tier_->Stats().illness.find("certificate is refused"), std::string::npos);
  options.tls = {.on = true};
  tier_ = OpenTier(options);
  EXPECT_EQ(GetAll(1), (Ends{{"REDIS_DOWN", 1}}));
}

TEST_F(RedisCluster, AThousandTimeoutsGiveAllBuffersBack) {
  Begin({});
  EXPECT_EQ(PutAll(20), (Ends{{"OK", 20}}));
  servers_->Stop(0);
  std::vector<std::weak_ptr<void>> memory;
  for (int round = 0; round < 50; ++round) {
    std::vector<TierGet> gets;
    for (int i = 0; i < 20; ++i) {
      const AlignedBuffers into(kSizes);
      memory.push_back(into.owner());
      gets.push_back({KeyOf(i), into.buffers(), into.owner(), {}});
    }
    GetAndWait(tier_.get(), gets, In(milliseconds(5)));
    for (const TierGet& get : gets) EXPECT_FALSE(get.status.ok());
  }
  for (const std::weak_ptr<void>& one : memory) EXPECT_TRUE(one.expired());
  servers_->Continue(0);
  Until("it serves again", [&] { return GetAll(20)["OK"] == 20; });
}

}  // namespace
}  // namespace kvstrata
