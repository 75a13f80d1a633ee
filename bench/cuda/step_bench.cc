// SPDX-License-Identifier: Apache-2.0
// Decode steps on the GPU, op by op: what a layer costs from its new token to its output.
//
//   step_bench [--json-out FILE] [--only PREFIX] [--stages 1] [--surprisal TRACE]
//              [--commit HASH] [--date DATE]
// --surprisal: a trace whose surprisal cuts the spans of sekv (span_step.h); without: no such row.
// --stages: also what a graph takes that ends after a layer's append, its selection, ...
//
// A step is one of a model whose layers read more than the L2 holds: CudaStep's Begin, a captured
// graph in which each layer appends, selects and attends, and End (mosaickv
// (packed_step.h) and sekv (span_step.h): the ops alone).
// Sequences grow by a token a step. Values are medians of a step, divided by its layers: launches
// between the ops, copies and index rows of Begin are in them, nothing of the host is; what Begin
// and End take of the host stands beside them. Llama-3.1-8B: 32 query heads, 8 KV heads x 128,
// bf16; pages of 16 tokens and index blocks lie in random order.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/packed_step.h"
#include "bench/cuda/pieces.h"
#include "bench/cuda/replay_timing.h"
#include "bench/cuda/span_step.h"
#include "bench/results.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/step/gpu/cuda_step.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

constexpr int kKvHeads = 8, kGroup = 4, kHeads = kKvHeads * kGroup, kDim = 128, kPage = 16;
constexpr int64_t kRowBytes = kDim * 2;
constexpr int64_t kTokenBytes = int64_t{2} * kKvHeads * kRowBytes;  // bytes of a token in a layer
constexpr int64_t kRotatedBytes = int64_t{300} << 20;  // a step reads at least as much: 6 L2s
constexpr int64_t kMostBytes = int64_t{60} << 30;
constexpr int kReplays = 60;

// Queries are the same in every step: theta below 1 is a hit of TokenSelect's cache.
struct BenchPlan {
  const char* name;
  const char* text;
  int64_t (*rows_read)(int64_t tokens);  // rows of a layer and sequence, summaries included
};

constexpr int64_t kTokenRows = 2048 + 128 + 512;  // that TokenSelect attends
const BenchPlan kPlans[] = {
    {"full", "full", [](int64_t n) { return n; }},
    {"quest", "quest{min_tokens = 0}", [](int64_t n) { return n / 16 + 2048 + 1; }},
    {"quest_softmax",
     "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", min_tokens = 0}",
     [](int64_t n) { return n / 32 + 2048 + 68; }},
    {"tokenselect_miss", "tokenselect{theta = 1, min_tokens = 0}",
     [](int64_t n) { return n / 2 + kTokenRows; }},
    {"tokenselect_hit", "tokenselect{min_tokens = 0}", [](int64_t) { return kTokenRows; }},
};

// Bytes that a step of one layer must read.
int64_t BytesOf(const BenchPlan& plan, int64_t batch, int64_t tokens) {
  return batch * plan.rows_read(tokens) * kTokenBytes;
}

Geometry GeometryOf(int layers) { return {layers, kHeads, kKvHeads, kDim, kPage, DType::kBF16}; }

// Layers enough that a step reads more than the L2 holds.
int LayersOf(const BenchPlan& plan, int batch, int64_t tokens) {
  const int64_t read = BytesOf(plan, batch, tokens);
  const int64_t fit = kMostBytes / (batch * tokens * kTokenBytes * 9 / 8);
  return static_cast<int>(
      std::clamp<int64_t>((kRotatedBytes + read - 1) / read, 1, std::clamp<int64_t>(fit, 1, 32)));
}

// Tokens that a sequence may have.
int32_t CapacityOf(int32_t tokens) { return (tokens + 4 * kReplays) / 512 * 512 + 1024; }

// Steps of a batch of equally long sequences as an engine makes them: Begin, a graph of all layers,
// End. Sequences grow by a token a step.
class ServedSteps {
 public:
  ServedSteps(const BenchPlan& plan, int batch, int32_t tokens)
      : geometry_(GeometryOf(LayersOf(plan, batch, tokens))),
        plan_(ParsePlan(plan.text).value()),
        index_(IndexOf(plan_, geometry_)),
        pages_(int64_t{batch} * CapacityOf(tokens) / kPage, geometry_.page_bytes(), rng_),
        blocks_(std::max<int64_t>(int64_t{batch} * index_.BlocksFor(CapacityOf(tokens)), 1),
                std::max<int64_t>(index_.block_bytes, 16), rng_),
        input_(1, int64_t{batch} * kHeads * kRowBytes, rng_),
        output_(static_cast<size_t>(int64_t{batch} * kHeads * kDim)),
        workspace_(*kvs_cuda_ops(), geometry_, CapacityOf(tokens)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const auto pages = pages_.addresses().size() / static_cast<size_t>(batch);
    const auto blocks = static_cast<size_t>(index_.BlocksFor(CapacityOf(tokens)));
    for (size_t i = 0; i < static_cast<size_t>(batch); ++i) {
      states_.push_back(std::make_unique<SequenceState>(geometry_, plan_, tokens, tokens));
      CheckStep(states_.back()->ClosePrompt());
      views_.push_back({.pages = pages_.addresses().data() + i * pages,
                        .index_blocks = blocks_.addresses().data() + i * blocks});
    }
    graph_ = Capture(kStages);
  }
  ServedSteps(const ServedSteps&) = delete;
  ~ServedSteps() {
    graph_.reset();
    cudaStreamDestroy(stream_);
  }

  int layers() const { return geometry_.layers; }
  cudaStream_t stream() const { return stream_; }

  // A step.
  void Launch() {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    const std::unique_ptr<CudaStep> step = Begin();
    const auto begun = Clock::now();
    graph_->Launch();
    CheckStep(step->Replay());
    const auto launched = Clock::now();
    CheckStep(step->End(stream_));
    const auto host = begun - begin + (Clock::now() - launched);
    host_us_.push_back(std::chrono::duration<double, std::micro>(host).count());
  }
  // What Begin and End take of the host.
  bench::Timing HostTime() const { return bench::TimingOf(host_us_); }

  // A layer's append, its selection, its attention.
  static constexpr int kStages = 3;
  // A graph of the first `stages` of every layer.
  std::unique_ptr<CapturedGraph> Capture(int stages) {
    const std::unique_ptr<CudaStep> step = Begin();
    const Rows in{input_.addresses()[0], kHeads * kRowBytes, kRowBytes, DType::kBF16};
    const MutableRows out{reinterpret_cast<std::byte*>(output_.get()), kHeads * kRowBytes,
                          kRowBytes, DType::kBF16};
    return std::make_unique<CapturedGraph>(stream_, [&](Stream) {
      for (int layer = 0; layer < layers(); ++layer) {
        CheckStep(step->Append(layer, in, in));
        if (stages > 1) CheckStep(step->Select(layer, in));
        if (stages > 2) CheckStep(step->Attend(layer, in, out, nullptr));
      }
      return 0;
    });
  }
  bool Sound() const { return IsSound(output_); }

 private:
  std::unique_ptr<CudaStep> Begin() {
    std::vector<StepMember> members;
    for (size_t i = 0; i < states_.size(); ++i) {
      views_[i].tokens = states_[i]->tokens();
      members.push_back({states_[i].get(), views_[i], 1});
    }
    auto step = CudaStep::Begin(std::move(members), &workspace_, stream_, {});
    CheckStep(step.status());
    return std::move(step).value();
  }

  const Geometry geometry_;
  const kvstrata::Plan plan_;
  const IndexLayout index_;
  std::mt19937_64 rng_{std::random_device{}()};
  Pieces pages_, blocks_;
  Pieces input_;  // queries, whose first heads serve as keys and values too
  DeviceArray<BF16> output_;
  CudaWorkspace workspace_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<SequenceState>> states_;
  std::vector<SequenceView> views_;
  std::unique_ptr<CapturedGraph> graph_;
  std::vector<double> host_us_;
};

// Microseconds of a layer.
bench::Timing TimeSteps(ServedSteps& steps) {
  return TimeReplays<ServedSteps>({&steps}, steps.layers(), kReplays);
}
bench::Timing TimeSteps(ServedSteps& steps, int stages) {
  const std::unique_ptr<CapturedGraph> graph = steps.Capture(stages);
  return TimeReplays<CapturedGraph>({graph.get()}, steps.layers(), kReplays);
}
// The first `stages` ops of every layer.
template <typename Ops>
bench::Timing TimeOps(const Ops& steps, size_t stages) {
  CapturedGraph graph([&](Stream stream) {
    int error = 0;
    for (int layer = 0; layer < steps.layers() && error == 0; ++layer) {
      const auto ops = steps.OpsOf(layer);
      for (size_t i = 0; i < stages && error == 0; ++i) error = ops[i](stream);
    }
    return error;
  });
  return TimeReplays<CapturedGraph>({&graph}, steps.layers(), kReplays);
}

struct Measured {
  bench::Timing layer;  // microseconds
  double host_us = 0;   // in Begin and End, a step
  bool sound = false;   // every output is a number
};

void PrintStage(const std::string& id, int stage, const bench::Timing& t) {
  std::printf("%-34s %9.2f us  after op %d\n", id.c_str(), t.median, stage);
}

Measured Measure(ServedSteps steps, bool stages, const std::string& id) {
  for (int i = 1; stages && i <= ServedSteps::kStages; ++i) PrintStage(id, i, TimeSteps(steps, i));
  const bench::Timing t = TimeSteps(steps);
  return {t, steps.HostTime().median, steps.Sound()};
}
// Steps that are their ops alone.
template <typename Ops>
Measured MeasureOps(const Ops& steps, bool stages, const std::string& id) {
  const size_t ops = steps.OpsOf(0).size();
  for (size_t i = 1; stages && i < ops; ++i) {
    PrintStage(id, static_cast<int>(i), TimeOps(steps, i));
  }
  return {TimeOps(steps, ops), 0, IsSound(steps.output())};
}

struct Row {
  std::string plan;
  int batch;
  int32_t tokens;
  int64_t bytes;

  std::string id() const {
    return "step/" + plan + "/b" + std::to_string(batch) + "/" + std::to_string(tokens / 1024) +
           "K";
  }
};

// Whether every output is a number.
bool Report(const Row& row, const Measured& measured, bench::Json* rows) {
  const bench::Timing& t = measured.layer;
  if (!measured.sound) std::printf("%s: an output is not a number\n", row.id().c_str());
  const double tbps = static_cast<double>(row.bytes) / t.median * 1e-6;
  std::printf("%-34s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s  host %6.1f us a step\n",
              row.id().c_str(), t.median, t.p10, t.p90, tbps, measured.host_us);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(row.id(), t));
  rows->back().update({{"plan", row.plan},
                       {"batch", row.batch},
                       {"tokens", row.tokens},
                       {"tbps", tbps},
                       {"host_us", measured.host_us}});
  return measured.sound;
}

// Plan sekv: heads of a group choose spans each for itself, or all the same.
bool RunSpans(const std::vector<float>& surprisal, const std::string& only, bool stages, int batch,
              int32_t tokens, bench::Json* rows) {
  bool sound = true;
  for (const bool agree : {false, true}) {
    Row row{agree ? "sekv_agreed" : "sekv", batch, tokens, 0};
    if (surprisal.empty() || !row.id().starts_with(only)) continue;
    const sekv::SpanStep step(surprisal, agree, batch, tokens, kRotatedBytes);
    row.bytes = step.BytesOf();
    sound &= Report(row, MeasureOps(step, stages, row.id()), rows);
  }
  return sound;
}

// 1 when an output is not a number.
int Run(const std::string& only, bool stages, const std::vector<float>& surprisal,
        bench::Json* rows) {
  bool sound = true;
  for (const auto& [batch, kilotokens] : {std::pair{1, 32}, {1, 128}, {1, 1024}, {8, 128}}) {
    const int32_t tokens = kilotokens * 1024;
    for (const BenchPlan& plan : kPlans) {
      const Row row{plan.name, batch, tokens, BytesOf(plan, batch, tokens)};
      if (!row.id().starts_with(only)) continue;
      sound &= Report(row, Measure(ServedSteps(plan, batch, tokens), stages, row.id()), rows);
    }
    sound &= RunSpans(surprisal, only, stages, batch, tokens, rows);
    const Row row{"mosaickv", batch, tokens, mosaickv::PackedStep::BytesOf(batch, tokens)};
    if (!row.id().starts_with(only)) continue;
    sound &= Report(
        row, MeasureOps(mosaickv::PackedStep(batch, tokens, kRotatedBytes), stages, row.id()),
        rows);
  }
  return sound ? 0 : 1;
}

int Main(int argc, char** argv) {
  const std::string gpu = NameOfGpu();
  bench::Json rows = bench::Json::array();
  const int unsound =
      Run(bench::Option(argc, argv, "--only"), !bench::Option(argc, argv, "--stages").empty(),
          SurprisalOf(bench::Option(argc, argv, "--surprisal")), &rows);
  bench::WriteResults(
      argc, argv, "cuda-steps", gpu, "bench/cuda/run_gpu.sh steps dense (make bundle)",
      {{"notes",
        "one layer of a step: CudaStep's Begin, a captured graph of append, select, attend, End; "
        "lengths grow a token a step; 32 query heads, 8 KV heads x "
        "128, bf16, pages of 16 scattered"}},
      rows);
  return unsound;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
