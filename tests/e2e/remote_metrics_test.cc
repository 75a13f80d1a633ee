// SPDX-License-Identifier: Apache-2.0
// Every metric of the remote tier moves when what it counts happens: real daemons, a real master
// and its replica, which are stopped (SIGSTOP) and whose values are damaged.
#include <atomic>
#include <fstream>
#include <set>
#include <thread>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/scraped_daemon.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/redis_servers.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16, kPages = 40;

// Metrics that nothing here moves, and why.
const std::map<std::string_view, const char*> kUnmoved = {
    {"kvstrata_remote_agent_bytes", "Mooncake's alone: tests/server/tier/mooncake_agent_test.cc"},
    {"kvstrata_remote_agent_peak_bytes", "Mooncake's alone: tests/e2e/mooncake_test.cc"},
    {"kvstrata_remote_refused_loads_total",
     "takes hundreds of opens at once: tests/server/tier_pages_test.cc, the same TierLoads"},
};

RedisServersOptions MasterAndReplica() {
  RedisServersOptions options;
  options.replicas = 1;
  options.cluster = true;
  return options;
}

class RemoteMetricsTest : public ::testing::Test {
 protected:
  using Settings = std::vector<std::string>;

  RemoteMetricsTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }
  std::string secret() const { return folder_ / "secret"; }
  std::string server() const { return "{server=\"" + servers_.address(0) + "\"}"; }
  std::string answers(size_t i, const char* what, const char* result) const {
    return "kvstrata_remote_answers_total{server=\"" + servers_.address(i) + "\",what=\"" + what +
           "\",result=\"" + result + "\"}";
  }
  // Answers of both: where the master is slow its replica is asked.
  std::vector<std::string> answers(const char* what, const char* result) const {
    return {answers(0, what, result), answers(1, what, result)};
  }
  // Until the replica has all that the master has.
  void AwaitReplica() const {
    const auto offset = [&](size_t i) {
      const std::string text = servers_.Ask(i, {"INFO", "replication"}).text;
      const std::string wanted = "\nmaster_repl_offset:";
      const size_t at = text.find(wanted);
      return at == text.npos ? 0 : std::stoull(text.substr(at + wanted.size()));
    };
    const uint64_t written = offset(0);
    EXPECT_NE(written, 0u);
    EXPECT_TRUE(Eventually([&] { return offset(1) >= written; }, kScrapePatienceMs));
  }
  // A node that knows its servers by now.
  std::unique_ptr<ScrapedDaemon> Node(Settings settings = {"remote.deadline=60s"}) {
    for (const std::string& s :
         {"remote.redis=" + servers_.address(0), "remote.secret_file=" + secret(),
          std::string("remote.write=all"), std::string("remote.deadline_most=60s")}) {
      settings.push_back(s);
    }
    auto node = std::make_unique<ScrapedDaemon>(&moved_, settings);
    EXPECT_TRUE(node->Reaches("kvstrata_remote_answer_seconds_count" + server()));
    return node;
  }
  static void Serve(ScrapedDaemon* node, int32_t seed, uint32_t pages = kPages) {
    Engine engine(Linked(), node->socket());
    EXPECT_NE(engine.Prefill("full", Prompt(pages * kPage + 5, seed)), 0u) << engine.error();
  }
  // How much of the prompt it has.
  static uint32_t Open(ScrapedDaemon* node, int32_t seed, uint32_t pages = kPages) {
    Engine engine(Linked(), node->socket());
    uint32_t held = 0;
    EXPECT_NE(engine.Open("full", Prompt(pages * kPage + 5, seed), &held), 0u) << engine.error();
    return held;
  }
  uint64_t Calls(const std::string& command) const {
    uint64_t calls = 0;
    for (size_t i = 0; i < servers_.count(); ++i) {
      const std::string text = servers_.Ask(i, {"INFO", "commandstats"}).text;
      const std::string wanted = "cmdstat_" + command + ":calls=";
      if (const size_t at = text.find(wanted); at != text.npos) {
        calls += std::stoull(text.substr(at + wanted.size()));
      }
    }
    return calls;
  }
  void StopAll() {
    for (size_t i = 0; i < servers_.count(); ++i) servers_.Stop(i);
  }
  void ContinueAll() {
    for (size_t i = 0; i < servers_.count(); ++i) servers_.Continue(i);
  }

  void Well();
  void Limited();
  void Damaged();
  void Paced();
  void LateLoads();
  void OneIsStopped();
  void AllAreStopped();

  const ScratchDir folder_;
  RedisServers servers_{MasterAndReplica()};
  std::set<std::string> moved_;
};

void RemoteMetricsTest::Well() {
  const auto a = Node(), b = Node();
  EXPECT_EQ(a->first().at(answers(0, "read", "hit")), 0);
  EXPECT_EQ(a->first().at("kvstrata_remote_breaker_open{server=\"other\"}"), 0);
  Serve(a.get(), 1);
  EXPECT_TRUE(a->Reaches("kvstrata_remote_written_values_total", kPages - 1));
  EXPECT_TRUE(a->Reaches(answers("probe", "absent"), kPages - 1));
  EXPECT_TRUE(a->Reaches("kvstrata_remote_server_bytes_total{server=\"" + servers_.address(0) +
                             "\",direction=\"sent\"}",
                         kPages * 32768));
  AwaitReplica();
  EXPECT_EQ(Open(b.get(), 1), kPages * kPage);
  EXPECT_TRUE(b->Reaches("kvstrata_remote_read_values_total", kPages - 1));
  EXPECT_TRUE(b->Reaches(answers("read", "hit"), kPages - 1));
  EXPECT_TRUE(b->Reaches("kvstrata_remote_read_rate_bytes"));
  EXPECT_TRUE(b->Reaches("kvstrata_remote_answer_seconds_count" + server(), kPages));
}

// A rate that has no room for the prompt; and what was missed a short while ago.
void RemoteMetricsTest::Limited() {
  const auto node = Node({"remote.deadline=60s", "remote.read_rate=1MiB", "remote.miss_ttl=60min"});
  EXPECT_LT(Open(node.get(), 1), kPages * kPage);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_over_rate_total"));
  EXPECT_EQ(Open(node.get(), 2), 0u);
  EXPECT_EQ(Open(node.get(), 2), 0u);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_skipped_searches_total{why=\"known_miss\"}"));
}

void RemoteMetricsTest::Damaged() {
  const auto node = Node();
  const redis::RespReply names = servers_.Ask(0, {"KEYS", "kv1:*"});
  ASSERT_EQ(names.items.size(), kPages);
  for (const redis::RespReply& name : names.items) {
    servers_.Ask(0, {"SETRANGE", name.text, "600", "damaged"});
  }
  AwaitReplica();
  EXPECT_EQ(Open(node.get(), 1), 0u);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_missed_values_total", kPages - 1));
  EXPECT_TRUE(node->Reaches(answers("read", "damaged"), kPages - 1));
}

// Servers that stop while values are on their way; where all came before, another prompt. The
// deadline is over before silence alone ends a connection.
void RemoteMetricsTest::LateLoads() {
  constexpr uint32_t kLong = 120;
  const auto from = Node();
  bool late = false;
  for (int32_t seed = 10; seed < 20 && !late; ++seed) {
    Serve(from.get(), seed, kLong);
    ASSERT_TRUE(from->Reaches("kvstrata_remote_written_values_total",
                              (static_cast<uint32_t>(seed) - 9) * kLong - 1));
    const auto node = Node({"remote.deadline=600ms"});
    const uint64_t before = Calls("get");
    std::atomic<bool> opened = false;
    std::thread opens([&] {
      Open(node.get(), seed, kLong);
      opened = true;
    });
    EXPECT_TRUE(Eventually([&] { return opened || Calls("get") > before; }, kScrapePatienceMs));
    StopAll();
    opens.join();
    ContinueAll();
    late =
        Eventually([&] { return node->Scrape().at("kvstrata_remote_late_loads_total") > 0; }, 3000);
  }
  EXPECT_TRUE(late);
}

// What is written at once is a second's worth; the rest waits for six more.
void RemoteMetricsTest::Paced() {
  const auto node = Node({"remote.deadline=60s", "remote.write_rate=1MiB"});
  Serve(node.get(), 50, 240);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_waiting_values"));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_waiting_bytes"));
}

// Its replica is asked, and has what was written; what is to be written fails.
void RemoteMetricsTest::OneIsStopped() {
  const auto from = Node(), node = Node();
  Serve(from.get(), 30);
  ASSERT_TRUE(from->Reaches("kvstrata_remote_written_values_total", kPages - 1));
  servers_.AwaitCluster();
  servers_.Stop(0);
  (void)Open(node.get(), 30);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_hedges_total" + server()));
  Serve(node.get(), 31);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_unwritten_values_total{why=\"failed\"}"));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_connection_failures_total" + server()));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_breaker_openings_total" + server()));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_breaker_open" + server()));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_breakers_open"));
  EXPECT_TRUE(node->Reaches("kvstrata_remote_shards", 1));
  servers_.Continue(0);
  servers_.AwaitCluster();
  EXPECT_TRUE(
      Eventually([&] { return node->Scrape().at("kvstrata_remote_breaker_open" + server()) == 0; },
                 kScrapePatienceMs));
}

void RemoteMetricsTest::AllAreStopped() {
  const auto node = Node({"remote.deadline=400ms"});
  StopAll();
  EXPECT_EQ(Open(node.get(), 40), 0u);
  EXPECT_TRUE(node->Reaches("kvstrata_remote_late_searches_total"));
  ContinueAll();
}

TEST_F(RemoteMetricsTest, EveryOneMoves) {
  Well();
  Limited();
  Damaged();
  Paced();
  LateLoads();
  OneIsStopped();
  AllAreStopped();
  for (const Metric& metric : AllMetrics()) {
    if (!metric.name.starts_with("kvstrata_remote_")) continue;
    const auto unmoved = kUnmoved.find(metric.name);
    if (unmoved != kUnmoved.end()) {
      std::printf("not moved: %s: %s\n", unmoved->first.data(), unmoved->second);
      continue;
    }
    EXPECT_TRUE(moved_.contains(std::string(metric.name))) << metric.name;
  }
}

}  // namespace
}  // namespace kvstrata::testing
