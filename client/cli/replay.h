// Replay: a trace through a running daemon under several plans, and what each plan loses and reads.
//
// Everything goes through kvs_* on pages of the daemon, as an engine's steps do: one sequence under
// plan `full`, whose outputs and log-sum-exps are the truth, and one per plan, in lockstep.
// Threads: one. Cost: prefill appends only (the queries of the trace's tail are attended), a step
// is one decode step per plan; the oracle of a sampled step and layer reads all its keys once per
// head. Errors: those of the C ABI, and REPLAY_* for arguments that the trace cannot satisfy.
#ifndef KVSTRATA_CLIENT_CLI_REPLAY_H_
#define KVSTRATA_CLIENT_CLI_REPLAY_H_

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
  std::vector<int32_t> layers;  // of the model; empty: all of the trace
};

// What one plan did. Distributions are over steps x layers x query heads unless they say otherwise.
struct PlanReport {
  std::string plan;       // as given
  std::string plan_text;  // with every option
  std::string status;     // "ok", or what the plan lacks
  uint32_t held_tokens = 0;
  Distribution mass_recall;               // exp(lse of the selection - lse of everything)
  Distribution selection_error;           // relative L2 of the output against plan full
  Distribution oracle_overlap;            // over the sampled steps and layers
  Distribution kv_tokens;                 // per step: rows read, mean over layers and KV heads
  Distribution device_bytes, host_bytes;  // per step: keys and values read, all layers
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

#endif  // KVSTRATA_CLIENT_CLI_REPLAY_H_
