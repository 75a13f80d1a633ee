// SPDX-License-Identifier: Apache-2.0
// Selection on the GPU: what it costs a layer of Llama-3.1-8B's shape (32 query heads, 8 KV heads,
// dim 128, bf16) to choose what it attends. Graphs of several calls over different data, as a step
// has them; medians of replays, divided by the calls.
//
//   selection_bench [--json-out FILE] [--baseline FILE] [--only PREFIX] [--replays N]
// --baseline: what topk_baseline.py printed in the same run, lines of `id microseconds`.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/replay_timing.h"
#include "bench/results.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

constexpr int kKvHeads = 8, kGroup = 4, kQueryHeads = kKvHeads * kGroup, kDim = 128;
constexpr double kReadTbps = 3.10;  // what a reading kernel reaches on the H100

struct Options {
  std::string only;
  int replays = 100;
  std::map<std::string, double> baseline;  // microseconds by row
};

struct Row {
  std::string id;
  bench::Timing us;
  double bytes = 0;      // that the call reads and writes at least; 0: latency is what counts
  double target_us = 0;  // 0: none
  double fraction = 0;   // part of kReadTbps that it should reach; 0: none
};

class Suite {
 public:
  explicit Suite(Options options) : options_(std::move(options)) {}

  bool Wants(const std::string& id) const { return id.starts_with(options_.only); }

  // call(i, stream) enqueues call i of `calls`.
  void Measure(Row row, int calls, const std::function<int(int, Stream)>& call) {
    CapturedGraph graph([&](Stream stream) {
      for (int i = 0; i < calls; ++i) {
        if (const int error = call(i, stream); error != 0) return error;
      }
      return 0;
    });
    row.us = TimeReplays<CapturedGraph>({&graph}, calls, options_.replays);
    Print(row);
    rows_.push_back(row);
  }

  bench::Json Rows() const;

 private:
  double BaselineOf(const std::string& id) const {
    const auto found = options_.baseline.find(id);
    return found == options_.baseline.end() ? 0 : found->second;
  }

  void Print(const Row& row) const {
    std::printf("%-28s %9.2f us  (p10 %.2f, p90 %.2f)", row.id.c_str(), row.us.median, row.us.p10,
                row.us.p90);
    if (row.bytes > 0) {
      std::printf("  %.2f TB/s, %.0f %%", row.bytes / row.us.median * 1e-6,
                  100 * row.bytes / row.us.median * 1e-6 / kReadTbps);
    }
    if (const double base = BaselineOf(row.id); base > 0) {
      std::printf("  torch %.1f us, x%.1f", base, base / row.us.median);
    }
    if (row.target_us > 0) {
      std::printf("  target %.0f us %s", row.target_us,
                  row.us.median <= row.target_us ? "met" : "MISSED");
    }
    std::printf("\n");
  }

  Options options_;
  std::vector<Row> rows_;
};

bench::Json Suite::Rows() const {
  bench::Json rows = bench::Json::array();
  for (const Row& row : rows_) {
    bench::Json& out = rows.emplace_back(bench::RowOf(row.id, row.us));
    const double torch = BaselineOf(row.id), floor = row.bytes / kReadTbps * 1e-6;
    if (row.bytes > 0) out["tbps"] = row.bytes / row.us.median * 1e-6;
    if (torch > 0) {
      out["baseline"] = {{"name", "torch"}, {"value", torch}};
      out["ratio"] = torch / row.us.median;
      if (row.target_us > 0) out["must"] = torch / row.target_us;
    } else if (row.bytes > 0) {
      out["baseline"] = {{"name", "its bytes at 3.10 TB/s"}, {"value", floor}};
      out["ratio"] = floor / row.us.median;
      if (row.fraction > 0) out["must"] = row.fraction;
    } else if (row.target_us > 0) {
      out["must"] = row.target_us, out["better"] = "smaller";
    }
  }
  return rows;
}

std::string Length(int64_t tokens) {
  return tokens % (1 << 20) == 0 ? std::to_string(tokens >> 20) + "M"
                                 : std::to_string(tokens >> 10) + "K";
}

// Random bf16 in [-1, 1): one block of it, copied through the array.
void FillRandom(DeviceArray<std::byte>& array) {
  std::mt19937 rng(7);
  std::vector<uint16_t> block(8 << 20);
  for (uint16_t& x : block) {
    x = FromFloat<BF16>(static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-31f).bits;
  }
  for (size_t at = 0; at < array.size(); at += block.size() * 2) {
    Check(cudaMemcpy(array.get() + at, block.data(), std::min(block.size() * 2, array.size() - at),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
}

// Pages in random order; `sets` tables over different ones.
struct Pages {
  Pages(int sets, int per_set, int64_t bytes)
      : count(per_set), arena(static_cast<size_t>(int64_t{sets} * per_set * bytes)) {
    FillRandom(arena);
    std::vector<uint64_t> table(int64_t{sets} * per_set);
    for (size_t i = 0; i < table.size(); ++i) table[i] = arena.address() + i * bytes;
    std::mt19937 rng(11);
    for (int s = 0; s < sets; ++s) {
      std::shuffle(table.begin() + int64_t{s} * per_set, table.begin() + int64_t{s + 1} * per_set,
                   rng);
    }
    addresses = DeviceArray<uint64_t>(table);
  }
  const uint64_t* Table(int set) const { return addresses.get() + int64_t{set} * count; }

  int count;
  DeviceArray<std::byte> arena;
  DeviceArray<uint64_t> addresses;
};

DeviceArray<std::byte> Queries() {
  DeviceArray<std::byte> q(int64_t{kQueryHeads} * kDim * 2);
  FillRandom(q);
  return q;
}

// Where a pick writes, and its scratch.
struct Picked {
  Picked(PickBatch* w, int batch, int groups, int take)
      : units(int64_t{batch} * groups * take), counts(batch * groups), sink(batch), recent(batch) {
    w->batch = batch;
    w->groups = groups;
    w->units = units.get();
    w->counts = counts.get();
    w->sink_end = sink.get();
    w->recent_begin = recent.get();
    w->list_stride = take;
    scratch = DeviceArray<std::byte>(
        std::vector<std::byte>(static_cast<size_t>(kvs_cuda_ops()->pick_scratch_bytes(*w))));
    w->scratch = scratch.get();
  }
  DeviceArray<int32_t> units, counts, sink, recent;
  DeviceArray<std::byte> scratch;
};

// kBounds: as Quest's are, close together and far from 0.
enum class Scores { kNormal, kVotes, kEqual, kBounds };

float Draw(Scores kind, std::mt19937_64& rng) {
  static std::normal_distribution<float> normal;
  if (kind == Scores::kEqual) return 0.25f;
  if (kind == Scores::kBounds) return 50 + 3 * normal(rng);
  return kind == Scores::kVotes ? std::exp(3 * normal(rng) - 15) : normal(rng);
}

// Top-k alone, over `lists` of n scores, which the op before has left in L2.
void BenchPick(Suite& suite, int batch, int groups, int n, int take, double target, int ctas = 0,
               Scores kind = Scores::kNormal, PickExchange exchange = PickExchange::kByShape) {
  const int lists = batch * groups;
  std::string id = "pick/" + std::to_string(take) + "of" + Length(n);
  if (lists > 1) id += "x" + std::to_string(lists);
  if (ctas > 0) id += ctas == 1 ? "/cta" : "/" + std::to_string(ctas) + "ctas";
  if (exchange == PickExchange::kCluster) id += "/cluster";
  if (exchange == PickExchange::kGlobalMemory) id += "/global";
  if (kind != Scores::kNormal) {
    id += kind == Scores::kVotes ? "/votes" : kind == Scores::kEqual ? "/equal" : "/bounds";
  }
  if (!suite.Wants(id)) return;
  constexpr int kSets = 4, kCalls = 20;
  std::mt19937_64 rng(3);
  std::vector<float> values(int64_t{kSets} * lists * n);
  for (float& x : values) x = Draw(kind, rng);
  const DeviceArray<float> scores(values);
  const DeviceArray<int32_t> tokens(std::vector<int32_t>(batch, n));
  PickBatch w;
  w.score_stride = n;
  w.batch = batch;
  w.groups = groups;
  w.rule = {1, 0, 0, take, 0};
  w.tokens = tokens.get();
  w.ctas_per_list = ctas;
  w.exchange = exchange;
  const Picked picked(&w, batch, groups, take);
  suite.Measure({id, {}, 0, target}, kCalls, [&](int i, Stream stream) {
    w.scores = scores.get() + int64_t{i % kSets} * lists * n;
    return kvs_cuda_ops()->pick(w, stream);
  });
}

// A cluster a list against what there was before.
void BenchWaysToPick(Suite& suite) {
  const auto bench = [&suite](int groups, int n, int take, PickExchange exchange, int ctas = 0) {
    BenchPick(suite, 1, groups, n, take, 0, ctas, Scores::kNormal, exchange);
  };
  for (const PickExchange exchange : {PickExchange::kCluster, PickExchange::kGlobalMemory}) {
    bench(1, 1 << 15, 2048, exchange);
    bench(1, 1 << 17, 2048, exchange);
    bench(8, 1 << 16, 128, exchange);
  }
  bench(8, 8192, 128, PickExchange::kCluster);
  bench(8, 8192, 128, PickExchange::kByShape, 1);
  bench(8, 16384, 512, PickExchange::kCluster);
  bench(8, 16384, 512, PickExchange::kByShape, 1);
}

// `scored`: the row of what `score` enqueues; `id`: of the same with the pick behind it.
void BenchScored(Suite& suite, const Row& scored, const std::string& id, int calls,
                 const std::function<int(int, Stream)>& score, const PickBatch& pick) {
  if (suite.Wants(scored.id)) suite.Measure(scored, calls, score);
  if (!suite.Wants(id)) return;
  suite.Measure({id, {}, scored.bytes}, calls, [&](int i, Stream stream) {
    const int error = score(i, stream);
    return error != 0 ? error : kvs_cuda_ops()->pick(pick, stream);
  });
}

// Quest: units of 16 tokens scored by their bounds, then the best 128 of each KV head.
void BenchQuest(Suite& suite, int n) {
  const std::string score_id = "score/quest/" + Length(n), id = "quest/" + Length(n);
  if (!suite.Wants(score_id) && !suite.Wants(id)) return;
  const Geometry g{1, kQueryHeads, kKvHeads, kDim, 16, DType::kBF16};
  const IndexLayout index = MakeIndexLayout(IndexLayout::Kind::kMinMax, g, &g.page_tokens, 1);
  const int blocks = index.BlocksFor(n);
  const double bytes = double{2} * n / 16 * kKvHeads * kDim * 2;
  const int sets = std::max(2, static_cast<int>(150e6 / bytes) + 1), calls = std::max(sets, 8);
  const Pages pages(sets, blocks, index.block_bytes);
  const DeviceArray<std::byte> q = Queries();
  const DeviceArray<int32_t> tokens(std::vector<int32_t>{n});
  const DeviceArray<float> scores(int64_t{kKvHeads} * n / 16);
  ScoreBatch w;
  w.fields = 2;
  w.field_stride = index.RowOffset(0, 0, 1, 0, 0) - index.RowOffset(0, 0, 0, 0, 0);
  w.rule = {16, 0, 1, 128, 0};
  w.tokens = tokens.get();
  w.q = q.get();
  w.batch = 1;
  w.query_heads = kQueryHeads;
  w.scores = scores.get();
  w.unit_stride = n / 16;
  PickBatch p;
  p.scores = scores.get();
  p.score_stride = n / 16;
  p.rule = w.rule;
  p.tokens = tokens.get();
  const Picked picked(&p, 1, kKvHeads, 128);
  const auto score = [&](int i, Stream stream) {
    w.rows = IndexRows(pages.Table(i % sets), blocks, index, 0, 0, 0);
    return kvs_cuda_ops()->score(w, stream);
  };
  BenchScored(suite, {score_id, {}, bytes}, id, calls, score, p);
}

PagedLayer KeysOnly(const Pages& pages, int set, int page_tokens) {
  PagedLayer layer;
  layer.pages = pages.Table(set);
  layer.page_stride = pages.count;
  layer.page_tokens = page_tokens;
  layer.kv_heads = kKvHeads;
  layer.head_dim = kDim;
  layer.slot_stride = int64_t{kDim} * 2;
  layer.head_stride = layer.slot_stride * page_tokens;
  return layer;
}

// TokenSelect: the votes of all tokens, then the best 2048.
void BenchVote(Suite& suite, int n, int page = 16) {
  const std::string what = Length(n) + (page == 16 ? "" : "/pages" + std::to_string(page));
  const std::string vote_id = "vote/" + what, id = "tokenselect/" + what;
  if (!suite.Wants(vote_id) && !suite.Wants(id)) return;
  const double bytes = double{2048} * n;
  const int sets = std::max(2, static_cast<int>(200e6 / bytes) + 1), calls = std::max(sets, 4);
  // Values lie between the keys of two heads' pages, as in the store.
  const Pages pages(sets, n / page, int64_t{2} * kKvHeads * page * kDim * 2);
  const DeviceArray<std::byte> q = Queries();
  const DeviceArray<int32_t> tokens(std::vector<int32_t>{n});
  const DeviceArray<float> votes(n);
  VoteBatch w;
  w.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  w.rule = {1, 128, 512, 2048, 0};
  w.tokens = tokens.get();
  w.q = q.get();
  w.batch = 1;
  w.query_heads = kQueryHeads;
  w.votes = votes.get();
  w.candidate_stride = n;
  w.rows = KeyRows(KeysOnly(pages, 0, page));
  const DeviceArray<std::byte> scratch(static_cast<size_t>(kvs_cuda_ops()->vote_scratch_bytes(w)));
  w.scratch = scratch.get();
  PickBatch p;
  p.scores = votes.get();
  p.score_stride = n;
  p.rule = w.rule;
  p.tokens = tokens.get();
  const Picked picked(&p, 1, 1, 2048);
  const auto vote = [&](int i, Stream stream) {
    w.rows = KeyRows(KeysOnly(pages, i % sets, page));
    return kvs_cuda_ops()->vote(w, stream);
  };
  BenchScored(suite, {vote_id, {}, bytes, 0, 0.85}, id, calls, vote, p);
}

// Prefill: the summaries of all units of n tokens at once.
void BenchSummarize(Suite& suite, int n, IndexLayout::Kind kind, int unit) {
  const bool min_max = kind == IndexLayout::Kind::kMinMax;
  const std::string id = std::string("summarize/") + (min_max ? "minmax" : "mean") + "/" +
                         std::to_string(unit) + "/" + Length(n);
  if (!suite.Wants(id)) return;
  const Geometry g{1, kQueryHeads, kKvHeads, kDim, 16, DType::kBF16};
  const IndexLayout index = MakeIndexLayout(kind, g, &unit, 1);
  const double bytes = double{2048} * n * (1 + (min_max ? 2.0 : 1.0) / unit);
  const Pages keys(2, n / 16, int64_t{2} * kKvHeads * 16 * kDim * 2);
  const Pages blocks(2, index.BlocksFor(n), index.block_bytes);
  const DeviceArray<int32_t> from(std::vector<int32_t>{0}), to(std::vector<int32_t>{n});
  SummarizeBatch w;
  w.kind = min_max ? SummarizeBatch::Kind::kMinMax : SummarizeBatch::Kind::kMean;
  if (min_max) w.field_stride = index.RowOffset(0, 0, 1, 0, 0) - index.RowOffset(0, 0, 0, 0, 0);
  w.unit_rows = unit;
  w.from = from.get();
  w.to = to.get();
  w.batch = 1;
  w.units_max = n / unit;
  suite.Measure({id, {}, bytes}, 4, [&](int i, Stream stream) {
    w.source = KeyRows(KeysOnly(keys, i % 2, 16));
    w.summary = IndexRows(blocks.Table(i % 2), blocks.count, index, 0, 0, 0);
    return kvs_cuda_ops()->summarize(w, stream);
  });
}

Options Parse(int argc, char** argv) {
  Options options{.only = bench::Option(argc, argv, "--only")};
  const std::string replays = bench::Option(argc, argv, "--replays");
  if (!replays.empty()) options.replays = std::stoi(replays);
  std::ifstream in(bench::Option(argc, argv, "--baseline"));
  std::string id;
  for (double us = 0; in >> id >> us;) options.baseline[id] = us;
  return options;
}

int Main(int argc, char** argv) {
  const std::string gpu = NameOfGpu();
  Suite suite(Parse(argc, argv));
  for (const int n : {1 << 15, 1 << 17, 1 << 19, 1 << 20}) {
    BenchPick(suite, 1, 1, n, 2048, n == 1 << 17 ? 16 : n == 1 << 20 ? 28 : 0);
  }
  BenchPick(suite, 1, 1, 1 << 20, 2048, 0, 0, Scores::kVotes);
  BenchPick(suite, 1, 1, 1 << 20, 2048, 0, 0, Scores::kEqual);
  BenchPick(suite, 1, 8, 2048, 128, 5);
  BenchPick(suite, 1, 8, 8192, 128, 0);
  BenchPick(suite, 1, 8, 65536, 128, 0);
  for (const int n : {2048, 8192, 16384, 65536}) {
    BenchPick(suite, 1, 8, n, 128, 0, 0, Scores::kBounds);
  }
  BenchPick(suite, 8, 8, 8192, 128, 0);
  for (const int ctas : {16, 32, 64, 128}) BenchPick(suite, 1, 1, 1 << 17, 2048, 0, ctas);
  BenchWaysToPick(suite);
  for (const int n : {1 << 15, 1 << 17, 1 << 20}) BenchQuest(suite, n);
  for (const int n : {1 << 15, 1 << 17, 1 << 19, 1 << 20}) BenchVote(suite, n);
  BenchVote(suite, 1 << 20, 64);
  BenchSummarize(suite, 1 << 17, IndexLayout::Kind::kMinMax, 16);
  BenchSummarize(suite, 1 << 17, IndexLayout::Kind::kMean, 32);
  bench::WriteResults(
      argc, argv, "cuda-selection", gpu,
      "build/bin/selection_bench --json-out bench/results/cuda-selection-h100.json",
      {{"notes",
        "one layer: 32 query heads, 8 KV heads, dim 128, bf16, pages of 16 scattered; replays of "
        "graphs of several calls, per call; baseline torch.topk the same way"}},
      suite.Rows(), {{"read_tbps", kReadTbps}});
  return 0;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
