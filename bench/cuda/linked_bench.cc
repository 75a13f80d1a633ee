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
// remote transport (remote_rows.h); short sequences.
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
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/cuda/linked_plans.h"
#include "bench/cuda/linked_steps.h"
#include "bench/cuda/move_rows.h"
#include "bench/cuda/pool_rows.h"
#include "bench/cuda/remote_rows.h"
#include "bench/cuda/replay_timing.h"
#include "bench/cuda/trace_surprisal.h"
#include "bench/results.h"
#include "client/include/kvstrata/kvstrata.h"
#include "kernels/step/break_even.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

std::string IdOf(const Plan& plan, int batch, int kilotokens) {
  return std::string("linked/") + plan.name + "/b" + std::to_string(batch) + "/" +
         std::to_string(kilotokens) + "K";
}

// With a daemon of its own: pages of closed sequences stay as prefixes until the pool is full, and
// what a step pays then is another thing.
// trace: of a recorded text.
void Measure(const Plan& plan, int batch, int kilotokens, const std::vector<float>& trace,
             bench::Json* rows) {
  const testing::DaemonProcess daemon(
      {"--set", "pool.device=cuda", "--set", "pool.device_bytes=66GiB", "--set",
       "pool.arena_bytes=1GiB", "--set", "pool.host_bytes=16MiB", "--set", "work.op_threads=16"});
  const AttachedSession session(daemon.socket());
  const std::string id = IdOf(plan, batch, kilotokens);
  std::vector<float> surprisal;
  for (size_t i = 0; plan.spans && i < static_cast<size_t>(kilotokens) * 1024; ++i) {
    surprisal.push_back(trace[i % trace.size()]);
  }
  Steps steps(session.get(), plan, batch, kilotokens * 1024, std::move(surprisal));
  const bench::Timing t = steps.Time(), cpu = steps.TimeOnCpu();
  const CallTimes calls = steps.TimeCalls();
  const bench::Timing call = bench::TimingOf(calls.cpu);
  steps.MustBeSound(id);
  const double tbps =
      static_cast<double>(batch * plan.rows_read(int64_t{kilotokens} * 1024) * kTokenBytes) /
      t.median * 1e-6;
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s  %2d layers, us of CPU: %6.1f a step, "
      "%5.1f a select and attend\n",
      id.c_str(), t.median, t.p10, t.p90, tbps, steps.layers(), cpu.median, call.median);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(id, t));
  rows->back().update({{"plan", plan.text},
                       {"batch", batch},
                       {"tokens", kilotokens * 1024},
                       {"period", plan.period},
                       {"tbps", tbps},
                       {"layers", steps.layers()},
                       {"cpu_us_a_step", cpu.median}});
  if (kilotokens != 128 || batch != 1) return;
  rows->push_back(bench::RowOf(id + "/call", call));
  rows->back()["clock_us"] = bench::TimingOf(calls.clock).median;
}

// Plans that are measured with all cold pages in the host's memory, the query the same in each
// step, and what is selected promoted; against the same steps before, with all pages the GPU's.
constexpr const char* kHostPagePlans[] = {"quest",      "quest_softmax", "bits",
                                          "sentencekv", "chess",         "tokenselect_hit"};
constexpr int kHostPageLayers = 8;

void MeasureHostPages(Plan plan, bench::Json* rows) {
  const std::string id = IdOf(plan, 1, 128) + "/host";
  const testing::DaemonProcess daemon({"--set", "pool.device=cuda", "--set",
                                       "pool.device_bytes=8GiB", "--set", "pool.arena_bytes=1GiB",
                                       "--set", "pool.host_bytes=6GiB"});
  const AttachedSession session(daemon.socket());
  plan.most_layers = kHostPageLayers;
  Steps steps(session.get(), plan, 1, 128 * 1024);
  const bench::Timing on_device = steps.Time();
  steps.Demote(daemon.socket());
  const bench::Timing on_host = steps.Time(), cpu = steps.TimeOnCpu();
  steps.MustBeSound(id);
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.3fx of %.2f us on the GPU, %.1f us of CPU\n",
      id.c_str(), on_host.median, on_host.p10, on_host.p90, on_host.median / on_device.median,
      on_device.median, cpu.median);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(id, on_host));
  rows->back().update({{"plan", plan.text},
                       {"tokens", 128 * 1024},
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
  explicit Results(std::function<void(const bench::Json& rows)> write) : write_(std::move(write)) {}
  bench::Json* rows() { return &rows_; }
  void Write() const { write_(rows_); }

 private:
  bench::Json rows_ = bench::Json::array();
  const std::function<void(const bench::Json& rows)> write_;
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

// The plans whose rows are about short sequences.
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

constexpr char kBreakEvenNotes[] =
    "a layer of a captured step, as in suite cuda-linked, of 16 layers and short sequences; "
    "baseline: plan full in the same run; saved_us: what kernels/step/break_even.cc says that "
    "selecting saves (below 0: costs); ids .../short: the same plan with min_tokens above the "
    "length";
constexpr int kBreakEvenLayers = 16, kBreakEvenReplays = 16;

// Rows about short sequences: from how many tokens on a plan's decode step is faster than one that
// attends in full, beside what kernels/step/break_even.h says. Of one plan; full_us gets or gives
// what plan full takes, by batch and tokens.
void BreakEvenRowsOf(Plan plan, const std::string& id,
                     std::map<std::pair<int, int>, double>* full_us, bench::Json* rows) {
  const PoolDaemon daemon;
  const AttachedSession session(daemon.process.socket());
  plan.most_layers = kBreakEvenLayers;
  kvstrata::Plan modelled = ParsePlan(plan.text).value();
  const Geometry llama{.layers = kBreakEvenLayers,
                       .query_heads = 32,
                       .kv_heads = 8,
                       .head_dim = 128,
                       .page_tokens = 16,
                       .dtype = DType::kBF16,
                       .rotary = {}};
  for (const int batch : {1, 8}) {
    modelled.batch = batch;
    for (int kilotokens = 1; kilotokens <= (batch == 1 ? 32 : 16); kilotokens *= 2) {
      Steps steps(session.get(), plan, batch, kilotokens * 1024);
      const bench::Timing t =
          TimeReplays<Steps>({&steps}, steps.layers() * steps.steps(), kBreakEvenReplays);
      steps.MustBeSound(id);
      const auto [full, is_full] = full_us->try_emplace({batch, kilotokens}, t.median);
      const double saved_us = SavedBytes(modelled, llama, StepsOn::kGpu, kilotokens * 1024) / 3.1e6;
      const std::string row = "break_even/" + id + "/b" + std::to_string(batch) + "/" +
                              std::to_string(kilotokens) + "K";
      std::printf("%-40s %8.2f us  p10 %8.2f  p90 %8.2f  saves %7.2f us, predicted %7.2f\n",
                  row.c_str(), t.median, t.p10, t.p90, full->second - t.median, saved_us);
      std::fflush(stdout);
      rows->push_back(bench::RowOf(row, t));
      rows->back().update({{"plan", plan.text}, {"batch", batch}, {"tokens", kilotokens * 1024}});
      if (is_full) continue;
      rows->back()["baseline"] = {{"name", "plan full"}, {"value", full->second}};
      rows->back()["ratio"] = full->second / t.median;
      rows->back()["saved_us"] = saved_us;
    }
  }
}

// plans: the first one is full.
bench::Json BreakEvenRows(const std::vector<Plan>& plans) {
  bench::Json rows = bench::Json::array();
  std::map<std::pair<int, int>, double> full_us;
  for (const Plan& plan : plans) BreakEvenRowsOf(plan, plan.name, &full_us, &rows);
  for (Plan plan : plans) {
    if (std::string(plan.name) != "quest") continue;
    plan.text = "quest{min_tokens = 1000000}";
    BreakEvenRowsOf(plan, "quest/short", &full_us, &rows);
  }
  return rows;
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
     [](const Choices&, Results* results) { *results->rows() = BreakEvenRows(ShortPlans()); }},
};

int Main(int argc, char** argv) {
  const std::string gpu = NameOfGpu();
  if (const std::string socket = bench::Option(argc, argv, "--second"); !socket.empty()) {
    return RunSecond<Steps>(socket, kPoolPlans.front(), bench::Option(argc, argv, "--digest"));
  }
  const std::string name = bench::Option(argc, argv, "--suite");
  const auto suite = std::ranges::find(kSuites, name, &Suite::name);
  if (suite == std::end(kSuites)) {
    std::fprintf(stderr, "--suite %s; allowed: pool, moves, remote, break-even\n", name.c_str());
    return 2;
  }
  Results results([&](const bench::Json& rows) {
    bench::WriteResults(argc, argv, "cuda-" + (name.empty() ? "linked" : name), gpu, suite->command,
                        {{"notes", suite->notes}}, rows);
  });
  suite->measure({bench::Option(argc, argv, "--only"), bench::Option(argc, argv, "--surprisal"),
                  bench::Option(argc, argv, "--promote-rate")},
                 &results);
  results.Write();
  return 0;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
