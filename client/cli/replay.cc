// SPDX-License-Identifier: Apache-2.0
#include "client/cli/replay.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#include "client/cli/oracle.h"
#include "client/cli/plan_text.h"
#include "client/cli/replay_stream.h"

namespace kvstrata::cli {
namespace {

constexpr int32_t kOverlapSteps = 16;
constexpr int32_t kOverlapLayers = 4;

Result<std::vector<TraceLayer>> PickLayers(const Trace& trace, const std::vector<int32_t>& wanted) {
  if (wanted.empty()) return trace.layers();
  std::vector<TraceLayer> out;
  for (const int32_t layer : wanted) {
    const auto found = std::find_if(trace.layers().begin(), trace.layers().end(),
                                    [&](const TraceLayer& l) { return l.layer == layer; });
    if (found == trace.layers().end()) {
      std::string known;
      for (const TraceLayer& l : trace.layers()) known += " " + std::to_string(l.layer);
      return InvalidArgument(
          "REPLAY_LAYER", "--layers " + std::to_string(layer) + ": the trace holds layers" + known);
    }
    if (!out.empty() && out.back().layer >= layer) {
      return InvalidArgument("REPLAY_LAYER", "--layers must ascend without repetition");
    }
    out.push_back(*found);
  }
  return out;
}

Result<int32_t> PickSteps(const TraceShape& shape, int32_t wanted) {
  if (shape.steps == 0) {
    return InvalidArgument("REPLAY_STEPS", "the trace has T = 0 decode steps: nothing to replay");
  }
  if (wanted < 0 || wanted > shape.steps) {
    return InvalidArgument("REPLAY_STEPS",
                           "--steps " + std::to_string(wanted) +
                               ": allowed are 1 .. T = " + std::to_string(shape.steps));
  }
  return wanted == 0 ? shape.steps : wanted;
}

std::vector<double> Widened(std::span<const float> values) {
  return {values.begin(), values.end()};
}

// One sequence and what it has shown so far.
struct Lane {
  std::unique_ptr<ReplayStream> stream;
  PlanReport report;
};

// One replay in progress.
class Run {
 public:
  Run(const ReplaySession& session, const Trace& trace, std::vector<TraceLayer> layers,
      int32_t steps, bool timing_only, const ReplayProgress& progress)
      : session_(session),
        trace_(trace),
        layers_(std::move(layers)),
        timing_only_(timing_only),
        progress_(progress) {
    report_.steps = steps;
    for (const TraceLayer& layer : layers_) report_.layers.push_back(layer.layer);
    if (timing_only_) return;
    report_.overlap_steps = SpreadOver(steps, kOverlapSteps);
    overlap_indices_ = SpreadOver(static_cast<int32_t>(layers_.size()), kOverlapLayers);
    for (const int32_t i : overlap_indices_) {
      report_.overlap_layers.push_back(report_.layers[static_cast<size_t>(i)]);
    }
  }

  Result<ReplayReport> Go(const std::vector<std::string>& plans) {
    // The reference first: the others find its prompt and need not append it again.
    lanes_.resize(1 + plans.size());
    KVS_RETURN_IF_ERROR(Prepare("full", &lanes_[0]));
    for (size_t i = 0; i < plans.size(); ++i) {
      KVS_RETURN_IF_ERROR(Prepare(plans[i], &lanes_[i + 1]));
    }
    for (int32_t t = 0; t < report_.steps; ++t) {
      for (Lane& lane : lanes_) KVS_RETURN_IF_ERROR(Step(t, &lane));
      if (std::ranges::binary_search(report_.overlap_steps, t)) Sample(t);
      progress_("decode", t + 1, report_.steps);
    }
    for (Lane& lane : lanes_) KVS_RETURN_IF_ERROR(Finish(&lane));
    report_.reference = std::move(lanes_[0].report);
    for (size_t i = 1; i < lanes_.size(); ++i) report_.plans.push_back(std::move(lanes_[i].report));
    return std::move(report_);
  }

 private:
  const ReplayStream& reference() const { return *lanes_[0].stream; }

  Status Prepare(const std::string& plan, Lane* lane) {
    lane->stream = std::make_unique<ReplayStream>(session_, trace_, layers_);
    ReplayStream& stream = *lane->stream;
    KVS_RETURN_IF_ERROR(stream.Open(plan));
    while (!stream.prefilled()) {
      KVS_RETURN_IF_ERROR(stream.PrefillChunk());
      progress_("prefill", stream.position(), trace_.shape().prompt);
    }
    PlanReport& report = lane->report;
    report.plan = plan;
    KVS_ASSIGN_OR_RETURN(report.plan_text, stream.PlanText());
    report.raw = StoresRaw(report.plan_text);
    report.sampled = !AttendsPositionsOnly(report.plan_text);
    report.held_tokens = stream.held();
    report.prefill_ms = stream.prefill_ms();
    report.selections = stream.Selections();  // those of the prompt; Finish subtracts them
    return OkStatus();
  }

  Status Step(int32_t t, Lane* lane) {
    const ReplayStream& stream = *lane->stream;
    KVS_RETURN_IF_ERROR(lane->stream->Step(t, !timing_only_));
    lane->report.step_ms.Add(stream.step_ms());
    CountCosts(stream, &lane->report.costs);
    if (timing_only_) return OkStatus();
    for (size_t i = 0; i < layers_.size(); ++i) {
      Compare(stream.results()[i], reference().results()[i], &lane->report);
    }
    return CountReads(stream, &lane->report);
  }

  static void CountCosts(const ReplayStream& stream, StepCosts* costs) {
    kvs_cost sum{};
    for (const LayerResult& result : stream.results()) {
      sum.rows += result.cost.rows;
      sum.coarse_rows += result.cost.coarse_rows;
      sum.attend_bytes += result.cost.attend_bytes;
      sum.select_bytes += result.cost.select_bytes;
    }
    costs->rows.Add(static_cast<double>(sum.rows));
    costs->coarse_rows.Add(static_cast<double>(sum.coarse_rows));
    costs->attend_bytes.Add(static_cast<double>(sum.attend_bytes));
    costs->select_bytes.Add(static_cast<double>(sum.select_bytes));
  }

  std::span<const float> OutOf(const LayerResult& result, size_t head) const {
    const auto d = static_cast<size_t>(trace_.shape().head_dim);
    return {result.out.data() + head * d, d};
  }

  void Compare(const LayerResult& got, const LayerResult& full, PlanReport* report) {
    for (size_t h = 0; h < got.lse.size(); ++h) {
      report->output_error.Add(RelativeError(OutOf(got, h), OutOf(full, h)));
      if (report->sampled) continue;
      report->mass_recall.Add(std::exp(double{got.lse[h]} - double{full.lse[h]}));
    }
  }

  // A list that KV heads share counts once for each; where every query head has its own, each
  // counts.
  Status CountReads(const ReplayStream& stream, PlanReport* report) {
    const TraceShape& shape = trace_.shape();
    KVS_ASSIGN_OR_RETURN(const std::vector<PageTier> pages, stream.Pages());
    uint64_t rows[2] = {0, 0};  // device, host
    double tokens = 0;
    for (const LayerResult& result : stream.results()) {
      const auto groups = static_cast<int32_t>(result.positions.size());
      const auto heads = static_cast<uint64_t>(std::max(1, shape.kv_heads / groups));
      for (const auto& positions : result.positions) {
        tokens += static_cast<double>(positions.size()) / groups;
        for (const int32_t p : positions) rows[OnHost(pages, p)] += heads;
      }
    }
    report->kv_tokens.Add(tokens / static_cast<double>(layers_.size()));
    const double row_bytes = 2.0 * shape.head_dim * sizeof(uint16_t);
    report->device_bytes.Add(static_cast<double>(rows[0]) * row_bytes);
    report->host_bytes.Add(static_cast<double>(rows[1]) * row_bytes);
    return OkStatus();
  }

  size_t OnHost(const std::vector<PageTier>& pages, int32_t position) const {
    const auto page = static_cast<size_t>(position / trace_.shape().page_tokens);
    return page < pages.size() && pages[page] == PageTier::kHost ? 1 : 0;
  }

  // What the trace alone can say about the step that all lanes have just taken.
  void Sample(int32_t t) {
    for (const int32_t i : overlap_indices_) {
      const auto index = static_cast<size_t>(i);
      const Oracle oracle(trace_.shape(), layers_[index], t);
      for (Lane& lane : lanes_) {
        SampleLayer(oracle, lane.stream->results()[index], reference().results()[index],
                    &lane.report);
      }
    }
  }

  void SampleLayer(const Oracle& oracle, const LayerResult& got, const LayerResult& full,
                   PlanReport* report) const {
    for (int32_t h = 0; h < trace_.shape().query_heads; ++h) {
      const std::vector<int32_t>& chosen = got.PositionsOf(h);
      const std::vector<int32_t> best = oracle.Best(h, static_cast<int32_t>(chosen.size()));
      report->oracle_overlap.Add(Overlap(chosen, best));
      if (!report->sampled) continue;
      report->mass_recall.Add(oracle.MassOn(h, chosen));
      const auto head = static_cast<size_t>(h);
      const std::vector<double> exact = oracle.AttendOver(h, chosen);
      const std::vector<double> truth = Widened(OutOf(full, head));
      report->selection_error.Add(RelativeDistance(exact, truth, truth));
      report->codec_error.Add(RelativeDistance(Widened(OutOf(got, head)), exact, truth));
    }
  }

  Status Finish(Lane* lane) const {
    PlanReport& report = lane->report;
    KVS_ASSIGN_OR_RETURN(report.status, lane->stream->StatusText());
    if (!report.sampled) report.selection_error = report.output_error;
    if (const auto now = lane->stream->Selections(); now && report.selections) {
      report.selections = *now - *report.selections;
    }
    return OkStatus();
  }

  const ReplaySession& session_;
  const Trace& trace_;
  const std::vector<TraceLayer> layers_;
  const bool timing_only_;
  const ReplayProgress& progress_;
  std::vector<int32_t> overlap_indices_;
  std::vector<Lane> lanes_;  // the first is the reference
  ReplayReport report_;
};

}  // namespace

Result<ReplayReport> Replay(const Trace& trace, const ReplayOptions& options,
                            const ReplayProgress& progress) {
  KVS_ASSIGN_OR_RETURN(std::vector<TraceLayer> layers, PickLayers(trace, options.layers));
  KVS_ASSIGN_OR_RETURN(const int32_t steps, PickSteps(trace.shape(), options.steps));
  KVS_ASSIGN_OR_RETURN(
      const ReplaySession session,
      ReplaySession::Attach(options.socket, options.timeout, trace, layers.size(), options.keep));
  Run run(session, trace, std::move(layers), steps, options.timing_only, progress);
  return run.Go(options.plans);
}

}  // namespace kvstrata::cli
