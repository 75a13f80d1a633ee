// SPDX-License-Identifier: Apache-2.0
// Prompt chunks on the GPU: what a layer costs of a chunk's new tokens, from append to output.
//
//   chunk_bench [--json-out FILE] [--only PREFIX] [--commit HASH] [--date DATE]
//
// chunk/PLAN/512ofN: a step with 512 new tokens of one sequence whose prompt is under way and has N
// tokens before them: a captured graph of all its layers by CudaStep, Begin and End outside.
// few/OP/RofN: the op alone, where a step has few new tokens (R) of a sequence.
// Values are medians of a layer. Qwen2-7B: 28 query heads, 4 KV heads x 128, bf16; pages of 16
// tokens in random order. Layers together read more than the L2 holds.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/pieces.h"
#include "bench/cuda/replay_timing.h"
#include "bench/results.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/step/gpu/cuda_step.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

constexpr int kKvHeads = 4, kGroup = 7, kHeads = kKvHeads * kGroup, kDim = 128, kPage = 16;
constexpr int64_t kRowBytes = kDim * 2;
constexpr int64_t kTokenBytes = int64_t{2} * kKvHeads * kRowBytes;  // bytes of a token in a layer
constexpr int64_t kRotatedBytes = int64_t{300} << 20;               // 6 L2s
constexpr int kChunk = 512, kReplays = 20;

int LayersFor(int64_t tokens) {
  return static_cast<int>((kRotatedBytes - 1) / (tokens * kTokenBytes)) + 1;
}

Geometry GeometryOf(int layers) { return {layers, kHeads, kKvHeads, kDim, kPage, DType::kBF16}; }

// A sequence of `tokens` tokens, and room for new ones.
class Sequence {
 public:
  Sequence(int32_t held, int32_t added)
      : geometry(GeometryOf(LayersFor(held))),
        tokens(held),
        new_tokens(added),
        pages((int64_t{held} + added) / kPage + 1, geometry.page_bytes(), rng_),
        q(1, int64_t{added} * kHeads * kRowBytes, rng_),
        output(static_cast<size_t>(int64_t{added} * kHeads * kDim)) {}

 private:
  std::mt19937_64 rng_{std::random_device{}()};

 public:
  const Geometry geometry;
  const int32_t tokens, new_tokens;
  Pieces pages, q;  // q: its first heads serve as keys and values too
  DeviceArray<BF16> output;
};

// A step of a prompt under way, of which graphs are captured; it stays open.
class ChunkStep {
 public:
  ChunkStep(Sequence& sequence, const char* plan)
      : sequence_(sequence),
        state_(sequence.geometry, ParsePlan(plan).value(), sequence.tokens, sequence.tokens),
        workspace_(*kvs_cuda_ops(), sequence.geometry, sequence.tokens + kChunk) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    SequenceView view{.pages = sequence.pages.addresses().data()};
    view.tokens = sequence.tokens;
    auto step = CudaStep::Begin({{&state_, view, kChunk}}, &workspace_, stream_, {});
    CheckStep(step.status());
    step_ = std::move(step).value();
  }
  ChunkStep(const ChunkStep&) = delete;
  ~ChunkStep() {
    step_.reset();
    cudaStreamDestroy(stream_);
  }

  // Times the first `stages` of every layer: append, selection, attention.
  bench::Timing Time(int stages) {
    const Rows in{sequence_.q.addresses()[0], kHeads * kRowBytes, kRowBytes, DType::kBF16};
    const MutableRows out{reinterpret_cast<std::byte*>(sequence_.output.get()), kHeads * kRowBytes,
                          kRowBytes, DType::kBF16};
    CapturedGraph graph(stream_, [&](Stream) {
      for (int layer = 0; layer < sequence_.geometry.layers; ++layer) {
        CheckStep(step_->Append(layer, in, in));
        if (stages > 1) CheckStep(step_->Select(layer, in));
        if (stages > 2) CheckStep(step_->Attend(layer, in, out, nullptr));
      }
      return 0;
    });
    return TimeReplays<CapturedGraph>({&graph}, sequence_.geometry.layers, kReplays);
  }

 private:
  Sequence& sequence_;
  SequenceState state_;
  CudaWorkspace workspace_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<CudaStep> step_;
};

// Few new tokens of a sequence by either op, over all rows.
class FewTokens {
 public:
  explicit FewTokens(const Sequence& sequence)
      : sequence_(sequence),
        tokens_(Visible(sequence)),
        counters_(
            std::vector<uint32_t>(static_cast<size_t>((sequence.new_tokens + 1) * kKvHeads), 0)),
        chunk_workspace_(
            static_cast<size_t>(kvs_cuda_ops()->attend_chunk_workspace_bytes(kDim) / 4)),
        workspace_(std::vector<std::byte>(
            static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(kGroup, kDim)))) {}

  bench::Timing Time(bool chunk) const {
    CapturedGraph graph([&](Stream stream) {
      int error = 0;
      for (int layer = 0; layer < sequence_.geometry.layers && error == 0; ++layer) {
        error = chunk ? kvs_cuda_ops()->attend_chunk(Chunk(layer), stream)
                      : kvs_cuda_ops()->attend_raw(Items(layer), stream);
      }
      return error;
    });
    return TimeReplays<CapturedGraph>({&graph}, sequence_.geometry.layers, kReplays);
  }

 private:
  static std::vector<int32_t> Visible(const Sequence& sequence) {
    std::vector<int32_t> visible(static_cast<size_t>(sequence.new_tokens));
    std::iota(visible.begin(), visible.end(), sequence.tokens + 1);
    return visible;
  }
  PagedLayer Layer(int layer) const {
    const PageLayout layout = PageLayout::Of(sequence_.geometry);
    PagedLayer pages;
    pages.pages = sequence_.pages.table();
    pages.page_tokens = layout.page_tokens;
    pages.kv_heads = layout.kv_heads;
    pages.head_dim = layout.head_dim;
    pages.dtype = layout.dtype;
    pages.key_offset = layout.KeyOffset(layer, 0, 0);
    pages.value_offset = layout.ValueOffset(layer, 0, 0);
    pages.head_stride = layout.head_stride;
    pages.slot_stride = layout.slot_stride;
    return pages;
  }
  template <typename Batch>
  void Fill(Batch& w, int layer) const {
    w.layer = Layer(layer);
    w.group = kGroup;
    w.tokens = tokens_.get();
    w.q = sequence_.q.addresses()[0];
    w.q_stride = kHeads * kRowBytes;
    w.scale = 1 / std::sqrt(float{kDim});
    w.to = {sequence_.output.get(), DType::kBF16, nullptr};
  }
  AttendChunkBatch Chunk(int layer) const {
    AttendChunkBatch w;
    Fill(w, layer);
    w.rows = sequence_.new_tokens;
    w.counters = counters_.get();
    w.workspace = chunk_workspace_.get();
    return w;
  }
  AttendRawBatch Items(int layer) const {
    AttendRawBatch w;
    Fill(w, layer);
    w.batch = sequence_.new_tokens;
    w.selection.shared = true;
    w.workspace = workspace_.get();
    return w;
  }

  const Sequence& sequence_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<float> chunk_workspace_;
  DeviceArray<std::byte> workspace_;
};

class Report {
 public:
  explicit Report(std::string only) : only_(std::move(only)) {}
  bool Wants(const std::string& id) const { return id.starts_with(only_); }
  // keys: that a query attends, on average.
  void Add(const std::string& id, const bench::Timing& t, int new_tokens, double keys) {
    const double tflops = 4.0 * new_tokens * kHeads * kDim * keys / t.median * 1e-6;
    std::printf("%-36s %9.2f us  p10 %9.2f  p90 %9.2f  %6.1f TFLOP/s\n", id.c_str(), t.median,
                t.p10, t.p90, tflops);
    std::fflush(stdout);
    rows.push_back(bench::RowOf(id, t));
    rows.back()["tflops"] = tflops;
  }
  void NoteSound(bool sound, const std::string& id) {
    if (!sound) std::printf("%s: an output is not a number\n", id.c_str());
    is_sound = is_sound && sound;
  }
  bench::Json rows = bench::Json::array();
  bool is_sound = true;

 private:
  std::string only_;
};

void BenchChunks(Report& report) {
  struct {
    const char *name, *plan;
    int kilotokens;
    double keys;  // without those of the chunk
  } const kCases[] = {
      {"full", "full", 8, 8 * 1024},
      {"full", "full", 32, 32 * 1024},
      {"full", "full", 128, 128 * 1024},
      {"full", "full", 1024, 1024 * 1024},
      {"tokenselect", "tokenselect{min_tokens = 0}", 128, 2048 + 128 + 512},
      {"tokenselect", "tokenselect{min_tokens = 0}", 1024, 2048 + 128 + 512},
  };
  for (const auto& c : kCases) {
    const std::string id = std::string("chunk/") + c.name + "/" + std::to_string(kChunk) + "of" +
                           std::to_string(c.kilotokens) + "K";
    if (!report.Wants(id)) continue;
    Sequence sequence(c.kilotokens * 1024, kChunk);
    ChunkStep step(sequence, c.plan);
    const bench::Timing appended = step.Time(1), selected = step.Time(2), all = step.Time(3);
    report.Add(id, all, kChunk, c.keys + kChunk / 2.0);
    report.rows.back()["append_us"] = appended.median;
    report.rows.back()["select_us"] = selected.median - appended.median;
    report.rows.back()["attend_us"] = all.median - selected.median;
    std::printf("  append %.2f, select %.2f, attend %.2f us\n", appended.median,
                selected.median - appended.median, all.median - selected.median);
    report.NoteSound(IsSound(sequence.output), id);
  }
}

void BenchFew(Report& report) {
  for (const int kilotokens : {4, 32}) {
    for (const int rows : {4, 8, 16, 32, 64}) {
      const Sequence sequence(kilotokens * 1024, rows);
      const FewTokens few(sequence);
      for (const bool chunk : {false, true}) {
        const std::string id = std::string("few/") + (chunk ? "attend_chunk/" : "attend_raw/") +
                               std::to_string(rows) + "of" + std::to_string(kilotokens) + "K";
        if (!report.Wants(id)) continue;
        report.Add(id, few.Time(chunk), rows, kilotokens * 1024);
        report.NoteSound(IsSound(sequence.output), id);
      }
    }
  }
}

int Main(int argc, char** argv) {
  const std::string gpu = NameOfGpu();
  Report report(bench::Option(argc, argv, "--only"));
  BenchChunks(report);
  BenchFew(report);
  bench::WriteResults(
      argc, argv, "cuda-chunk", gpu, "bench/cuda/run_gpu.sh chunk dense (make bundle)",
      {{"notes",
        "one layer of a step with 512 new tokens of a prompt; 28 query heads, 4 KV heads x 128, "
        "bf16, pages of 16 scattered; captured graph of CudaStep's append, select, attend; "
        "few/: the op alone"}},
      report.rows);
  return report.is_sound ? 0 : 1;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
