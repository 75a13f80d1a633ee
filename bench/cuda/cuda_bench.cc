// SPDX-License-Identifier: Apache-2.0
// The ops of the CUDA backend, timed as replays of CUDA graphs.
//
//   cuda_bench [--json-out FILE] [--only PREFIX] [--commit HASH] [--date DATE]
//
// A graph holds one node a layer, as a model's step does; all layers together read more than the
// L2 holds, so no node finds its input there. Values are medians of the time of a node. Pages are
// scattered at random over one arena of random normal bf16. Llama-3.1-8B: 32 query heads, 8 KV
// heads x 128. `replay` rows are of graphs with a single node: they include a launch each.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/pack_rows.h"
#include "bench/cuda/pages_on_host.h"
#include "bench/cuda/quantise_rows.h"
#include "bench/cuda/replay_timing.h"
#include "bench/results.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

constexpr int kKvHeads = 8, kGroup = 4, kDim = 128;
constexpr int64_t kTokenBytes = int64_t{2} * kKvHeads * kDim * 2;  // bytes of a token in a layer
constexpr int64_t kArenaBytes = int64_t{35} << 30;
constexpr int64_t kRotatedBytes = int64_t{300} << 20;  // a graph reads at least as much: 6 L2s
constexpr int kReplays = 60;

struct Case {
  std::string id;
  std::vector<int32_t> lengths;
  int page_tokens = 16;
  // A list of `listed` tokens between `sinks` and the last `recent`; unit_tokens 0: all rows.
  int unit_tokens = 0, listed = 0, sinks = 0, recent = 0;
  bool single_node = false;

  int64_t tokens() const {
    int64_t sum = 0;
    for (int32_t n : lengths) sum += n;
    return sum;
  }
  int64_t attended() const {
    const auto batch = static_cast<int64_t>(lengths.size());
    return unit_tokens == 0 ? tokens() : batch * (listed + sinks + recent);
  }
};

std::vector<Case> AttendCases() {
  std::vector<Case> cases;
  const auto full = [&](int batch, int kilotokens, int page = 16) {
    const std::string paged = page == 16 ? "" : "/page" + std::to_string(page);
    cases.push_back({"attend_raw/full/b" + std::to_string(batch) + "/" +
                         std::to_string(kilotokens) + "K" + paged,
                     std::vector<int32_t>(static_cast<size_t>(batch), kilotokens * 1024), page});
  };
  for (int k : {1, 2, 4, 8, 32, 128, 1024}) full(1, k);
  for (int k : {1, 4, 32, 128, 1024}) full(8, k);
  for (int k : {1, 4, 32}) full(64, k);
  full(1, 128, 32), full(1, 128, 64);
  std::vector<int32_t> ragged;
  for (int i = 0; i < 32; ++i) ragged.push_back(256 << (i % 8));  // 256 .. 32K
  cases.push_back({"attend_raw/full/b32/ragged", ragged});
  cases.push_back({"attend_raw/pages/b1/2048of128K", {131072}, 16, 16, 2048, 0, 0});
  cases.push_back({"attend_raw/tokens/b1/2688of128K", {131072}, 16, 1, 2048, 128, 512});
  const std::vector<int32_t> eight(8, 131072);
  cases.push_back({"attend_raw/pages/b8/2048of128K", eight, 16, 16, 2048, 0, 0});
  cases.push_back({"attend_raw/tokens/b8/2688of128K", eight, 16, 1, 2048, 128, 512});
  cases.push_back({"attend_raw/tokens/b1/64Kof128K", {131072}, 16, 1, 65536, 0, 0});
  cases.push_back({"attend_raw/pages/b1/64Kof128K", {131072}, 16, 16, 65536, 0, 0});
  for (int k : {1, 4}) {
    full(1, k);
    cases.back().id += "/replay";
    cases.back().single_node = true;
  }
  return cases;
}

// Random normal bf16 over the whole arena: one block larger than the L2, repeated.
class Arena {
 public:
  Arena() : memory_(kArenaBytes) {
    std::vector<BF16> block((size_t{61} << 20) / 2);
    std::mt19937 rng(std::random_device{}());
    std::normal_distribution<float> normal;
    for (BF16& x : block) x = FromFloat<BF16>(normal(rng));
    const size_t bytes = block.size() * 2;
    Check(cudaMemcpy(memory_.get(), block.data(), bytes, cudaMemcpyHostToDevice), "fill");
    for (size_t at = bytes; at < memory_.size(); at += bytes) {
      Check(cudaMemcpy(memory_.get() + at, memory_.get(), std::min(bytes, memory_.size() - at),
                       cudaMemcpyDeviceToDevice),
            "fill");
    }
  }
  uint64_t address() const { return memory_.address(); }
  std::byte* get() const { return memory_.get(); }

 private:
  DeviceArray<std::byte> memory_;
};

// The inputs of a case in the arena, for `layers` layers.
class Inputs {
 public:
  Inputs(const Arena& arena, const Case& c) : case_(c) {
    const int64_t read = c.attended() * kTokenBytes;
    const int32_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
    stride_ = (longest + c.page_tokens - 1) / c.page_tokens;
    const int64_t pages = stride_ * static_cast<int64_t>(c.lengths.size());
    const int64_t fit = kArenaBytes / (pages * c.page_tokens * kTokenBytes);
    layers = static_cast<int>(
        std::clamp<int64_t>((kRotatedBytes + read - 1) / read, 1, std::min<int64_t>(fit, 64)));
    FillPages(arena, pages);
    FillSelection();
    tokens_ = DeviceArray<int32_t>(c.lengths);
    std::vector<BF16> q(c.lengths.size() * kKvHeads * kGroup * kDim);
    std::normal_distribution<float> normal;
    for (BF16& x : q) x = FromFloat<BF16>(normal(rng_));
    q_ = DeviceArray<BF16>(q);
    out_ = DeviceArray<BF16>(q.size());
    workspace_ = DeviceArray<std::byte>(std::vector<std::byte>(
        static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(kGroup, kDim))));
  }

  PagedLayer Layer(int layer) const {
    const int64_t head = case_.page_tokens * kDim * 2;
    const int64_t keys = kKvHeads * head;
    return {pages_.get(), stride_,          case_.page_tokens,       kKvHeads, kDim,
            DType::kBF16, 2 * keys * layer, 2 * keys * layer + keys, head,     kDim * 2};
  }
  AttendRawBatch Attend(int layer) const {
    AttendRawBatch w;
    w.layer = Layer(layer);
    if (case_.unit_tokens > 0) {
      w.selection = {
          case_.unit_tokens,  1, list_stride_, units_.get(), counts_.get(), sink_end_.get(),
          recent_begin_.get()};
    }
    w.batch = static_cast<int32_t>(case_.lengths.size());
    w.group = kGroup;
    w.tokens = tokens_.get();
    w.q = q_.get();
    w.q_stride = kKvHeads * kGroup * kDim * 2;
    w.scale = 1 / std::sqrt(float{kDim});
    w.to = {out_.get(), DType::kBF16, nullptr};
    w.workspace = workspace_.get();
    return w;
  }
  AppendBatch Append(int layer) const {
    AppendBatch w;
    w.layer = Layer(layer);
    w.batch = static_cast<int32_t>(case_.lengths.size());
    w.tokens = tokens_.get();
    w.rows_max = w.batch;
    w.k = {q_.get(), kKvHeads * kGroup * kDim * 2, kDim * 2, DType::kBF16};
    w.v = w.k;
    return w;
  }
  int32_t* tokens() const { return tokens_.get(); }

  int layers = 0;

 private:
  void FillPages(const Arena& arena, int64_t pages) {
    std::vector<uint64_t> table;
    for (int64_t i = 0; i < pages; ++i) {
      table.push_back(arena.address() +
                      static_cast<uint64_t>(i * layers * case_.page_tokens * kTokenBytes));
    }
    std::shuffle(table.begin(), table.end(), rng_);
    pages_ = DeviceArray<uint64_t>(table);
  }
  // Units at random, the same for all sequences.
  void FillSelection() {
    if (case_.unit_tokens == 0) return;
    const int32_t n = case_.lengths[0];
    std::vector<int32_t> all, list;
    for (int32_t u = case_.sinks / case_.unit_tokens; u < (n - case_.recent) / case_.unit_tokens;
         ++u) {
      all.push_back(u);
    }
    list_stride_ = case_.listed / case_.unit_tokens;
    std::vector<int32_t> units;
    for (size_t b = 0; b < case_.lengths.size(); ++b) {
      list.clear();
      std::sample(all.begin(), all.end(), std::back_inserter(list), list_stride_, rng_);
      units.insert(units.end(), list.begin(), list.end());
    }
    units_ = DeviceArray<int32_t>(units);
    const size_t batch = case_.lengths.size();
    counts_ = DeviceArray<int32_t>(std::vector<int32_t>(batch, list_stride_));
    sink_end_ = DeviceArray<int32_t>(std::vector<int32_t>(batch, case_.sinks));
    recent_begin_ = DeviceArray<int32_t>(std::vector<int32_t>(batch, n - case_.recent));
  }

  const Case& case_;
  std::mt19937 rng_{std::random_device{}()};
  int32_t stride_ = 0, list_stride_ = 0;
  DeviceArray<uint64_t> pages_;
  DeviceArray<int32_t> tokens_, units_, counts_, sink_end_, recent_begin_;
  DeviceArray<BF16> q_, out_;
  DeviceArray<std::byte> workspace_;
};

// One graph with a node a layer, or for single_node a graph a layer.
template <class Fn>
bench::Timing TimeLayers(int layers, bool single_node, const Fn& enqueue) {
  std::vector<std::unique_ptr<CapturedGraph>> graphs;
  std::vector<CapturedGraph*> all;
  for (int first = 0; first < layers; first += single_node ? 1 : layers) {
    const int last = single_node ? first + 1 : layers;
    graphs.push_back(std::make_unique<CapturedGraph>([&](cudaStream_t stream) {
      int error = 0;
      for (int layer = first; layer < last && error == 0; ++layer) error = enqueue(layer, stream);
      return error;
    }));
    all.push_back(graphs.back().get());
  }
  return TimeReplays(all, single_node ? 1 : layers, kReplays);
}

class Report {
 public:
  explicit Report(std::string only) : only_(std::move(only)) {}
  bool Wants(const std::string& id) const { return id.starts_with(only_); }
  void Add(const Case& c, const bench::Timing& t, int64_t bytes) {
    const double tbps = static_cast<double>(bytes) / t.median / 1e6;
    std::printf("%-36s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s\n", c.id.c_str(), t.median, t.p10,
                t.p90, tbps);
    std::fflush(stdout);
    rows.push_back(bench::RowOf(c.id, t));
    rows.back().update({{"batch", c.lengths.size()},
                        {"tokens", c.tokens() / static_cast<int64_t>(c.lengths.size())},
                        {"tbps", tbps}});
  }
  // Adds a row in GB/s.
  void AddGather(const std::string& id, const bench::Timing& t, int64_t bytes) {
    const auto speed = [bytes](double us) { return static_cast<double>(bytes) / us / 1e3; };
    std::printf("%-36s %9.2f us  %8.1f GB/s\n", id.c_str(), t.median, speed(t.median));
    rows.push_back(
        bench::RowOf(id, {speed(t.median), 0, speed(t.p90), speed(t.p10), 0, t.n}, "GB/s"));
  }
  bench::Json rows = bench::Json::array();

 private:
  std::string only_;
};

void BenchAttend(const Arena& arena, Report& report) {
  for (const Case& c : AttendCases()) {
    if (!report.Wants(c.id)) continue;
    const Inputs in(arena, c);
    const auto t = TimeLayers(in.layers, c.single_node, [&](int layer, cudaStream_t stream) {
      return kvs_cuda_ops()->attend_raw(in.Attend(layer), stream);
    });
    report.Add(c, t, c.attended() * kTokenBytes);
  }
}

void BenchAppend(const Arena& arena, Report& report) {
  for (int batch : {1, 8, 64}) {
    const Case c{"append/b" + std::to_string(batch),
                 std::vector<int32_t>(static_cast<size_t>(batch), 4096)};
    if (!report.Wants(c.id)) continue;
    const Inputs in(arena, c);
    const auto t = TimeLayers(in.layers, false, [&](int layer, cudaStream_t stream) {
      return kvs_cuda_ops()->append(in.Append(layer), stream);
    });
    report.Add(c, t, 2 * batch * kTokenBytes);
  }
}

// Packing a prompt's segment, all layers, as one and op by op; flushing the update buffer, a layer.
void BenchPack(const Arena& arena, Report& report) {
  if (!report.Wants("pack") && !report.Wants("flush")) return;
  PackRows rows(arena.address());
  const auto time = [&](const std::string& id, int32_t tokens, int nodes, int64_t bytes,
                        const auto& enqueue) {
    const Case c{id, {tokens}};
    if (report.Wants(id)) report.Add(c, TimeLayers(nodes, false, enqueue), bytes);
  };
  const auto all = [&](int, cudaStream_t stream) {
    int error = rows.Covariance(stream);
    if (error == 0) error = rows.Eigen(stream);
    return error == 0 ? rows.RotatePack(stream) : error;
  };
  constexpr int64_t kRead = PackRows::kReadBytes;
  CapturedGraph([&](cudaStream_t stream) { return all(0, stream); }).Replay();
  rows.CopyRotations();
  time("pack/64K/covariance", PackRows::kTokens, 1, kRead,
       [&](int, cudaStream_t stream) { return rows.Covariance(stream); });
  time("pack/64K/eigen", PackRows::kTokens, 1, 0,
       [&](int, cudaStream_t stream) { return rows.Eigen(stream); });
  time("pack/64K/rotate_pack", PackRows::kTokens, 1, kRead + rows.packed_bytes(),
       [&](int, cudaStream_t stream) { return rows.RotatePack(stream); });
  time("pack/64K", PackRows::kTokens, 1, 2 * kRead + rows.packed_bytes(), all);
  time("flush/32", PackRows::kFlushTokens, PackRows::kFlushes,
       kRead / PackRows::kLayers / PackRows::kTokens * PackRows::kFlushTokens,
       [&](int n, cudaStream_t stream) { return rows.Flush(n, stream); });
}

// The index of `bits`: of a prompt, and of the group that 64 decoded tokens complete, all layers.
void BenchQuantise(const Arena& arena, Report& report) {
  if (!report.Wants("quantise")) return;
  const QuantiseRows rows(arena.address());
  constexpr int kAll = QuantiseRows::kGroups;
  const Case prompt{"quantise/64K", {QuantiseRows::kTokens}};
  report.Add(prompt,
             TimeLayers(1, false,
                        [&](int, cudaStream_t stream) { return rows.Quantise(0, kAll, stream); }),
             QuantiseRows::Bytes(kAll));
  const Case group{"quantise/group", {QuantiseRows::kFormat.tokens}};
  report.Add(
      group,
      TimeLayers(kAll, false,
                 [&](int i, cudaStream_t stream) { return rows.Quantise(i, i + 1, stream); }),
      QuantiseRows::Bytes(1));
}

// Promotion of slices of pages in the host's memory: a zero-copy gather of pieces of 4 KiB.
void BenchGather(Report& report) {
  for (const int listed : {128, 512}) {
    const std::string id = "gather/4KiB/" + std::to_string(listed) + "pages";
    if (!report.Wants(id)) continue;
    const PagesOnHost pages(listed);
    const auto graph = [&pages](int which) {
      return std::make_unique<CapturedGraph>(
          [&pages, which](cudaStream_t stream) { return pages.Promote(which, stream); });
    };
    const auto first = graph(0), second = graph(1);
    report.AddGather(id, TimeReplays<CapturedGraph>({first.get(), second.get()}, 1, kReplays),
                     pages.bytes());
  }
}

// Bytes read and written by a device-to-device copy, a second.
double CopyTbps(const Arena& arena) {
  constexpr int64_t kBytes = int64_t{4} << 30;
  CapturedGraph graph([&](cudaStream_t stream) {
    return static_cast<int>(cudaMemcpyAsync(arena.get(), arena.get() + kBytes, kBytes,
                                            cudaMemcpyDeviceToDevice, stream));
  });
  return 2 * kBytes / TimeReplays<CapturedGraph>({&graph}, 1, kReplays).median / 1e6;
}

bench::Json Context() {
  cudaDeviceProp device{};
  int driver = 0, runtime = 0;
  cudaGetDeviceProperties(&device, 0);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return {{"cuda_driver", driver},
          {"cuda_runtime", runtime},
          {"sms", device.multiProcessorCount},
          {"notes", "32 query heads, 8 KV heads x 128, bf16; graph replays, a node a layer"}};
}

int Main(int argc, char** argv) {
  const std::string gpu = NameOfGpu();
  const Arena arena;
  Report report(bench::Option(argc, argv, "--only"));
  const double copy = CopyTbps(arena);
  std::printf("%s, copy %.2f TB/s\n", gpu.c_str(), copy);
  BenchAttend(arena, report);
  BenchAppend(arena, report);
  BenchPack(arena, report);
  BenchQuantise(arena, report);
  BenchGather(report);
  bench::WriteResults(argc, argv, "cuda", gpu, "bench/cuda/run_gpu.sh (make bundle)", Context(),
                      report.rows, {{"copy_tbps", copy}});
  return 0;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
