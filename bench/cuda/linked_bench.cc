// SPDX-License-Identifier: Apache-2.0
// Decode steps as an engine makes them: a daemon with a pool of the GPU's, libkvstrata.so, and a
// CUDA graph of all layers that the engine captured once.
//
//   linked_bench [--json-out FILE] [--only PREFIX] [--surprisal TRACE]
//                [--commit HASH] [--date DATE]
//                [--suite pool | moves [--promote-rate RATE] | remote | break-even]
//
// --surprisal: a trace (docs/traces.md) whose surprisal is reported for plan sekv, over and over;
// without: no such row. Other suites: the memory of plans (pool_rows.h); moves between the tiers,
// at a move.promote_rate of choice, and a second process (move_rows.h, pool_rows.h); calls of the
// remote transport (remote_rows.h); short sequences (break_even_rows.h).
//
// A step is kvs_step_begin, kvs_step_replay, the graph's launch, kvs_step_end, for one new token of
// each sequence; pages are where the daemon's allocator put them. Values: microseconds of a
// layer on the stream, from a step's first work to its last; a model has 32 layers, or as many as
// fit: a page holds all layers, so their number decides how far apart a layer's rows lie. Beside
// them how long a step's calls take by the clock, with the stream idle, and the CPU time of one
// kvs_select and kvs_attend outside a graph, once the library knows the calls (rows .../call). Rows
// .../host are of sequences whose sealed pages were moved to the host's memory, after some steps
// with the same query. chess: the mean of a whole period of steps, its selection included;
// sentencekv: the same, the buckets of the sentences that end included. tokenselect_0.9: of ten
// steps, one of which moves its query away and selects. sekv: factors of rank 16 on the device,
// each query head expands spans of 2 % of the tokens; relevance varies by more than the spans'
// lengths do, so that heads choose apart, but for sekv_agreed, where those of a group have the same
// query.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/cuda/break_even_rows.h"
#include "bench/cuda/command_line.h"
#include "bench/cuda/linked_plans.h"
#include "bench/cuda/linked_steps.h"
#include "bench/cuda/move_rows.h"
#include "bench/cuda/pool_rows.h"
#include "bench/cuda/remote_rows.h"
#include "bench/cuda/replay_timing.h"
#include "bench/cuda/trace_surprisal.h"
#include "client/include/kvstrata/kvstrata.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

using nlohmann::ordered_json;

std::string IdOf(const Plan& plan, int batch, int kilotokens) {
  return std::string("linked/") + plan.name + "/b" + std::to_string(batch) + "/" +
         std::to_string(kilotokens) + "K";
}

// With a daemon of its own: pages of closed sequences stay as prefixes until the pool is full, and
// what a step pays then is another thing.
// trace: of a recorded text.
void Measure(const Plan& plan, int batch, int kilotokens, const std::vector<float>& trace,
             ordered_json* rows) {
  const testing::DaemonProcess daemon(
      {"--set", "pool.device=cuda", "--set", "pool.device_bytes=66GiB", "--set",
       "pool.arena_bytes=1GiB", "--set", "pool.host_bytes=16MiB", "--set", "work.op_threads=16"});
  kvs_session* session = nullptr;
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.timeout_ms = 300000;  // packing a prompt takes its time
  CheckKvs(kvs_attach(daemon.socket().c_str(), &options, &session), "kvs_attach");
  const std::unique_ptr<kvs_session, decltype(&kvs_detach)> detached(session, &kvs_detach);
  const std::string id = IdOf(plan, batch, kilotokens);
  std::vector<float> surprisal;
  for (size_t i = 0; plan.spans && i < static_cast<size_t>(kilotokens) * 1024; ++i) {
    surprisal.push_back(trace[i % trace.size()]);
  }
  const std::string text = TextOf(plan, kilotokens * 1024, surprisal);
  Steps steps(session, plan, batch, kilotokens * 1024, std::move(surprisal));
  const bench::Timing t =
      plan.period > 1 ? steps.TimePeriods(plan.period)
                      : TimeReplays<Steps>({&steps}, steps.layers() * steps.steps(), kReplays);
  const bench::Timing cpu = steps.TimeOnCpu();
  const CallTimes calls = steps.TimeCalls();
  const bench::Timing call = bench::TimingOf(calls.cpu);
  if (!steps.Sound()) {
    std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
    std::exit(1);
  }
  const double tbps =
      static_cast<double>(batch * plan.rows_read(int64_t{kilotokens} * 1024) * kTokenBytes) /
      t.median * 1e-6;
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s  %2d layers, us of CPU: %6.1f a step, "
      "%5.1f a select and attend\n",
      id.c_str(), t.median, t.p10, t.p90, tbps, steps.layers(), cpu.median, call.median);
  std::fflush(stdout);
  rows->push_back({{"id", id},
                   {"plan", plan.text},
                   {"batch", batch},
                   {"tokens", kilotokens * 1024},
                   {"period", plan.period},
                   {"value", t.median},
                   {"unit", "us"},
                   {"p10", t.p10},
                   {"p90", t.p90},
                   {"n", t.n},
                   {"tbps", tbps},
                   {"layers", steps.layers()},
                   {"cpu_us_a_step", cpu.median}});
  if (kilotokens != 128 || batch != 1) return;
  rows->push_back({{"id", id + "/call"},
                   {"value", call.median},
                   {"unit", "us"},
                   {"p10", call.p10},
                   {"p90", call.p90},
                   {"n", call.n},
                   {"clock_us", bench::TimingOf(calls.clock).median}});
}

// Plans that are measured with all cold pages in the host's memory, the query the same in each
// step, and what is selected promoted; against the same steps before, with all pages the GPU's.
constexpr const char* kHostPagePlans[] = {"quest",      "quest_softmax", "strata",
                                          "sentencekv", "chess",         "tokenselect_hit"};
constexpr int kHostPageLayers = 8;

void MeasureHostPages(Plan plan, ordered_json* rows) {
  const std::string id = IdOf(plan, 1, 128) + "/host";
  const testing::DaemonProcess daemon({"--set", "pool.device=cuda", "--set",
                                       "pool.device_bytes=8GiB", "--set", "pool.arena_bytes=1GiB",
                                       "--set", "pool.host_bytes=6GiB"});
  kvs_session* session = nullptr;
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.timeout_ms = 300000;
  CheckKvs(kvs_attach(daemon.socket().c_str(), &options, &session), "kvs_attach");
  const std::unique_ptr<kvs_session, decltype(&kvs_detach)> detached(session, &kvs_detach);
  plan.most_layers = kHostPageLayers;
  Steps steps(session, plan, 1, 128 * 1024);
  const auto time = [&] {
    return plan.period > 1 ? steps.TimePeriods(plan.period)
                           : TimeReplays<Steps>({&steps}, steps.layers(), kReplays);
  };
  const bench::Timing on_device = time();
  steps.Demote(daemon.socket());
  const bench::Timing on_host = time(), cpu = steps.TimeOnCpu();
  if (!steps.Sound()) {
    std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
    std::exit(1);
  }
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.3fx of %.2f us on the GPU, %.1f us of CPU\n",
      id.c_str(), on_host.median, on_host.p10, on_host.p90, on_host.median / on_device.median,
      on_device.median, cpu.median);
  std::fflush(stdout);
  rows->push_back({{"id", id},
                   {"plan", plan.text},
                   {"tokens", 128 * 1024},
                   {"value", on_host.median},
                   {"unit", "us"},
                   {"p10", on_host.p10},
                   {"p90", on_host.p90},
                   {"n", on_host.n},
                   {"on_device_us", on_device.median},
                   {"ratio", on_host.median / on_device.median},
                   {"layers", steps.layers()},
                   {"cpu_us_a_step", cpu.median}});
}

constexpr char kNotes[] =
    "one layer of kvs_step_begin, kvs_step_replay, a captured graph of all layers' append, select "
    "and attend, kvs_step_end, of chess the mean of 320 steps and their selection, of sentencekv "
    "of 320 steps and the sentences that end in them; its boundaries are reported for each token: "
    "lognormal lengths with a median of 27, at most 100; pages from the daemon's allocator; "
    "lengths grow a token a step; 32 query heads, 8 KV heads x 128, bf16, pages of 16";

// Writes all rows so far after each one: a run that is cut short keeps what it has.
class Results {
 public:
  Results(ordered_json head, std::string file) : all_(std::move(head)), file_(std::move(file)) {
    all_["rows"] = ordered_json::array();
  }
  ordered_json* rows() { return &all_["rows"]; }
  void Write() const {
    if (!file_.empty()) std::ofstream(file_) << all_.dump(1) << "\n";
  }

 private:
  ordered_json all_;
  const std::string file_;
};

void MeasureAll(const std::string& only, const std::vector<float>& trace, Results* results) {
  for (const auto& [batch, kilotokens] :
       {std::pair{1, 1}, {1, 4}, {1, 32}, {1, 128}, {1, 1024}, {8, 128}, {8, 1024}}) {
    for (const Plan& plan : kPlans) {
      const bool full = std::strcmp(plan.name, "full") == 0;
      if ((kilotokens < 32 || (batch > 1 && kilotokens > 128)) && !full) continue;
      if (!IdOf(plan, batch, kilotokens).starts_with(only)) continue;
      if (plan.spans && trace.empty()) continue;
      Measure(plan, batch, kilotokens, trace, results->rows());
      results->Write();
    }
  }
  for (const Plan& plan : kPlans) {
    if (std::ranges::find(kHostPagePlans, std::string_view(plan.name)) == std::end(kHostPagePlans))
      continue;
    if (!(IdOf(plan, 1, 128) + "/host").starts_with(only)) continue;
    MeasureHostPages(plan, results->rows());
    results->Write();
  }
}

// The plans of the rows of break_even_rows.h.
std::vector<Plan> ShortPlans() {
  std::vector<Plan> plans;
  for (const Plan& plan : kPlans) {
    const std::string name = plan.name;
    const bool moves = plan.steps_a_query > 0;  // grows out of its graph while it is short
    if (name != "tokenselect_miss" && !moves && !plan.spans && plan.percent == 0 &&
        name != "mosaickv") {
      plans.push_back(plan);
    }
  }
  return plans;
}

struct Choices {
  std::string only, trace, promote_rate;
};

struct Suite {
  std::string_view name;
  const char* notes;
  const char* command;
  void (*measure)(const Choices& choices, Results* results);
};

bool Wanted(const Choices& choices, const std::string& kind) {
  return kind.starts_with(choices.only.substr(0, kind.size()));
}

const Suite kSuites[] = {
    {"", kNotes, "bench/cuda/run_gpu.sh linked dense (make bundle)",
     [](const Choices& choices, Results* results) {
       MeasureAll(choices.only, SurprisalOf(choices.trace), results);
     }},
    {"pool", kPoolNotes, "bench/cuda/run_gpu.sh pool (make bundle)",
     [](const Choices& choices, Results* results) {
       MemoryRows<Steps>(kPoolPlans, kLayersOfAModel, choices.only, results->rows());
     }},
    {"moves", kMoveNotes, "bench/cuda/run_gpu.sh moves (make bundle)",
     [](const Choices& choices, Results* results) {
       const Plan& full = kPoolPlans.front();
       if (Wanted(choices, "second")) SecondRow<Steps>(full, results->rows());
       if (!Wanted(choices, "move")) return;
       MoveRows<Steps>(std::vector(kPoolPlans.begin(), kPoolPlans.begin() + 2), full,
                       choices.promote_rate, results->rows());
     }},
    {"remote", kRemoteNotes, "bench/cuda/run_gpu.sh remote (make bundle)",
     [](const Choices& choices, Results* results) { RemoteRows(choices.only, results->rows()); }},
    {"break-even", kBreakEvenNotes, "linked_bench --suite break-even (make bundle)",
     [](const Choices&, Results* results) {
       *results->rows() = BreakEvenRows<Steps>(ShortPlans());
     }},
};

int Main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible\n");
    return 77;
  }
  cudaDeviceProp device{};
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  const std::string only = bench::Option(argc, argv, "--only"),
                    file = bench::Option(argc, argv, "--json-out");
  if (const std::string socket = bench::Option(argc, argv, "--second"); !socket.empty()) {
    return RunSecond<Steps>(socket, kPoolPlans.front(), bench::Option(argc, argv, "--digest"));
  }
  const std::string name = bench::Option(argc, argv, "--suite");
  const auto suite = std::ranges::find(kSuites, name, &Suite::name);
  if (suite == std::end(kSuites)) {
    std::fprintf(stderr, "--suite %s; allowed: pool, moves, remote, break-even\n", name.c_str());
    return 2;
  }
  Results results({{"suite", "cuda-" + (name.empty() ? "linked" : name)},
                   {"device", device.name},
                   {"commit", bench::Option(argc, argv, "--commit")},
                   {"date", bench::Option(argc, argv, "--date")},
                   {"command", suite->command},
                   {"context", {{"notes", suite->notes}}},
                   {"ceilings", ordered_json::object()}},
                  file);
  suite->measure(
      {only, bench::Option(argc, argv, "--surprisal"), bench::Option(argc, argv, "--promote-rate")},
      &results);
  results.Write();
  return 0;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
