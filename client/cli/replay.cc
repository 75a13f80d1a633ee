#include "client/cli/replay.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "client/cli/replay_stream.h"

namespace kvstrata::cli {
namespace {

constexpr int32_t kOverlapSteps = 16;
constexpr int32_t kOverlapLayers = 4;

struct Detach {
  void operator()(kvs_session* session) const { kvs_detach(session); }
};
using SessionHandle = std::unique_ptr<kvs_session, Detach>;

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

Result<SessionHandle> Attach(const ReplayOptions& options) {
  kvs_attach_options attach{};
  attach.size = sizeof(attach);
  attach.client_name = "kvstrata replay";
  attach.timeout_ms = static_cast<uint32_t>(options.timeout.count());
  kvs_session* session = nullptr;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_attach(options.socket.c_str(), &attach, &session)));
  return SessionHandle(session);
}

// A digest of its own per replay: pages of one replay are never taken for another's, or for a
// model's.
Result<kvs_model> Register(kvs_session* session, const Trace& trace, int32_t layers) {
  std::random_device random;
  const std::string digest = "replay:" + std::to_string(getpid()) + ":" + std::to_string(random()) +
                             ":" + std::to_string(random());
  const std::string name = "replay";
  const TraceShape& shape = trace.shape();
  kvs_model_desc desc{};
  desc.size = sizeof(desc);
  desc.name = name.c_str();
  desc.digest = digest.c_str();
  desc.layers = layers;
  desc.query_heads = shape.query_heads;
  desc.kv_heads = shape.kv_heads;
  desc.head_dim = shape.head_dim;
  desc.page_tokens = shape.page_tokens;
  desc.dtype = KVS_BF16;
  desc.ranks = 1;
  kvs_model model = 0;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_model_register(session, &desc, &model)));
  return model;
}

// One replay in progress.
class Run {
 public:
  Run(kvs_session* session, kvs_model model, const Trace& trace, std::vector<TraceLayer> layers,
      int32_t steps, const ReplayProgress& progress)
      : session_(session),
        model_(model),
        trace_(trace),
        layers_(std::move(layers)),
        progress_(progress) {
    report_.steps = steps;
    for (const TraceLayer& layer : layers_) report_.layers.push_back(layer.layer);
    report_.overlap_steps = SpreadOver(steps, kOverlapSteps);
    overlap_indices_ = SpreadOver(static_cast<int32_t>(layers_.size()), kOverlapLayers);
    for (const int32_t i : overlap_indices_) {
      report_.overlap_layers.push_back(report_.layers[static_cast<size_t>(i)]);
    }
  }

  Result<ReplayReport> Go(const std::vector<std::string>& plans) {
    // The reference first: the others find its prompt and need not append it again.
    KVS_RETURN_IF_ERROR(Prepare("full", &reference_, &report_.reference));
    report_.plans.resize(plans.size());
    streams_.resize(plans.size());
    for (size_t i = 0; i < plans.size(); ++i) {
      KVS_RETURN_IF_ERROR(Prepare(plans[i], &streams_[i], &report_.plans[i]));
    }
    for (int32_t t = 0; t < report_.steps; ++t) {
      KVS_RETURN_IF_ERROR(StepAll(t));
      progress_("decode", t + 1, report_.steps);
    }
    KVS_RETURN_IF_ERROR(Finish(*reference_, &report_.reference));
    for (size_t i = 0; i < plans.size(); ++i)
      KVS_RETURN_IF_ERROR(Finish(*streams_[i], &report_.plans[i]));
    return std::move(report_);
  }

 private:
  Status Prepare(const std::string& plan, std::unique_ptr<ReplayStream>* stream,
                 PlanReport* report) {
    *stream = std::make_unique<ReplayStream>(session_, model_, trace_, layers_);
    KVS_RETURN_IF_ERROR((*stream)->Open(plan));
    while (!(*stream)->prefilled()) {
      KVS_RETURN_IF_ERROR((*stream)->PrefillChunk());
      progress_("prefill", (*stream)->position(), trace_.shape().prompt);
    }
    report->plan = plan;
    report->held_tokens = (*stream)->held();
    report->prefill_ms = (*stream)->prefill_ms();
    report->selections = (*stream)->Selections();  // those of the prompt; Finish subtracts them
    return OkStatus();
  }

  Status StepAll(int32_t t) {
    KVS_RETURN_IF_ERROR(reference_->Step(t, true));
    KVS_RETURN_IF_ERROR(Measure(t, *reference_, &report_.reference));
    for (size_t i = 0; i < streams_.size(); ++i) {
      KVS_RETURN_IF_ERROR(streams_[i]->Step(t, true));
      KVS_RETURN_IF_ERROR(Measure(t, *streams_[i], &report_.plans[i]));
    }
    return OkStatus();
  }

  Status Measure(int32_t t, const ReplayStream& stream, PlanReport* report) {
    report->step_ms.Add(stream.step_ms());
    for (size_t i = 0; i < layers_.size(); ++i) {
      Compare(stream.results()[i], reference_->results()[i], report);
    }
    KVS_ASSIGN_OR_RETURN(const std::vector<bool> host, stream.PagesOnHost());
    CountReads(stream, host, report);
    if (std::ranges::binary_search(report_.overlap_steps, t)) {
      for (const int32_t i : overlap_indices_) OverlapOf(t, static_cast<size_t>(i), stream, report);
    }
    return OkStatus();
  }

  void Compare(const LayerResult& got, const LayerResult& full, PlanReport* report) {
    const auto d = static_cast<size_t>(trace_.shape().head_dim);
    for (size_t h = 0; h < got.lse.size(); ++h) {
      report->mass_recall.Add(std::exp(double{got.lse[h]} - double{full.lse[h]}));
      report->selection_error.Add(
          RelativeError({got.out.data() + h * d, d}, {full.out.data() + h * d, d}));
    }
  }

  void CountReads(const ReplayStream& stream, const std::vector<bool>& host, PlanReport* report) {
    const TraceShape& shape = trace_.shape();
    const auto kv_heads = static_cast<size_t>(shape.kv_heads);
    uint64_t rows[2] = {0, 0};  // (token, KV head) pairs by tier, all layers
    for (const LayerResult& result : stream.results()) {
      const size_t heads = kv_heads / result.positions.size();  // that share a list
      for (const auto& positions : result.positions) {
        for (const int32_t p : positions) {
          const auto page = static_cast<size_t>(p / shape.page_tokens);
          rows[page < host.size() && host[page]] += heads;
        }
      }
    }
    const double row_bytes = 2.0 * shape.head_dim * sizeof(uint16_t);
    report->device_bytes.Add(static_cast<double>(rows[0]) * row_bytes);
    report->host_bytes.Add(static_cast<double>(rows[1]) * row_bytes);
    report->kv_tokens.Add(static_cast<double>(rows[0] + rows[1]) /
                          static_cast<double>(kv_heads * layers_.size()));
  }

  void OverlapOf(int32_t t, size_t index, const ReplayStream& stream, PlanReport* report) {
    const TraceShape& shape = trace_.shape();
    const int32_t n = shape.prompt + t + 1;
    const auto& groups = stream.results()[index].positions;
    const uint16_t* q = layers_[index].q + (shape.tail + t) * shape.q_row();
    for (int32_t h = 0; h < shape.query_heads; ++h) {
      const int32_t kv_head = h / (shape.query_heads / shape.kv_heads);
      const auto& chosen = groups[groups.size() == 1 ? 0 : static_cast<size_t>(kv_head)];
      const KeyRows keys{layers_[index].k + int64_t{kv_head} * shape.head_dim, shape.kv_row(),
                         shape.head_dim};
      const auto best =
          OracleTopK(keys, q + int64_t{h} * shape.head_dim, n, static_cast<int32_t>(chosen.size()));
      report->oracle_overlap.Add(Overlap(chosen, best));
    }
  }

  Status Finish(const ReplayStream& stream, PlanReport* report) {
    KVS_ASSIGN_OR_RETURN(report->plan_text, stream.PlanText());
    KVS_ASSIGN_OR_RETURN(report->status, stream.StatusText());
    if (const auto now = stream.Selections(); now && report->selections) {
      report->selections = *now - *report->selections;
    }
    return OkStatus();
  }

  kvs_session* const session_;
  const kvs_model model_;
  const Trace& trace_;
  const std::vector<TraceLayer> layers_;
  const ReplayProgress& progress_;
  std::vector<int32_t> overlap_indices_;
  std::unique_ptr<ReplayStream> reference_;
  std::vector<std::unique_ptr<ReplayStream>> streams_;
  ReplayReport report_;
};

}  // namespace

Result<ReplayReport> Replay(const Trace& trace, const ReplayOptions& options,
                            const ReplayProgress& progress) {
  KVS_ASSIGN_OR_RETURN(std::vector<TraceLayer> layers, PickLayers(trace, options.layers));
  KVS_ASSIGN_OR_RETURN(const int32_t steps, PickSteps(trace.shape(), options.steps));
  KVS_ASSIGN_OR_RETURN(const SessionHandle session, Attach(options));
  KVS_ASSIGN_OR_RETURN(const kvs_model model,
                       Register(session.get(), trace, static_cast<int32_t>(layers.size())));
  Run run(session.get(), model, trace, std::move(layers), steps, progress);
  return run.Go(options.plans);
}

}  // namespace kvstrata::cli
