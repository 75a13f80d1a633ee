// SPDX-License-Identifier: Apache-2.0
// RecallAudit: recall and output error of a live sequence's plan, from decode steps that whoever
// runs them shadowed with full attention (kernels/step/shadow_attention.h says what both mean).
//
// Life: Store::StartRecallAudit asks for samples through the sequence's slot in the table segment;
// answers come by Store::AddRecall; it ends with the last wanted step (OK), with
// Store::EndRecallAudit, or with the sequence, and never begins again.
// Ownership: shared by the sequence while it runs and by who started it.
// Threads: all methods from any thread; one short lock. The listener is called without any lock,
// by whoever added or ended; it must not wait.
// Cost: Add copies the samples, at most kMaxSamples in all; Report sorts them, so not on a thread
// that others wait for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

struct RecallOptions {
  static constexpr uint32_t kMaxEvery = 65536;
  static constexpr uint32_t kMaxSteps = 1024;

  uint32_t every = 16;  // sample the decode steps at positions that are multiples of it
  uint32_t steps = 8;   // sampled steps wanted
};

// What one sampled decode step measured. Arrays are [layers] and [layers][heads].
struct RecallSamples {
  uint32_t audit = 0;
  int32_t position = 0;   // position of the decode token
  int32_t heads = 0;      // query heads
  bool raw_gone = false;  // nothing was measured: raw pages were released
  uint32_t dropped = 0;   // sampled steps so far that did not arrive
  std::span<const int32_t> layers;
  std::span<const float> recall, error;
  bool captured = false;  // nothing was measured: a GPU ran the layers from a graph of the engine's
};

// Samples of one metric, one per step and query head.
struct RecallMetric {
  uint64_t samples = 0;
  double mean = 0, p5 = 0, p50 = 0, p95 = 0;  // percentiles linearly interpolated
  double min = 0, max = 0;
  std::vector<uint64_t> histogram;  // samples by bin, bounds below
};
struct RecallRow {
  int32_t layer = -1;  // -1: all
  RecallMetric recall, error;
};
struct RecallProgress {
  uint32_t steps = 0, wanted = 0, dropped = 0;
  int32_t first_position = 0, last_position = 0;  // where the sampled steps were
};
struct RecallReport {
  RecallProgress progress;
  RecallRow all;
  std::vector<RecallRow> layers;  // ascending
};

// Bin i counts bounds[i] <= x < bounds[i + 1]; the last of recall has 1 too.
//   recall  20 bins of 0.05 in [0, 1]
//   error   below 2^-20 (0 too), then an octave each up to 16, then all above
inline constexpr int kRecallBins = 20;
inline constexpr int kErrorBins = 26;
std::vector<double> RecallBounds();  // kRecallBins + 1
std::vector<double> ErrorBounds();   // kErrorBins + 1; the last is the largest float

class RecallAudit {
 public:
  static constexpr uint64_t kMaxSamples = uint64_t{1} << 20;  // steps x layers x query heads
  using Listener = std::function<void()>;

  // `listener` hears of every step added and of the end.
  RecallAudit(uint32_t number, const RecallOptions& options, int32_t layers, int32_t heads,
              Listener listener);

  uint32_t number() const { return number_; }
  const RecallOptions& options() const { return options_; }

  // What became of it: OK, more is wanted; ABORTED RECALL_COMPLETE, that was the last one (or came
  // after it); DATA_LOSS RECALL_SAMPLE, its fields are impossible and nothing was taken.
  Status Add(const RecallSamples& samples) KVS_EXCLUDES(mu_);
  // The first End counts.
  void End(const Status& why) KVS_EXCLUDES(mu_);

  // Whether it has ended, and with what.
  bool Ended(Status* why) const KVS_EXCLUDES(mu_);
  RecallProgress Progress() const KVS_EXCLUDES(mu_);
  RecallReport Report() const KVS_EXCLUDES(mu_);

 private:
  struct Samples {
    std::vector<float> recall, error;
  };
  Status Check(const RecallSamples& samples) const;

  const uint32_t number_;
  const RecallOptions options_;
  const int32_t layers_, heads_;

  mutable Mutex mu_;
  Listener listener_ KVS_GUARDED_BY(mu_);
  RecallProgress progress_ KVS_GUARDED_BY(mu_);
  std::map<int32_t, Samples> by_layer_ KVS_GUARDED_BY(mu_);
  bool ended_ KVS_GUARDED_BY(mu_) = false;
  Status why_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
