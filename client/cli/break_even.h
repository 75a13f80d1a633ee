// SPDX-License-Identifier: Apache-2.0
// BreakEven: from which length on a plan's decode step is faster than full attention's, measured on
// prefixes of a trace on a running daemon.
// Cost: for each plan and length a prefill and up to 32 steps of the plan and of `full`, in
// lockstep. Errors: those of the connection; anything about a plan becomes its status.
#ifndef KVSTRATA_CLIENT_CLI_BREAK_EVEN_H_
#define KVSTRATA_CLIENT_CLI_BREAK_EVEN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/replay.h"

namespace kvstrata::cli {

struct BreakEvenPoint {
  int32_t tokens = 0;               // tokens of the prompt
  double full_ms = 0, plan_ms = 0;  // medians over the steps
  bool sparse = false;              // the plan read fewer rows than full attention

  double ratio() const { return full_ms > 0 ? plan_ms / full_ms : 1; }
  bool faster() const { return sparse && ratio() < 1; }
};

struct BreakEvenPlan {
  std::string name;  // the preset
  std::string plan;  // as opened: without a smallest length
  std::string status = "ok";
  std::vector<BreakEvenPoint> points;  // ascending
  std::optional<double> tokens;        // none: not faster at the longest, or nothing measured
};

struct BreakEven {
  std::string status = "ok";
  size_t trace = 0;  // which: the one with the longest prompt
  int32_t steps = 0;
  std::vector<BreakEvenPlan> plans;
};

// The length from which on every point is faster than full attention. Where the point before is as
// sparse and slower, the ratio is interpolated linearly between the two; where it attends in full
// (its ratio says nothing), or there is none, it is the first faster point's own length.
std::optional<double> BreakEvenLength(const std::vector<BreakEvenPoint>& points);

// 512, 1024, 2048 .. below `prompt`, and `prompt`.
std::vector<int32_t> BreakEvenLengths(int32_t prompt);

Result<BreakEven> MeasureBreakEven(const std::vector<Trace>& traces, const ReplayOptions& options,
                                   const ReplayProgress& progress);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_BREAK_EVEN_H_
