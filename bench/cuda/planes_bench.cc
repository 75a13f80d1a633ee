// SPDX-License-Identifier: Apache-2.0
// Ops attend_planes and pack_planes beside dense attention, timed as replays of CUDA graphs.
//
//   planes_bench [--recorded FILE] [--only PREFIX] [--json-out FILE] [--commit HASH] [--date DATE]
//
// Llama-3.1-8B: 32 query heads, 8 KV heads x 128, bf16. A graph holds one node a layer, whose
// layers together read more than the L2 holds. Keys and values are packed by op pack_planes from
// the pages that dense attention reads. Keys are such that logits are those of a trained model
// (recorded_keys.h), by the preset's limits and by limits that make 5 % of the tokens fine; and
// random normal as a control, with queries times a factor that makes 5 % fine. "In full" the rule
// says that everything is fine. Dense and planes are timed in turns. "step" is with attend_raw over
// what is not sealed, "op" without.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "bench/cuda/command_line.h"
#include "bench/cuda/planes_host.h"
#include "bench/cuda/recorded_keys.h"
#include "bench/cuda/replay_timing.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

using nlohmann::ordered_json;

constexpr int kKvHeads = 8, kGroup = 4, kDim = 128, kPageTokens = 64, kUnit = 64;
constexpr PlanesFormat kFormat{kDim, kUnit, 8};
constexpr int64_t kRow = kDim * 2, kHead = kPageTokens * kRow;
constexpr int64_t kLayerBytes = 2 * kKvHeads * kHead;  // in a page
constexpr int kRounds = 3, kReplays = 20;

template <typename T>
std::vector<T> Zeros(size_t n) {
  return std::vector<T>(n, T{});
}

// Pages of all layers, and the groups that are packed of them.
class Cache {
 public:
  // block: of pages of one layer each, which all pages take in turns.
  Cache(int batch, int tokens, int layers, const std::vector<BF16>& block)
      : batch_(batch), tokens_(tokens), layers_(layers) {
    pages_each_ = tokens / kPageTokens;
    FillPages(block);
    const int64_t runs = int64_t{pages_each_} * batch * layers * kKvHeads;
    upper_ = DeviceArray<std::byte>(static_cast<size_t>(runs * kFormat.upper_bytes()));
    lower_ = DeviceArray<std::byte>(static_cast<size_t>(runs * kFormat.lower_bytes()));
    upper_table_ = Table(upper_.address(), layers * kKvHeads * kFormat.upper_bytes());
    lower_table_ = Table(lower_.address(), layers * kKvHeads * kFormat.lower_bytes());
    const auto of_each = [&](int32_t x) {
      return DeviceArray<int32_t>(std::vector<int32_t>(static_cast<size_t>(batch), x));
    };
    lengths_ = of_each(tokens);
    zeros_ = of_each(0);
    sealed_ = of_each(sealed());
    last_group_ = of_each(sealed() - kUnit);
    groups_ = of_each((tokens - 1) / kUnit);
  }

  // keys: of a page, in place of those that the last page of each sequence has.
  void SetLastKeys(const std::vector<BF16>& keys) {
    const std::vector<uint64_t> pages = page_table_.Read();
    for (int i = 0; i < batch_ * layers_; ++i) {
      const uint64_t page = pages[static_cast<size_t>((i / layers_ + 1) * pages_each_ - 1)];
      Check(cudaMemcpy(reinterpret_cast<void*>(page + i % layers_ * kLayerBytes), keys.data(),
                       keys.size() * 2, cudaMemcpyHostToDevice),
            "last keys");
    }
  }

  int batch() const { return batch_; }
  int tokens() const { return tokens_; }
  int layers() const { return layers_; }
  int sealed() const { return (tokens_ - 1) / kUnit * kUnit; }
  int groups() const { return sealed() / kUnit; }
  const int32_t* lengths() const { return lengths_.get(); }
  const int32_t* zeros() const { return zeros_.get(); }
  const int32_t* sealed_ends() const { return sealed_.get(); }
  const int32_t* group_counts() const { return groups_.get(); }

  const DeviceArray<std::byte>& lower() const { return lower_; }
  const DeviceArray<uint64_t>& lower_table() const { return lower_table_; }

  PagedLayer Pages(int layer) const {
    return {page_table_.get(),
            pages_each_,
            kPageTokens,
            kKvHeads,
            kDim,
            DType::kBF16,
            layer * kLayerBytes,
            layer * kLayerBytes + kKvHeads * kHead,
            kHead,
            kRow};
  }
  DevicePlanes Planes(int layer) const {
    const int64_t upper = kFormat.upper_bytes(), lower = kFormat.lower_bytes();
    return {kFormat,
            {upper_table_.get(), layer * kKvHeads * upper, upper},
            {lower_table_.get(), layer * kKvHeads * lower, lower},
            pages_each_,
            1,
            kKvHeads};
  }
  // The last group alone, which 64 decoded tokens complete.
  PackPlanesBatch PackLastGroup() const {
    PackPlanesBatch w = Pack();
    w.from = last_group_.get();
    w.groups_max = 1;
    return w;
  }
  PackPlanesBatch Pack() const {
    PackPlanesBatch w;
    w.keys = KeyRows(Pages(0));
    w.values = w.keys;
    w.values.offset = kKvHeads * kHead;
    w.planes = Planes(0);
    w.from = zeros();
    w.to = sealed_ends();
    w.batch = batch_;
    w.groups_max = groups();
    w.layers = layers_;
    w.row_layer_stride = kLayerBytes;
    w.upper_layer_stride = kKvHeads * kFormat.upper_bytes();
    w.lower_layer_stride = kKvHeads * kFormat.lower_bytes();
    return w;
  }

 private:
  void FillPages(const std::vector<BF16>& block) {
    const int64_t bytes = int64_t{pages_each_} * batch_ * layers_ * kLayerBytes;
    memory_ = DeviceArray<std::byte>(static_cast<size_t>(bytes));
    const auto size = static_cast<int64_t>(block.size() * 2);
    for (int64_t at = 0; at < bytes; at += size) {
      Check(cudaMemcpy(memory_.get() + at, block.data(),
                       static_cast<size_t>(std::min(size, bytes - at)), cudaMemcpyHostToDevice),
            "fill");
    }
    page_table_ = Table(memory_.address(), layers_ * kLayerBytes);
  }
  // Places of pages, or of groups of all layers, in random order.
  DeviceArray<uint64_t> Table(uint64_t base, int64_t bytes) const {
    std::vector<uint64_t> at;
    for (int i = 0; i < pages_each_ * batch_; ++i) {
      at.push_back(base + static_cast<uint64_t>(i) * static_cast<uint64_t>(bytes));
    }
    std::mt19937 rng(std::random_device{}());
    std::shuffle(at.begin(), at.end(), rng);
    return DeviceArray<uint64_t>(at);
  }

  const int batch_, tokens_, layers_;
  int pages_each_ = 0;
  DeviceArray<std::byte> memory_, upper_, lower_;
  DeviceArray<uint64_t> page_table_, upper_table_, lower_table_;
  DeviceArray<int32_t> lengths_, zeros_, sealed_, last_group_, groups_;
};

struct Share {
  double fine = 0, strips = 0, fetched = 0;  // shares of tokens, of strips; over the rule's bytes
  int64_t bytes = 0;                         // the rule's, of a layer
};

// Both ways to attend a cache, by the same queries.
class Attention {
 public:
  explicit Attention(const Cache& cache) : cache_(cache) {
    const auto rows = static_cast<size_t>(cache.batch()) * kKvHeads * kGroup;
    q_ = DeviceArray<BF16>(rows * kDim);
    dense_out_ = DeviceArray<float>(rows * kDim);
    out_ = DeviceArray<float>(rows * kDim);
    raw_ = DeviceArray<float>(rows * (kDim + 2));
    counts_ = DeviceArray<int32_t>(Zeros<int32_t>(static_cast<size_t>(cache.batch())));
    workspace_ = DeviceArray<std::byte>(Zeros<std::byte>(
        static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(kGroup, kDim))));
    const size_t items = static_cast<size_t>(cache.batch()) * kKvHeads;
    fine_ = DeviceArray<uint8_t>(items * static_cast<size_t>(cache.tokens()));
    strips_ = DeviceArray<uint8_t>(fine_.size() / kStripTokens);
    fetched_ = DeviceArray<uint64_t>(items);
    MakeWorkspace();
    counters_ = DeviceArray<uint32_t>(Zeros<uint32_t>(items));
  }

  // The same for all sequences: [kKvHeads * kGroup][kDim], times `factor`.
  void SetQueries(const std::vector<float>& of_sequence, float factor = 1) {
    std::vector<BF16> q;
    for (size_t i = 0; i < q_.size(); ++i) {
      q.push_back(FromFloat<BF16>(factor * of_sequence[i % of_sequence.size()]));
    }
    q_.Write(q);
  }
  // The preset's limits, times `factor`.
  void SetLimits(double factor) {
    rule_.fine_above = 8 * factor;
    rule_.skip_below = 2 * factor;
  }
  void AttendInFull() { rule_ = {.sample = 16}, rule_.share = 1; }
  void AttendShare(double share) {
    rule_ = {.sample = 16};
    rule_.share = share;
    MakeWorkspace();
  }

  AttendRawBatch Dense(int layer) const {
    AttendRawBatch w;
    w.layer = cache_.Pages(layer);
    w.batch = cache_.batch();
    w.group = kGroup;
    w.tokens = cache_.lengths();
    w.q = q_.get();
    w.q_stride = kKvHeads * kGroup * kDim * 2;
    w.scale = 1 / std::sqrt(float{kDim});
    w.to = {dense_out_.get(), DType::kF32, nullptr};
    w.workspace = workspace_.get();
    return w;
  }
  // What is not sealed.
  AttendRawBatch Raw(int layer) const {
    AttendRawBatch w = Dense(layer);
    w.selection.unit_tokens = 1;
    w.selection.list_stride = 1;
    w.selection.units = cache_.zeros();
    w.selection.counts = counts_.get();
    w.selection.sink_end = cache_.zeros();
    w.selection.recent_begin = cache_.sealed_ends();
    w.to = {};
    w.partial = RawPartial();
    return w;
  }
  AttendPlanesBatch Planes(int layer, bool reports = false) const {
    AttendPlanesBatch w;
    w.planes = cache_.Planes(layer);
    w.rule = rule_;
    w.batch = cache_.batch();
    w.group = kGroup;
    w.tokens = cache_.lengths();
    w.groups = cache_.group_counts();
    w.q = q_.get();
    w.q_stride = kKvHeads * kGroup * kDim;
    w.scale = 1 / std::sqrt(float{kDim});
    w.ahead = true;
    w.with = RawPartial();
    w.to = {out_.get(), DType::kF32, nullptr};
    if (reports) w.report = {fine_.get(), strips_.get(), cache_.tokens(), fetched_.get()};
    w.counters = counters_.get();
    w.workspace = planes_workspace_.get();
    return w;
  }

  // Layer 0's, by these queries.
  Share FindShare() {
    fetched_.Write(Zeros<uint64_t>(fetched_.size()));
    Check(kvs_cuda_ops()->attend_raw(Raw(0), nullptr), "attend_raw");
    Check(kvs_cuda_ops()->attend_planes(Planes(0, true), nullptr), "attend_planes");
    const std::vector<uint8_t> fine = fine_.Read(), strips = strips_.Read();
    Share share;
    int64_t of_fine = 0, of_strips = 0;
    const size_t items = fetched_.size(), stride = static_cast<size_t>(cache_.tokens());
    const PlanesRows rows{.format = kFormat, .groups = cache_.groups()};
    for (size_t item = 0; item < items; ++item) {
      const uint8_t *f = &fine[item * stride], *s = &strips[item * stride / kStripTokens];
      of_fine += std::count(f, f + cache_.sealed(), 1);
      of_strips += std::count(s, s + cache_.sealed() / kStripTokens, 1);
      share.bytes += PlanesBytesRead(rows, f, s);
    }
    const auto all = static_cast<double>(items) * cache_.sealed();
    share.fine = static_cast<double>(of_fine) / all;
    share.strips = static_cast<double>(of_strips) / (all / kStripTokens);
    uint64_t fetched = 0;
    for (const uint64_t x : fetched_.Read()) fetched += x;
    share.fetched = static_cast<double>(fetched) / static_cast<double>(share.bytes);
    return share;
  }

  // |planes - dense| / |dense| of layer 0's outputs: a sanity check.
  double Difference() {
    Check(kvs_cuda_ops()->attend_raw(Dense(0), nullptr), "attend_raw");
    Check(kvs_cuda_ops()->attend_raw(Raw(0), nullptr), "attend_raw");
    Check(kvs_cuda_ops()->attend_planes(Planes(0), nullptr), "attend_planes");
    const std::vector<float> want = dense_out_.Read(), got = out_.Read();
    double off = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      off += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    return std::sqrt(off / norm);
  }

 private:
  // As much as the rule wants.
  void MakeWorkspace() {
    const AttendPlanesBatch w = Planes(0);
    planes_workspace_ = DeviceArray<std::byte>(
        static_cast<size_t>(kvs_cuda_ops()->attend_planes_workspace_bytes(w)));
  }
  Partials RawPartial() const {
    const size_t rows = raw_.size() / (kDim + 2);
    float* const o = raw_.get();
    return {o + rows * kDim, o + rows * (kDim + 1), o, 1};
  }

  const Cache& cache_;
  PlanesRule rule_{.fine_above = 8, .skip_below = 2, .sample = 16};
  DeviceArray<BF16> q_;
  DeviceArray<float> dense_out_, out_, raw_;
  DeviceArray<int32_t> counts_;
  DeviceArray<std::byte> workspace_, planes_workspace_;
  DeviceArray<uint8_t> fine_, strips_;
  DeviceArray<uint64_t> fetched_;
  DeviceArray<uint32_t> counters_;
};

// Halves [low, high], where more of a number makes less fine, until `share` of the tokens is.
template <typename Set>
double FactorFor(Attention& attention, double share, double low, double high, const Set& set) {
  for (int i = 0; i < 12; ++i) {
    const double middle = std::sqrt(low * high);
    set(middle);
    (attention.FindShare().fine > share ? low : high) = middle;
  }
  set(high);
  return high;
}

double MedianOf(std::vector<double> us) {
  std::ranges::sort(us);
  return us[us.size() / 2];
}

// One row: dense, the op alone, and the step, in turns.
void TimeRow(const Cache& cache, Attention& attention, const std::string& name, float factor,
             ordered_json* rows) {
  const CudaOps& ops = *kvs_cuda_ops();
  const int layers = cache.layers();
  CapturedGraph dense([&](Stream stream) {
    for (int i = 0; i < layers; ++i) {
      if (const int error = ops.attend_raw(attention.Dense(i), stream); error != 0) return error;
    }
    return 0;
  });
  const auto planes = [&](bool with_raw) {
    return [&attention, &ops, layers, with_raw](Stream stream) {
      for (int i = 0; i < layers; ++i) {
        int error = with_raw ? ops.attend_raw(attention.Raw(i), stream) : 0;
        if (error == 0) error = ops.attend_planes(attention.Planes(i), stream);
        if (error != 0) return error;
      }
      return 0;
    };
  };
  CapturedGraph op(planes(false)), step(planes(true));
  const Share share = attention.FindShare();
  const double difference = attention.Difference();
  std::vector<double> of_dense, of_op, of_step;
  for (int round = 0; round < kRounds; ++round) {
    const auto time = [&](CapturedGraph& graph) {
      return TimeReplays(std::vector<CapturedGraph*>{&graph}, layers, kReplays).median;
    };
    of_dense.push_back(time(dense));
    of_op.push_back(time(op));
    of_step.push_back(time(step));
  }
  const double d = MedianOf(of_dense), o = MedianOf(of_op), s = MedianOf(of_step);
  std::printf(
      "%-19s factor %5.2f fine %5.2f %% strips %5.1f %% fetched/rule %.3f | dense %8.1f us | op "
      "%8.1f us %.2fx %4.0f GB/s | step %8.1f us %.2fx | off dense %.3f\n",
      name.c_str(), factor, 100 * share.fine, 100 * share.strips, share.fetched, d, o, d / o,
      static_cast<double>(share.bytes) * share.fetched / o / 1e3, s, d / s, difference);
  std::fflush(stdout);
  rows->push_back({{"id", "planes/" + name},
                   {"value", o},
                   {"unit", "us"},
                   {"step", s},
                   {"fine", share.fine},
                   {"strips", share.strips},
                   {"fetched_over_rule", share.fetched},
                   {"off_dense", difference},
                   {"n", kRounds * kReplays},
                   {"layers", layers},
                   {"better", "smaller"},
                   {"ratio", d / o},
                   {"baseline", {{"name", "attend_raw over all rows"}, {"value", d}}}});
}

// Random normal keys, values and queries.
struct RandomKeys {
  std::vector<BF16> block;
  std::vector<float> queries;

  RandomKeys() {
    std::mt19937 rng(std::random_device{}());
    std::normal_distribution<float> normal;
    block.resize((size_t{61} << 20) / 2);
    for (BF16& x : block) x = FromFloat<BF16>(normal(rng));
    queries.resize(size_t{kKvHeads} * kGroup * kDim);
    for (float& x : queries) x = normal(rng);
  }
};

struct Size {
  std::string name;
  int batch, tokens, layers;
};

void RecordedRows(const Size& size, RecordedKeys& keys, ordered_json* rows) {
  Cache cache(size.batch, size.tokens, size.layers, keys.block());
  cache.SetLastKeys(keys.LastKeys(size.tokens));
  Check(kvs_cuda_ops()->pack_planes(cache.Pack(), nullptr), "pack_planes");
  Attention attention(cache);
  attention.SetQueries(keys.queries());
  TimeRow(cache, attention, size.name + ", recorded", 1, rows);
  const auto limits = [&](double factor) { attention.SetLimits(factor); };
  const double factor = FactorFor(attention, 0.05, 1.0 / 64, 64, limits);
  TimeRow(cache, attention, size.name + ", 5 %", factor, rows);
  attention.AttendShare(0.05);
  TimeRow(cache, attention, size.name + ", share 5 %", 1, rows);
}

void RandomRows(const Size& size, const RandomKeys& keys, ordered_json* rows) {
  Cache cache(size.batch, size.tokens, size.layers, keys.block);
  Check(kvs_cuda_ops()->pack_planes(cache.Pack(), nullptr), "pack_planes");
  Attention attention(cache);
  const auto factors = [&](double factor) {
    attention.SetQueries(keys.queries, static_cast<float>(factor));
  };
  const double factor = FactorFor(attention, 0.05, 1.5, 16, factors);
  TimeRow(cache, attention, size.name + ", control", factor, rows);
  attention.AttendInFull();
  TimeRow(cache, attention, size.name + ", in full", factor, rows);
}

void HostRows(const RandomKeys& keys, ordered_json* rows) {
  Cache cache(1, 131072, 4, keys.block);
  Check(kvs_cuda_ops()->pack_planes(cache.Pack(), nullptr), "pack_planes");
  Attention attention(cache);
  for (const auto& [what, share, limits] : {std::tuple{", 1 %", 0.01, 8.0}, {", 5 %", 0.05, 1.0}}) {
    attention.SetLimits(limits);
    const double factor = FactorFor(attention, share, 1.5, 16, [&](double tried) {
      attention.SetQueries(keys.queries, static_cast<float>(tried));
    });
    PlanesOnHost on_host(
        {[&](int layer) { return attention.Planes(layer, true); }, cache.layers(), cache.tokens(),
         cache.lower().address(), cache.lower().size(), cache.lower_table().Read()},
        static_cast<float>(factor));
    on_host.Time(std::string("host, 128K x 1") + what, rows);
  }
}

void PackRows(const RandomKeys& keys, ordered_json* rows) {
  Cache cache(1, 65536 + 1 * kPageTokens, 32, keys.block);
  const PackPlanesBatch work = cache.Pack();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->pack_planes(work, stream); });
  const double ms = TimeReplays(std::vector<CapturedGraph*>{&graph}, 1, kReplays).median / 1e3;
  const double bytes = static_cast<double>(cache.sealed()) * 32 * kKvHeads *
                       (2 * kRow + (kFormat.upper_bytes() + kFormat.lower_bytes()) / double{kUnit});
  std::printf("pack 64K x 32 layers: %.2f ms, %.0f GB/s\n", ms, bytes / ms / 1e6);
  rows->push_back({{"id", "planes/pack 64K x 32 layers"},
                   {"value", ms},
                   {"unit", "ms"},
                   {"gbps", bytes / ms / 1e6},
                   {"n", kReplays},
                   {"must", 10},
                   {"better", "smaller"}});
  const PackPlanesBatch last = cache.PackLastGroup();
  CapturedGraph one([&](Stream stream) { return kvs_cuda_ops()->pack_planes(last, stream); });
  const double us = TimeReplays(std::vector<CapturedGraph*>{&one}, 1, kReplays).median;
  std::printf("pack a group x 32 layers: %.1f us, %.4f us a token and layer\n", us,
              us / 32 / kUnit);
  rows->push_back({{"id", "planes/pack a group, a token and layer"},
                   {"value", us / 32 / kUnit},
                   {"unit", "us"},
                   {"n", kReplays},
                   {"must", 0.3},
                   {"better", "smaller"}});
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) {
  using namespace kvstrata::cuda;
  using kvstrata::bench::Option;
  if (kvs_cuda_ops()->device_count() == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible\n");
    return 77;
  }
  const std::string only = Option(argc, argv, "--only"), file = Option(argc, argv, "--json-out");
  const auto wants = [&](const char* name) { return std::string(name).starts_with(only); };
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  ordered_json out = {
      {"suite", "cuda-planes"},
      {"device", device.name},
      {"commit", Option(argc, argv, "--commit")},
      {"date", Option(argc, argv, "--date")},
      {"command", "planes_bench"},
      {"ceilings", ordered_json::object()},
      {"context",
       {{"notes",
         "a layer as replays of a graph; 32 query heads, 8 KV heads x 128, bf16; keys with "
         "recorded logits, control and in full: random; value: op attend_planes, step: with the "
         "raw "
         "rows; baseline: dense"}}},
      {"rows", ordered_json::array()}};
  ordered_json* const rows = &out["rows"];
  const RandomKeys random;
  const std::string recorded = Option(argc, argv, "--recorded");
  std::optional<RecordedKeys> keys;
  if (!recorded.empty()) keys.emplace(recorded, RecordedShape{kKvHeads, kGroup, kDim, kPageTokens});
  for (const Size& size : {Size{"128K x 1", 1, 131072, 4}, Size{"1M x 1", 1, 1048576, 1},
                           Size{"128K x 8", 8, 131072, 1}, Size{"32K x 20", 20, 32768, 1},
                           Size{"32K x 34", 34, 32768, 1}}) {
    if (!wants(size.name.c_str())) continue;
    if (keys) RecordedRows(size, *keys, rows);
    RandomRows(size, random, rows);
  }
  if (wants("host")) HostRows(random, rows);
  if (wants("pack")) PackRows(random, rows);
  if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
  return 0;
}
