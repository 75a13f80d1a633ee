// SPDX-License-Identifier: Apache-2.0
// Rows of linked_bench about short sequences: from how many tokens on a plan's decode step is
// faster than one that attends in full, beside what kernels/step/break_even.h says. Templates on
// linked_bench's Plan and Steps.
#ifndef KVSTRATA_BENCH_CUDA_BREAK_EVEN_ROWS_H_
#define KVSTRATA_BENCH_CUDA_BREAK_EVEN_ROWS_H_

#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/pool_rows.h"
#include "bench/cuda/replay_timing.h"
#include "kernels/step/break_even.h"

namespace kvstrata::cuda {

constexpr char kBreakEvenNotes[] =
    "a layer of a captured step, as in suite cuda-linked, of 16 layers and short sequences; "
    "baseline: plan full in the same run; saved_us: what kernels/step/break_even.cc says that "
    "selecting saves (below 0: costs); ids .../short: the same plan with min_tokens above the "
    "length";
constexpr int kBreakEvenLayers = 16, kBreakEvenReplays = 16;

// Rows of one plan; full_us gets or gives what plan full takes, by batch and tokens.
template <typename Steps, typename BenchPlan>
void BreakEvenRowsOf(BenchPlan plan, const std::string& id,
                     std::map<std::pair<int, int>, double>* full_us, nlohmann::ordered_json* rows) {
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
      if (!steps.Sound()) {
        std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
        std::exit(1);
      }
      const auto [full, is_full] = full_us->try_emplace({batch, kilotokens}, t.median);
      const double saved_us = SavedBytes(modelled, llama, StepsOn::kGpu, kilotokens * 1024) / 3.1e6;
      const std::string row = "break_even/" + id + "/b" + std::to_string(batch) + "/" +
                              std::to_string(kilotokens) + "K";
      std::printf("%-40s %8.2f us  p10 %8.2f  p90 %8.2f  saves %7.2f us, predicted %7.2f\n",
                  row.c_str(), t.median, t.p10, t.p90, full->second - t.median, saved_us);
      std::fflush(stdout);
      rows->push_back({{"id", row},
                       {"plan", plan.text},
                       {"batch", batch},
                       {"tokens", kilotokens * 1024},
                       {"value", t.median},
                       {"unit", "us"},
                       {"p10", t.p10},
                       {"p90", t.p90},
                       {"n", t.n}});
      if (is_full) continue;
      rows->back()["baseline"] = {{"name", "plan full"}, {"value", full->second}};
      rows->back()["ratio"] = full->second / t.median;
      rows->back()["saved_us"] = saved_us;
    }
  }
}

// plans: the first one is full.
template <typename Steps, typename BenchPlan>
nlohmann::ordered_json BreakEvenRows(const std::vector<BenchPlan>& plans) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::map<std::pair<int, int>, double> full_us;
  for (const BenchPlan& plan : plans) BreakEvenRowsOf<Steps>(plan, plan.name, &full_us, &rows);
  for (BenchPlan plan : plans) {
    if (std::string(plan.name) != "quest") continue;
    plan.text = "quest{min_tokens = 1000000}";
    BreakEvenRowsOf<Steps>(plan, "quest/short", &full_us, &rows);
  }
  return rows;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_BENCH_CUDA_BREAK_EVEN_ROWS_H_
