// SPDX-License-Identifier: Apache-2.0
// What /metrics of a real daemon tells: every metric of the table moves when what it counts
// happens, all are there at 0 before, and probes answer. What takes a GPU or a device that hangs is
// named.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "server/telemetry/metric_table.h"
#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/scraped_daemon.h"
#include "tests/fakes/disk_slots.h"
#include "tests/server/chunks/chunk_socket.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr int kPatienceMs = 30'000;
constexpr const char* kShort = "quest{min_tokens = 4096}";
constexpr const char* kVote =
    "tokenselect{min_tokens = 0, k = 32, n_init = 4, n_local = 16, theta = 0.0}";
constexpr const char* kPacked =
    "{selector = \"full\", codec = \"packed\", keep = 64, truncate = false, min_tokens = 0, "
    "keep_raw = \"no\"}";

// Metrics that nothing here moves, and why.
const std::map<std::string_view, const char*> kUnmoved = {
    {"kvstrata_build_info", "says what the daemon is"},
    {"kvstrata_pins_limit_bytes", "is configured"},
    {"kvstrata_chunk_capacity_bytes", "is configured"},
    {"kvstrata_chunk_changed_total",
     "takes an engine with a bug: tests/server/chunks/chunk_room_test.cc"},
    {"kvstrata_chunk_read_failures_total", "takes damage on the disk: tests/python/test_chunks.py"},
    {"kvstrata_cgroup_limit_bytes", "is the machine's"},
    {"kvstrata_cgroup_charged_bytes", "0 without a limit, which is the machine's"},
    {"process_max_fds", "is the machine's"},
    {"process_start_time_seconds", "never changes"},
    {"kvstrata_pool_lost", "takes a GPU that fails: tests/server/device_failure_test.cc"},
    {"kvstrata_disk_late_loads_total",
     "takes a disk that is slow: tests/server/tier_pages_test.cc"},
    {"kvstrata_disk_refused_loads_total", "takes a disk that is slow: the same"},
    {"kvstrata_spans_total", "takes a collector: tests/python/test_spans.py"},
    {"kvstrata_disk_deadlines_total",
     "takes a disk that hangs: tests/server/tier/value_tier_test.cc"},
};

// A busy machine gives workers less than a call waits for: they go on, and it is asked again.
::testing::AssertionResult Settles(const Engine& engine, kvs_sequence s) {
  int code = KVS_OK;
  (void)Eventually(
      [&] {
        code = engine.abi().kvs_settle(engine.session(), s);
        return code != KVS_DEADLINE_EXCEEDED;
      },
      kPatienceMs);
  if (code == KVS_OK) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << engine.error();
}

// The daemon has heard of each step before the next one begins, and may have asked for a sample.
void Decode(Engine* engine, kvs_sequence s, uint32_t at, int n) {
  for (int i = 0; i < n; ++i) {
    engine->Run(s, {i}, at + static_cast<uint32_t>(i));
    ASSERT_EQ(engine->code(), KVS_OK) << engine->error();
    ASSERT_TRUE(Settles(*engine, s));
  }
}

using Daemon = ScrapedDaemon;

class MetricsTest : public ::testing::Test {
 protected:
  static void Steps();
  static void Tiers();
  static void MoreThanFits(Daemon* daemon, Engine* engine);
  static void Limits(Daemon* daemon, Engine* engine);
  static void Codecs();
  static void Rings();
  static void SickDisk();
  static void Chunks();

  static inline std::set<std::string> moved_;
};

TEST_F(MetricsTest, AllAreThereAtZero) {
  Daemon daemon(&moved_);
  std::set<std::string> told;
  for (const auto& [series, value] : daemon.first()) {
    const std::string name = MetricOf(series);
    told.insert(name);
    const std::optional<size_t> row = FindMetric(name);
    ASSERT_TRUE(row) << series;
    const bool counts = AllMetrics()[*row].type != MetricType::kGauge;
    if (counts && !series.starts_with("process_") && !series.starts_with("kvstrata_http_")) {
      EXPECT_EQ(value, 0) << series;
    }
  }
  for (const Metric& metric : AllMetrics()) {
    if (metric.labels.starts_with("user")) continue;  // only users that came have them
    EXPECT_TRUE(told.contains(std::string(metric.name))) << metric.name;
  }
  for (const char* series :
       {"kvstrata_refusals_total{reason=\"POOL_EXHAUSTED\"}",
        "kvstrata_recall_samples_total{plan=\"quest\"}",
        "kvstrata_recall_samples_total{plan=\"other\"}",
        "kvstrata_duration_seconds_count{what=\"publish\"}",
        "kvstrata_ring_full_total{ring=\"reply\"}", "kvstrata_degraded{what=\"loops\"}"}) {
    EXPECT_TRUE(daemon.first().contains(series)) << series;
  }
}

TEST_F(MetricsTest, ProbesAnswer) {
  Daemon daemon(&moved_);
  for (const char* path : {"/livez", "/readyz", "/healthz"}) {
    const std::string page = Get(daemon.http(), path);
    EXPECT_TRUE(page.starts_with("HTTP/1.1 200 OK\r\n")) << page;
    EXPECT_TRUE(page.ends_with("\r\n\r\nok\n")) << page;
  }
  EXPECT_TRUE(
      Get(daemon.http(), "/readyz?verbose")
          .ends_with("\r\n\r\n[+] loops ok\n[+] descriptors ok\n[+] pools ok\n[+] disk ok\nok\n"));
  const std::string open =
      Get(daemon.http(), "/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n");
  EXPECT_NE(open.find("Content-Type: application/openmetrics-text; version=1.0.0"), open.npos);
  EXPECT_TRUE(open.ends_with("# EOF\n"));
  EXPECT_FALSE(Get(daemon.http(), "/metrics").ends_with("# EOF\n"));
}

void MetricsTest::Steps() {
  Daemon daemon(&moved_, {"recall.every=3"});
  Engine engine(Linked(), daemon.socket());
  ASSERT_EQ(engine.code(), KVS_OK);
  const kvs_sequence s = engine.Prefill(kShort, Prompt(100, 1));
  ASSERT_NE(s, 0u) << engine.error();
  Decode(&engine, s, 100, 5);
  EXPECT_TRUE(daemon.Reaches("kvstrata_decode_steps_in_full_total", 4));
  EXPECT_TRUE(daemon.Reaches("kvstrata_decode_steps_total", 4));
  EXPECT_EQ(Linked().kvs_report_verified(engine.session(), s, 0, kPage, 1), KVS_OK);
  EXPECT_TRUE(daemon.Reaches("kvstrata_verified_hits_total{result=\"equal\"}"));
  const kvs_sequence vote = engine.Prefill(kVote, Prompt(200, 2));
  ASSERT_NE(vote, 0u) << engine.error();
  Decode(&engine, vote, 200, 40);
  EXPECT_TRUE(daemon.Reaches("kvstrata_selections_total", 79));
  EXPECT_TRUE(daemon.Reaches("kvstrata_selections_kept_total"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_recall_samples_total{plan=\"tokenselect\"}", 3));
  const Values values = daemon.Scrape();
  EXPECT_EQ(values.at("kvstrata_decode_steps_in_full_total"), 5);
  EXPECT_EQ(values.at("kvstrata_decode_steps_total"), 45);
  EXPECT_LT(values.at("kvstrata_selections_kept_total"), values.at("kvstrata_selections_total"));
  EXPECT_GT(values.at("kvstrata_recall_ratio{plan=\"tokenselect\"}"), 0.1);
  EXPECT_LT(values.at("kvstrata_recall_ratio{plan=\"tokenselect\"}"), 1);
  EXPECT_EQ(values.at("kvstrata_recall_samples_total{plan=\"quest\"}"), 0);  // never selected
  // What a step reads stays while its pages are moved.
  kvs_step* const step = engine.Begin(vote, {7});
  ASSERT_NE(step, nullptr) << engine.error();
  v1::MoveRequest move;
  move.set_sequence(vote);
  (void)daemon.Ask<v1::MoveResponse>(&v1::Admin::Stub::Demote, move);
  EXPECT_TRUE(daemon.asked().ok()) << daemon.asked().ToString();
  EXPECT_TRUE(daemon.Reaches("kvstrata_pool_retired_bytes{tier=\"device\",device=\"emulated\"}"));
  Linked().kvs_step_abort(step);
}

// The same over the remote transport, whose steps the daemon runs.
TEST_F(MetricsTest, RemoteStepsCountToo) {
  Daemon daemon(&moved_, {"recall.every=2"});
  Engine engine(Remote(), daemon.socket());
  const kvs_sequence s = engine.Prefill(kVote, Prompt(200, 5));
  ASSERT_NE(s, 0u) << engine.error();
  Decode(&engine, s, 200, 10);
  EXPECT_TRUE(daemon.Reaches("kvstrata_decode_steps_total", 9));
  EXPECT_TRUE(daemon.Reaches("kvstrata_selections_total", 19));
  EXPECT_TRUE(daemon.Reaches("kvstrata_recall_samples_total{plan=\"tokenselect\"}"));
}

void MetricsTest::Tiers() {
  Daemon daemon(&moved_, {"pool.device_bytes=8MiB", "pool.host_bytes=4MiB", "pool.arena_bytes=1MiB",
                          "pool.high_percent=60", "pool.low_percent=30"});
  Engine engine(Linked(), daemon.socket());
  ASSERT_EQ(engine.code(), KVS_OK);
  EXPECT_EQ(engine.Open("ful", Prompt(kPage, 1)), 0u);
  EXPECT_TRUE(daemon.Reaches("kvstrata_refusals_total{reason=\"PLAN_UNKNOWN\"}"));
  const kvs_sequence s = engine.Prefill("full", Prompt(8 * kPage, 3));
  ASSERT_NE(s, 0u) << engine.error();
  v1::PinRequest pin;
  pin.set_sequence(s);
  pin.set_ttl_us(3'600'000'000);
  const auto pinned = daemon.Ask<v1::PinResponse>(&v1::Admin::Stub::Pin, pin);
  EXPECT_TRUE(daemon.Reaches("kvstrata_sequences"));
  EXPECT_TRUE(
      daemon.Reaches("kvstrata_user_sequences{user=\"uid:" + std::to_string(geteuid()) + "\"}"));
  Linked().kvs_sequence_close(engine.session(), s);
  EXPECT_TRUE(daemon.Reaches("kvstrata_pins_used_bytes"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_pool_pinned_bytes{tier=\"device\",device=\"emulated\"}"));
  v1::UnpinRequest unpin;
  unpin.set_pin(pinned.pin().pin());
  (void)daemon.Ask<v1::UnpinResponse>(&v1::Admin::Stub::Unpin, unpin);
  // Written; gone from memory; read for who opens them.
  daemon.Drain(false);
  EXPECT_TRUE(daemon.Reaches("kvstrata_draining"));
  ASSERT_NE(engine.Prefill("full", Prompt(4 * kPage, 4)), 0u);
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_unwritten_pages_total{why=\"draining\"}"));
  daemon.Drain(true);
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_written_pages_total", 7));
  (void)daemon.Ask<v1::EvictResponse>(&v1::Admin::Stub::Evict, v1::EvictRequest());
  uint32_t held = 0;
  const kvs_sequence again = engine.Open("full", Prompt(8 * kPage, 3), &held);
  ASSERT_NE(again, 0u) << engine.error();
  EXPECT_GT(held, 0u);
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_read_pages_total"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_duration_seconds_count{what=\"disk_load\"}"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_transfer_bytes_total{path=\"disk_to_memory\"}"));
  MoreThanFits(&daemon, &engine);
  Limits(&daemon, &engine);
}

void MetricsTest::MoreThanFits(Daemon* daemon, Engine* engine) {
  int prompts = 0;
  const auto fill = [&](int n) {
    for (int i = 0; i < n; ++i) {
      const kvs_sequence one = engine->Prefill("full", Prompt(40 * kPage, 100 + prompts++));
      ASSERT_NE(one, 0u) << engine->error();
      Linked().kvs_sequence_close(engine->session(), one);
    }
  };
  fill(60);
  // Each leaves 40 pages to be written: sooner or later a look finds some. How many of them are
  // written before they are evicted is the scheduler's, so the disk is full some time, too.
  double waiting = 0;
  Values values;
  EXPECT_TRUE(Eventually(
      [&] {
        fill(4);
        values = daemon->Scrape();
        waiting = std::max(waiting, values.at("kvstrata_disk_waiting_pages"));
        return HasFailure() || (waiting > 0 && values.at("kvstrata_disk_evicted_values_total") > 0);
      },
      2 * kPatienceMs))
      << "after " << prompts << " prompts " << waiting << " pages waited at most, "
      << values["kvstrata_disk_written_pages_total"] << " are written, "
      << values["kvstrata_disk_unwritten_pages_total{why=\"gone\"}"] << " were evicted before, "
      << values["kvstrata_disk_evicted_values_total"] << " values are evicted from the disk";
  EXPECT_TRUE(daemon->Reaches("kvstrata_moved_pages_total{path=\"device_to_host\"}"));
  values = daemon->Scrape();
  EXPECT_GT(values.at("kvstrata_evicted_pages_total{stored=\"true\"}") +
                values.at("kvstrata_evicted_pages_total{stored=\"false\"}"),
            0);
}

void MetricsTest::Limits(Daemon* daemon, Engine* engine) {
  v1::ResizeRequest resize;
  resize.set_tier("host");
  resize.set_bytes(6 << 20);
  (void)daemon->Ask<v1::ResizeResponse>(&v1::Admin::Stub::Resize, resize);
  resize.set_tier("disk");
  resize.set_bytes(12 << 20);
  (void)daemon->Ask<v1::ResizeResponse>(&v1::Admin::Stub::Resize, resize);
  EXPECT_TRUE(daemon->asked().ok()) << daemon->asked().ToString();
  EXPECT_TRUE(daemon->Reaches("kvstrata_pool_capacity_bytes{tier=\"host\",device=\"\"}", 4 << 20));
  v1::SetQuotaRequest quota;
  quota.set_user("uid:" + std::to_string(geteuid()));
  quota.set_limit("sequences");
  quota.set_value(1);
  (void)daemon->Ask<v1::SetQuotaResponse>(&v1::Admin::Stub::SetQuota, quota);
  ASSERT_EQ(engine->Open("full", Prompt(kPage, 9)), 0u);
  EXPECT_TRUE(daemon->Reaches(
      "kvstrata_user_refusals_total{user=\"uid:" + std::to_string(geteuid()) + "\"}"));
  daemon->Drain(false);
  const std::vector<DiskSlot> slots = DiskSlots(daemon->tier());
  ASSERT_FALSE(slots.empty());
  FlipByte(slots.back());
  EXPECT_EQ(daemon->Scrub(), 1u);
  EXPECT_TRUE(daemon->Reaches("kvstrata_disk_corrupt_values_total"));
  EXPECT_EQ(Get(daemon->http(), "/nothing").substr(0, 12), "HTTP/1.1 404");
  EXPECT_NE(Get(daemon->http(), "no path").substr(0, 12), "HTTP/1.1 200");
  EXPECT_TRUE(daemon->Reaches("kvstrata_http_dropped_total{why=\"malformed\"}"));
}

void MetricsTest::Codecs() {
  Daemon daemon(&moved_);
  Engine engine(Linked(), daemon.socket());
  const std::vector<int32_t> prompt = Prompt(500, 1);
  kvs_sequence s = engine.Prefill(kPacked, prompt);
  ASSERT_NE(s, 0u) << engine.error();
  ASSERT_TRUE(Settles(engine, s));
  Decode(&engine, s, 500, 40);
  ASSERT_TRUE(Settles(engine, s));
  EXPECT_TRUE(daemon.Reaches("kvstrata_recompressions_total{result=\"published\"}"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_released_bytes_total"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_artefacts"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_duration_seconds_count{what=\"publish\"}"));
  Linked().kvs_sequence_close(engine.session(), s);
  s = engine.Open(kPacked, prompt);
  ASSERT_NE(s, 0u) << engine.error();
  EXPECT_TRUE(daemon.Reaches("kvstrata_artefact_hits_total"));
  Linked().kvs_sequence_close(engine.session(), s);
  // All that is packed of the prompt is on disk, which nothing waits for before it is asked for.
  ASSERT_TRUE(
      Eventually([&] { return daemon.Scrape().at("kvstrata_disk_values") >= 4; }, kPatienceMs));
  (void)daemon.Ask<v1::EvictResponse>(&v1::Admin::Stub::Evict, v1::EvictRequest());
  s = engine.Open(kPacked, prompt);
  ASSERT_NE(s, 0u) << engine.error();
  EXPECT_TRUE(daemon.Reaches("kvstrata_loaded_artefacts_total"));
}

// A daemon that stands still lets requests of 6 MB pile up, which then find no room.
void MetricsTest::Rings() {
  Daemon daemon(&moved_);
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.timeout_ms = 100;
  kvs_session* session = nullptr;
  ASSERT_EQ(Linked().kvs_attach(daemon.socket().c_str(), &options, &session), KVS_OK);
  kvs_model model = 0;
  const kvs_model_desc desc = ToyModel().Desc();
  ASSERT_EQ(Linked().kvs_model_register(session, &desc, &model), KVS_OK);
  const std::vector<int32_t> prompt = Prompt(1'500'000, 1);
  bool waited = false;
  for (int i = 0; i < 50 && !waited; ++i) {
    ASSERT_EQ(kill(daemon.pid(), SIGSTOP), 0);
    for (int k = 0; k < 4; ++k) {
      kvs_sequence s = 0;
      EXPECT_NE(Linked().kvs_sequence_open(session, model, "full", prompt.data(), prompt.size(), &s,
                                           nullptr),
                KVS_OK);
    }
    ASSERT_EQ(kill(daemon.pid(), SIGCONT), 0);
    // The look of kvs-watch that was due comes while the daemon hashes these.
    for (int k = 0; k < 20 && !waited; ++k) {
      const Values values = daemon.Scrape();
      waited = values.at("kvstrata_ring_depth_bytes{ring=\"request\"}") > 0 &&
               values.at("kvstrata_ring_fullest_bytes{ring=\"request\"}") > 0;
    }
  }
  EXPECT_TRUE(waited) << "nobody saw what waits in a ring";
  EXPECT_TRUE(daemon.Reaches("kvstrata_ring_full_total{ring=\"request\"}"));
  Linked().kvs_detach(session);
}

// A disk whose files may not grow, nor be written beyond their first page.
void MetricsTest::SickDisk() {
  Daemon daemon(&moved_);
  EXPECT_TRUE(Get(daemon.http(), "/healthz").starts_with("HTTP/1.1 200"));
  Engine engine(Linked(), daemon.socket());
  ASSERT_NE(engine.Prefill("full", Prompt(8 * kPage, 49)), 0u) << engine.error();
  // From here on: its arena, which is a file too, has its size by now.
  const rlimit none{4096, RLIM_INFINITY};
  ASSERT_EQ(prlimit(daemon.pid(), RLIMIT_FSIZE, &none, nullptr), 0);
  for (int i = 0; i < 40; ++i) {
    const kvs_sequence s = engine.Prefill("full", Prompt(8 * kPage, 50 + i));
    ASSERT_NE(s, 0u) << engine.error();
    Linked().kvs_sequence_close(engine.session(), s);
  }
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_io_errors_total"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_unwritten_pages_total{why=\"failed\"}"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_disk_stopped_segments"));
  EXPECT_TRUE(daemon.Reaches("kvstrata_degraded{what=\"disk\"}"));
  EXPECT_EQ(daemon.Scrape().at("kvstrata_healthy"), 0);
  EXPECT_TRUE(Get(daemon.http(), "/healthz").starts_with("HTTP/1.1 503"));
  const std::string ready = Get(daemon.http(), "/readyz?verbose");
  EXPECT_TRUE(ready.starts_with("HTTP/1.1 200")) << ready;  // sequences open with less
  EXPECT_NE(ready.find("\n[-] disk: "), ready.npos) << ready;
}

void MetricsTest::Chunks() {
  constexpr uint64_t kRow = 64 << 10, kRows = 64;
  Daemon daemon(&moved_, {"chunks.bytes=4MiB"});
  const std::string path = daemon.socket() + ".chunks";
  ChunkScheduler engine(path, kRow, "engine");
  for (uint64_t n = 0; n < 2 * kRows; ++n) {
    engine.Store(n);
    ASSERT_GE(engine.Held(1, n), 0);
    engine.Release(1);
  }
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_written_total", kRows));
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_evicted_total", kRows - 1));
  for (uint64_t n = 0; n < 8; ++n) EXPECT_GE(engine.Held(2, n), 0);
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_read_total", 7));
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_leased_bytes", 7 * kRow));
  EXPECT_EQ(engine.Ask(3, 1'000'000), chunks::kNotThere);
  engine.Store(0);  // it is there
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_duplicates_total"));
  {
    ChunkScheduler lost(path, kRow, "lost"), large(path, 2 << 20, "large");
    ASSERT_GE(lost.Held(1, 0), 0);
    large.Store(1);  // more than a segment of the disk
    EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_unwritten_total{why=\"failed\"}"));
  }
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_resting"));
  const chunks::Counted want{chunks::Type::kWant, kRows};
  ChunkScheduler one(path, kRow, "1"), two(path, kRow, "2"), three(path, kRow, "3"),
      four(path, kRow, "4");
  for (ChunkScheduler* scheduler : {&one, &two, &three, &four}) scheduler->socket.SendOne(want);
  EXPECT_TRUE(daemon.Reaches("kvstrata_chunk_starved"));
  chunks::Hello hello = testing::HelloOf(kRow, "attends");
  hello.role = chunks::Role::kWorker;
  testing::ChunkSocket worker(path);
  worker.SendOne(hello);
  worker.Send(testing::RecalledBytes("quest{budget = 9}", {{0, 3, 1, 1, 0}}));
  EXPECT_TRUE(daemon.Reaches("kvstrata_engine_recall_samples_total{plan=\"quest\"}", 2));
  EXPECT_TRUE(daemon.Reaches("kvstrata_engine_recall_ratio{plan=\"quest\"}"));
}

TEST_F(MetricsTest, EveryMetricOfTheTableMoves) {
  Steps();
  Tiers();
  Codecs();
  Rings();
  SickDisk();
  Chunks();
  for (const Metric& metric : AllMetrics()) {
    if (metric.name.starts_with("kvstrata_remote_"))
      continue;  // takes a server: remote_metrics_test.cc
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
