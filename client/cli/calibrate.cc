// SPDX-License-Identifier: Apache-2.0
#include "client/cli/calibrate.h"

#include "base/check.h"

namespace kvstrata::cli {
namespace {

constexpr const char* kOffline = "not measured: --offline";

// Those that decide what keys, values and queries mean. Optional ones count where both traces have
// them.
constexpr const char* kNeeded[] = {"layers", "query_heads", "kv_heads", "head_dim", "keys"};
constexpr const char* kOptional[] = {"model",      "digest",   "tokenizer",
                                     "rope_theta", "rope_dim", "rope_scaling"};

// What is measured of packing and spans holds for keys as codecs store them, rotated.
Status CheckStoredRotated(const std::vector<Trace>& traces, const std::vector<std::string>& names) {
  for (size_t i = 0; i < traces.size(); ++i) {
    if (traces[i].shape().rotary.dim == 0) continue;
    return Unimplemented("CALIBRATE_PRE_ROPE",
                         "trace '" + names[i] +
                             "' has __metadata__.keys 'pre_rope'; allowed: post_rope. Record the "
                             "model's keys after rotary embedding to calibrate it");
  }
  return OkStatus();
}

}  // namespace

Status CheckSameModel(const std::vector<Trace>& traces, const std::vector<std::string>& names) {
  KVS_CHECK(!traces.empty() && traces.size() == names.size());
  const Trace& first = traces[0];
  for (size_t i = 1; i < traces.size(); ++i) {
    const auto compare = [&](const std::string& field, bool needed) {
      const std::string a = first.Metadata(field), b = traces[i].Metadata(field);
      if (a == b || (!needed && (a.empty() || b.empty()))) return OkStatus();
      return InvalidArgument("CALIBRATE_MODELS", "traces '" + names[0] + "' and '" + names[i] +
                                                     "' are of different models: __metadata__." +
                                                     field + " is '" + a + "' and '" + b +
                                                     "'; calibrate one model at a time");
    };
    for (const char* field : kNeeded) KVS_RETURN_IF_ERROR(compare(field, true));
    for (const char* field : kOptional) KVS_RETURN_IF_ERROR(compare(field, false));
  }
  return OkStatus();
}

Result<Calibration> Calibrate(const std::vector<Trace>& traces,
                              const std::vector<std::string>& names,
                              const CalibrateOptions& options, const ReplayProgress& progress) {
  KVS_RETURN_IF_ERROR(CheckSameModel(traces, names));
  KVS_RETURN_IF_ERROR(CheckStoredRotated(traces, names));
  Calibration out;
  out.entropy = MeasureEntropyPages(traces);
  out.spans = MeasureSpanShares(traces);
  progress("query cosines", 0, 1);
  out.cosines = MeasureQueryCosines(traces);
  if (options.offline) {
    out.packing.status = out.packing.losses_status = out.break_even.status = kOffline;
    return out;
  }
  const ReplayOptions replay{.socket = options.socket, .timeout = options.timeout};
  KVS_ASSIGN_OR_RETURN(out.packing, MeasurePackingLosses(traces, replay, progress));
  KVS_ASSIGN_OR_RETURN(out.break_even, MeasureBreakEven(traces, replay, progress));
  return out;
}

}  // namespace kvstrata::cli
