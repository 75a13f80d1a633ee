// SPDX-License-Identifier: Apache-2.0
// Replay: a trace through a running daemon under several plans, and what each plan loses and reads.
//
// Everything goes through kvs_* on pages of the daemon, as an engine's steps do: one sequence under
// plan `full`, whose outputs and log-sum-exps are the truth, and one per plan, in lockstep.
// Threads: one. Cost: prefill appends only (the queries of the trace's tail are attended), a step
// is one decode step per plan; the oracle of a sampled step and layer reads all its keys once per
// head. Errors: those of the C ABI, and REPLAY_* for arguments that the trace cannot satisfy.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/metrics.h"
#include "client/cli/trace.h"

namespace kvstrata::cli {

struct ReplayOptions {
  std::string socket;
  std::chrono::milliseconds timeout{5000};
  std::vector<std::string> plans;
  int32_t steps = 0;            // at most T; 0: all
  std::vector<int32_t> layers;  // layers of the model; empty: all of the trace
  bool timing_only = false;     // no recall, error and overlap: times and costs alone
  bool keep = false;            // pages and model stay in the daemon
};

// What kvs_attend_cost said, per step: sums over layers.
struct StepCosts {
  Distribution rows, coarse_rows;  // (position or unit, KV head) pairs
  Distribution attend_bytes, select_bytes;
};

// What one plan did. Distributions are over steps x layers x query heads unless they say otherwise.
struct PlanReport {
  std::string plan;       // as given
  std::string plan_text;  // with every option
  std::string status;     // "ok", or what the plan lacks
  uint32_t held_tokens = 0;
  // Rows are as they were given: the bytes below are those of keys and values.
  bool raw = true;
  // The plan attends more than positions, or stored forms of them: recall and the parts of the
  // error were computed from the trace, over the sampled steps and layers.
  bool sampled = false;
  Distribution mass_recall;   // full attention's mass on the attended positions
  Distribution output_error;  // relative L2 of the output against plan full
  // Parts of it, relative to full as well: exact attention over the attended positions against
  // full, and the output against that. The second is empty when nothing but positions is attended.
  Distribution selection_error, codec_error;
  Distribution oracle_overlap;            // over the sampled steps and layers
  Distribution kv_tokens;                 // per step: rows read, mean over layers and heads
  Distribution device_bytes, host_bytes;  // per step: keys and values read, all layers; if raw
  StepCosts costs;
  std::optional<int64_t> selections;  // made since the end of the prompt; none: every step selects
  double prefill_ms = 0;
  Distribution step_ms;  // per step: begin, appends, attends, end
};

struct ReplayReport {
  int32_t steps = 0;
  std::vector<int32_t> layers;
  std::vector<int32_t> overlap_steps, overlap_layers;
  PlanReport reference;  // plan full
  std::vector<PlanReport> plans;
};

// Called now and then with what is done: "prefill" or "decode", done, of.
using ReplayProgress = std::function<void(const char* phase, int32_t done, int32_t of)>;

Result<ReplayReport> Replay(const Trace& trace, const ReplayOptions& options,
                            const ReplayProgress& progress);

}  // namespace kvstrata::cli
