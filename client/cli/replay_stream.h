// SPDX-License-Identifier: Apache-2.0
// ReplayStream: one sequence of a replay, under one plan, through the C ABI.
//
// Ownership: borrows session, trace and layers; closes its sequence. Threads: one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/trace.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {

// What one decode step gave, per replayed layer.
struct LayerResult {
  std::vector<float> out;  // [query_heads][head_dim]
  std::vector<float> lse;  // [query_heads]
  // Attended at full resolution; a list per group of heads: 1, kv_heads or query_heads of them.
  std::vector<std::vector<int32_t>> positions;
  kvs_cost cost{};

  const std::vector<int32_t>& PositionsOf(int32_t head) const {
    return positions[static_cast<size_t>(head) * positions.size() / lse.size()];
  }
};

enum class PageTier : uint8_t {
  kDevice,
  kHost,
  kAbsent
};  // absent: its rows are in a codec's form

// What kvs_inspect gave: an array of 4-byte values.
struct InspectedArray {
  int32_t type = 0;  // KVS_ARRAY_*
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  // The values, when the type is I32 or F32; else empty.
  std::vector<int32_t> Integers() const;
  std::vector<float> Floats() const;
};

// ReplaySession: attached to a daemon with the geometry of a trace registered as a model of its
// own. Move-only; detaches when destroyed. Threads: one. Errors: those of the C ABI.

// The calling thread's last failure; OK for KVS_OK.
Status FromAbi(int code);

class ReplaySession {
 public:
  // `layers`: how many of the trace's are replayed. `keep`: the daemon keeps pages and model when
  // the session ends, as any model's.
  static Result<ReplaySession> Attach(const std::string& socket, std::chrono::milliseconds timeout,
                                      const Trace& trace, size_t layers, bool keep);

  kvs_session* session() const { return session_.get(); }
  kvs_model model() const { return model_; }

 private:
  struct Detach {
    void operator()(kvs_session* session) const { kvs_detach(session); }
  };
  explicit ReplaySession(kvs_session* session) : session_(session) {}
  Status Register(const TraceShape& shape, size_t layers, bool keep);

  std::unique_ptr<kvs_session, Detach> session_;
  kvs_model model_ = 0;
};

class ReplayStream {
 public:
  // `layers`: those that are replayed, in the order in which the model registered them.
  ReplayStream(const ReplaySession& session, const Trace& trace,
               const std::vector<TraceLayer>& layers);
  ~ReplayStream();
  ReplayStream(ReplayStream&&) = delete;

  // Opens under `plan` with the prompt's token ids.
  Status Open(const std::string& plan);
  // Appends the next chunk of the prompt, reports and ends it when it was the last.
  Status PrefillChunk();
  bool prefilled() const { return position_ >= trace_.shape().prompt; }
  int32_t position() const { return position_; }

  // Step `t`; results() holds what it gave. `want_positions`: also what was attended.
  Status Step(int32_t t, bool want_positions);
  const std::vector<LayerResult>& results() const { return results_; }

  uint32_t held() const { return held_; }
  double prefill_ms() const { return prefill_ms_; }
  double step_ms() const { return step_ms_; }  // time of the last step
  Result<std::string> PlanText() const;
  Result<std::string> StatusText() const;
  // How often the plan has selected so far; none when it selects at every step.
  std::optional<int64_t> Selections() const;
  Result<std::vector<PageTier>> Pages() const;
  Result<InspectedArray> Inspect(const char* name) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct AbortStep {
    void operator()(kvs_step* step) const { kvs_step_abort(step); }
  };
  using StepHandle = std::unique_ptr<kvs_step, AbortStep>;

  Result<StepHandle> Begin(int32_t first, int32_t n);
  // Rows [first, first + n) of a layer's tensor; `width` heads.
  kvs_tensor Rows(const uint16_t* base, int64_t first, int32_t n, int32_t heads) const;
  Status Append(kvs_step* step, const TraceLayer& layer, int32_t first, int32_t n);
  Status AttendTail(kvs_step* step, int32_t index, int32_t first, int32_t n);
  Status ReadPositions(kvs_step* step, int32_t tokens, LayerResult* result);
  Status ReadGroup(kvs_step* step, uint32_t group, int32_t tokens, std::vector<int32_t>* out);
  Status ReadCost(kvs_step* step, LayerResult* result);
  Status EndPrompt();
  Status ReportStep(int32_t t);

  kvs_session* const session_;
  const kvs_model model_;
  const Trace& trace_;
  const std::vector<TraceLayer>& layers_;
  kvs_sequence sequence_ = 0;
  uint32_t held_ = 0;
  int32_t position_ = 0;
  double prefill_ms_ = 0, step_ms_ = 0;
  std::vector<LayerResult> results_;
};

}  // namespace kvstrata::cli
