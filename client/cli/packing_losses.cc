// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "client/cli/calibrate.h"
#include "client/cli/replay_stream.h"

namespace kvstrata::cli {
namespace {

constexpr size_t kRates = 4;  // d/8, d/4, 3d/8, d/2

using StrategyCounts = std::map<std::array<int32_t, 3>, int64_t>;

Status AddStrategies(const ReplayStream& stream, StrategyCounts* counts) {
  KVS_ASSIGN_OR_RETURN(const InspectedArray array, stream.Inspect("strategies"));
  const std::vector<int32_t> values = array.Integers();
  for (size_t i = 0; i + 3 <= values.size(); i += 3) {
    ++(*counts)[{values[i], values[i + 1], values[i + 2]}];
  }
  if (!values.empty() && values.size() % 3 == 0) return OkStatus();
  return NotFound("INSPECT_SHAPE", "array 'strategies' holds no i32 [segments, heads, 3]");
}

// Leaves `out->losses` empty and says why if there is nothing of the known form.
void AddLosses(const ReplayStream& stream, int32_t head_dim, PackingLosses* out) {
  const auto array = stream.Inspect("losses");
  if (!array.ok()) {
    out->losses_status = "the daemon does not report them: " + array.status().message();
    return;
  }
  const std::vector<float> values = array->Floats();
  if (values.empty() || array->shape.empty() || array->shape.back() != kRates) {
    out->losses_status = "the daemon reports them in another form than f32 [..., 4]";
    return;
  }
  for (size_t i = 0; i < kRates; ++i) {
    if (out->losses.size() <= i) {
      out->losses.push_back({static_cast<int32_t>(i + 1) * head_dim / 8, {}});
    }
    for (size_t row = i; row < values.size(); row += kRates) out->losses[i].loss.Add(values[row]);
  }
}

Status AddTrace(const Trace& trace, const ReplayOptions& options, const ReplayProgress& progress,
                StrategyCounts* counts, PackingLosses* out) {
  const std::vector<TraceLayer>& layers = trace.layers();
  KVS_ASSIGN_OR_RETURN(
      const ReplaySession session,
      ReplaySession::Attach(options.socket, options.timeout, trace, layers.size(), false));
  ReplayStream stream(session, trace, layers);
  KVS_RETURN_IF_ERROR(stream.Open(out->plan));
  while (!stream.prefilled()) {
    KVS_RETURN_IF_ERROR(stream.PrefillChunk());
    progress("mosaickv: prefill", stream.position(), trace.shape().prompt);
  }
  KVS_RETURN_IF_ERROR(AddStrategies(stream, counts));
  AddLosses(stream, trace.shape().head_dim, out);
  return OkStatus();
}

}  // namespace

bool IsOfSection(const Status& status) {
  switch (status.code()) {
    case Code::kUnimplemented:
    case Code::kNotFound:
    case Code::kFailedPrecondition:
    case Code::kResourceExhausted:
      return true;
    case Code::kInvalidArgument:
      return status.reason().starts_with("PLAN_");
    default:
      return false;
  }
}

Result<PackingLosses> MeasurePackingLosses(const std::vector<Trace>& traces,
                                           const ReplayOptions& options,
                                           const ReplayProgress& progress) {
  PackingLosses out;
  StrategyCounts counts;
  for (const Trace& trace : traces) {
    const Status status = AddTrace(trace, options, progress, &counts, &out);
    if (status.ok()) continue;
    if (!IsOfSection(status)) return status;
    out.status = out.losses_status = status.reason() + ": " + status.message();
    out.losses.clear();
    return out;
  }
  for (const auto& [strategy, count] : counts) out.strategies.push_back({strategy, count});
  std::ranges::stable_sort(out.strategies, std::ranges::greater(), &StrategyCount::count);
  return out;
}

}  // namespace kvstrata::cli
