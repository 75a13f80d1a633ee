// SPDX-License-Identifier: Apache-2.0
// SentenceKV's ops on the GPU against ref: queries kept of a prompt, importance, buckets with their
// means, and the tokens picked from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

// An ascending choice of `count` of [begin, end).
std::vector<int32_t> Choice(Rng& rng, int32_t begin, int32_t end, int32_t count) {
  std::vector<int32_t> all(static_cast<size_t>(end - begin)), chosen;
  std::iota(all.begin(), all.end(), begin);
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, rng);
  return chosen;
}

TEST(Observe, KeepsTheLastQueriesOfAPrompt) {
  Rng rng(TestSeed());
  constexpr int kBatch = 3, kLayers = 2, kCapacity = 8, kFloats = 4 * 64;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int new_tokens : {1, 5, 8, 19}) {
      std::vector<DeviceArray<float>> rings;
      std::vector<std::vector<float>> want(
          kBatch, std::vector<float>(size_t{kLayers} * kCapacity * kFloats, NAN));
      std::vector<SentenceTable> tables(kBatch), host_tables(kBatch);
      std::vector<int32_t> visible;
      for (size_t b = 0; b < kBatch; ++b) {
        rings.emplace_back(want[b].size());
        tables[b].observed = rings.back().get();
        host_tables[b].observed = want[b].data();
        const int32_t start = Below(rng, 100);
        for (int t = 1; t <= new_tokens; ++t) visible.push_back(start + t);
      }
      const auto q = RandomElements(rng, dtype, visible.size() * kFloats);
      const DeviceArray<SentenceTable> device_tables(tables);
      const DeviceArray<int32_t> device_visible(visible);
      const DeviceArray<std::byte> device_q(q);
      ObserveBatch w;
      w.tables = device_tables.get();
      w.layer = 1;
      w.capacity = kCapacity;
      w.visible = device_visible.get();
      w.q = device_q.get();
      w.q_dtype = dtype;
      w.batch = kBatch;
      w.new_tokens = new_tokens;
      w.query_floats = kFloats;
      Check(kvs_cuda_ops()->observe(w, nullptr), "observe");
      w.tables = host_tables.data();
      w.visible = visible.data();
      w.q = q.data();
      ObserveRef(w);
      for (size_t b = 0; b < kBatch; ++b) {
        const std::vector<float> got = rings[b].Read();
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_TRUE(got[i] == want[b][i] || (std::isnan(got[i]) && std::isnan(want[b][i])))
              << "sequence " << b << " float " << i;
        }
      }
    }
  }
}

TEST(Importance, SumsVotesAndTakesTheMaximumAround) {
  Rng rng(TestSeed());
  constexpr int kHeads = 3, kStride = 1024;
  for (const int pool : {1, 2, 7, 100}) {
    for (const auto& [tokens, begin] : {std::pair{1000, 0}, {257, 5}, {1, 0}, {40, 39}}) {
      SCOPED_TRACE("pool " + std::to_string(pool) + " tokens " + std::to_string(tokens));
      DeviceArray<float> sums(size_t{kHeads} * kStride), importance(size_t{kHeads} * kStride);
      std::vector<float> want_sums(sums.size()), want(sums.size(), NAN);
      ImportanceBatch w;
      w.kv_heads = kHeads;
      w.stride = kStride;
      w.tokens = tokens;
      w.begin = begin;
      w.pool = pool;
      for (const int items : {5, 3}) {
        std::vector<float> votes(static_cast<size_t>(items) * want.size());
        for (float& x : votes) x = std::exp(Normal(rng));
        const DeviceArray<float> device(votes);
        w.items = items;
        w.first = items == 5;
        w.last = items == 3;
        w.votes = device.get();
        w.sums = sums.get();
        w.importance = importance.get();
        Check(kvs_cuda_ops()->importance(w, nullptr), "importance");
        Check(cudaDeviceSynchronize(), "importance");
        w.votes = votes.data();
        w.sums = want_sums.data();
        w.importance = want.data();
        ImportanceRef(w);
      }
      const std::vector<float> got = importance.Read();
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(std::isnan(got[i]), std::isnan(want[i])) << i;
        if (std::isnan(want[i])) continue;
        ASSERT_NEAR(got[i], want[i], 1e-5 * want[i]) << i;
      }
    }
  }
}

// Tables of one sequence, poisoned.
class Tables {
 public:
  Tables(const Geometry& g, int32_t kept_stride, int32_t bucket_stride, int32_t whole_stride)
      : rows(static_cast<size_t>(g.layers * g.kv_heads)),
        queries(rows * 2 * static_cast<size_t>(QuerySumFloats(g.head_dim))),
        means(rows * static_cast<size_t>(bucket_stride * g.head_dim)),
        whole_means(rows * static_cast<size_t>(whole_stride * g.head_dim)),
        scores(static_cast<size_t>(g.kv_heads * (bucket_stride + whole_stride))),
        kept(rows * static_cast<size_t>(kept_stride)),
        firsts(rows * static_cast<size_t>(bucket_stride + 1)),
        counts(rows),
        whole(static_cast<size_t>(2 * whole_stride)) {
    queries.Write(std::vector<float>(queries.size()));
    table.queries = queries.get();
    table.kept = kept.get();
    table.firsts = firsts.get();
    table.counts = counts.get();
    table.means = means.get();
    table.whole = whole.get();
    table.whole_means = whole_means.get();
    table.scores = scores.get();
    table.kept_stride = kept_stride;
    table.bucket_stride = bucket_stride;
    table.whole_stride = whole_stride;
    table.rows = static_cast<int32_t>(rows);
  }

  size_t rows;
  DeviceArray<float> queries;
  DeviceArray<BF16> means, whole_means;
  DeviceArray<BucketScore> scores;
  DeviceArray<int32_t> kept, firsts, counts, whole;
  SentenceTable table;
};

// The same on the host, for refs.
struct HostTables {
  explicit HostTables(const Tables& t)
      : queries(t.queries.Read()),
        means(t.means.Read()),
        whole_means(t.whole_means.Read()),
        scores(t.scores.Read()),
        kept(t.kept.Read()),
        firsts(t.firsts.Read()),
        counts(t.counts.Read()),
        whole(t.whole.Read()),
        table(t.table) {
    table.queries = queries.data();
    table.kept = kept.data();
    table.firsts = firsts.data();
    table.counts = counts.data();
    table.means = means.data();
    table.whole = whole.data();
    table.whole_means = whole_means.data();
    table.scores = scores.data();
  }
  HostTables(HostTables&&) = default;  // arrays stay where they are

  std::vector<float> queries;
  std::vector<BF16> means, whole_means;
  std::vector<BucketScore> scores;
  std::vector<int32_t> kept, firsts, counts, whole;
  SentenceTable table;
};

// Means of fp32 and of double are one bf16 number apart at most.
void ExpectMeans(const std::vector<BF16>& got, const std::vector<BF16>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    const float x = ToFloat(got[i]), y = ToFloat(want[i]);
    ASSERT_EQ(std::isnan(x), std::isnan(y)) << i;  // poison
    if (std::isnan(y)) continue;
    ASSERT_NEAR(x, y, 1e-5 + std::abs(y) / 128) << i;
  }
}

class Buckets : public ::testing::TestWithParam<std::pair<DType, int>> {
 protected:
  void Make(Geometry g) {
    geometry_ = g;
    batch_ = std::make_unique<PagedBatch>(rng_, g, std::vector<int32_t>{kTokens}, kTokens);
    // The layer before the last has keys, too.
    for (int head = 0; head < g.kv_heads; ++head) {
      const PagedRows rows = Keys(0, head);
      for (int32_t t = 0; t < kTokens; ++t) {
        for (int c = 0; c < g.head_dim; ++c) {
          StoreFloat(rows.Row(t) + c * SizeOf(g.dtype), g.dtype, Normal(rng_));
        }
      }
    }
    batch_->Upload();
  }
  PagedRows Keys(int layer, int head) const {
    return KeysOf(batch_->PagesOf(0), batch_->layout, layer, head);
  }
  DeviceRows DeviceKeys() const {
    PagedLayer layer = batch_->DeviceLayer();
    layer.key_offset = batch_->layout.KeyOffset(0, 0, 0);
    return KeyRows(layer);
  }
  DeviceRows HostKeys() const {
    DeviceRows keys = DeviceKeys();
    keys.pages = batch_->HostLayer().pages;
    return keys;
  }

  static constexpr int32_t kTokens = 1500;
  Rng rng_{TestSeed()};
  Geometry geometry_;
  std::unique_ptr<PagedBatch> batch_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, Buckets,
                         ::testing::Values(std::pair{DType::kBF16, 64},
                                           std::pair{DType::kBF16, 128},
                                           std::pair{DType::kF16, 128},
                                           std::pair{DType::kBF16, 256}));

TEST_P(Buckets, OfAPromptAreItsKeptTokensBySentence) {
  const auto [dtype, dim] = GetParam();
  Make({.layers = 2, .query_heads = 6, .kv_heads = 3, .head_dim = dim, .dtype = dtype});
  for (const int32_t ranked : {0, 1, 300, 1400}) {
    for (const kvstrata::Run window : {kvstrata::Run{1468, kTokens}, {1505, kTokens}}) {
      SCOPED_TRACE(std::to_string(ranked) + " ranked, window from " + std::to_string(window.begin));
      constexpr int32_t kFirst = 5;
      std::vector<int32_t> ends = Choice(rng_, 1, kTokens, 60);
      ends.push_back(kTokens);
      const int32_t count = ranked + std::max(window.end - window.begin, 0);
      const int32_t buckets = std::min<int32_t>(count, static_cast<int32_t>(ends.size()));
      Tables t(geometry_, count, buckets, 1);
      const bool all = ranked == 1400;
      std::vector<int32_t> kept(t.rows * static_cast<size_t>(count), -7);
      for (size_t row = 0; row < t.rows && !all; ++row) {
        std::ranges::copy(
            Choice(rng_, kFirst, 1468, ranked),
            kept.begin() + static_cast<std::ptrdiff_t>(row * static_cast<size_t>(count)));
      }
      if (count > 0) t.kept.Write(kept);
      HostTables want(t);
      const DeviceArray<int32_t> device_ends(ends);
      PromptBucketsBatch w;
      w.keys = DeviceKeys();
      w.key_layer_stride = batch_->layout.layer_stride;
      w.layers = geometry_.layers;
      w.table = t.table;
      w.ranked = ranked;
      w.first = kFirst;
      w.all = all;
      w.window = window;
      w.ends = device_ends.get();
      w.sentences = static_cast<int32_t>(ends.size());
      Check(kvs_cuda_ops()->prompt_buckets(w, nullptr), "prompt_buckets");
      w.keys = HostKeys();
      w.table = want.table;
      w.ends = ends.data();
      PromptBucketsRef(w);
      EXPECT_EQ(t.kept.Read(), want.kept);
      EXPECT_EQ(t.firsts.Read(), want.firsts);
      EXPECT_EQ(t.counts.Read(), want.counts);
      ASSERT_NO_FATAL_FAILURE(ExpectMeans(t.means.Read(), want.means));
    }
  }
}

TEST_P(Buckets, OfWholeSentencesAreTheSameInAllRows) {
  const auto [dtype, dim] = GetParam();
  Make({.layers = 2, .query_heads = 6, .kv_heads = 3, .head_dim = dim, .dtype = dtype});
  Tables t(geometry_, 1, 1, 9);
  HostTables want(t);
  WholeBucketsBatch w;
  w.keys = DeviceKeys();
  w.key_layer_stride = batch_->layout.layer_stride;
  w.layers = geometry_.layers;
  w.table = t.table;
  w.first = 2;
  w.count = 3;
  const kvstrata::Run sentences[] = {{100, 101}, {101, 190}, {190, 1500}};
  std::ranges::copy(sentences, w.sentences);
  Check(kvs_cuda_ops()->whole_buckets(w, nullptr), "whole_buckets");
  w.keys = HostKeys();
  w.table = want.table;
  WholeBucketsRef(w);
  EXPECT_EQ(t.whole.Read(), want.whole);
  ASSERT_NO_FATAL_FAILURE(ExpectMeans(t.whole_means.Read(), want.whole_means));
}

// A batch whose buckets are drawn, and what is picked from them.
class PickedBuckets {
 public:
  PickedBuckets(Rng& rng, int head_dim, int32_t listed, int32_t whole, int32_t tau, DType q_dtype)
      : rng_(rng), listed_(listed), whole_(whole), tau_(tau), q_dtype_(q_dtype) {
    geometry_.head_dim = head_dim;
    std::vector<SentenceTable> tables;
    for (int b = 0; b < kBatch; ++b) {
      sequences_.push_back(std::make_unique<Tables>(geometry_, 8 * listed + 1, listed, whole + 3));
      Draw(*sequences_.back(), b);
      tables.push_back(sequences_.back()->table);
      mirrors_.emplace_back(*sequences_.back());
      host_tables_.push_back(mirrors_.back().table);
    }
    tables_ = DeviceArray<SentenceTable>(tables);
    tokens_ = DeviceArray<int32_t>(kBatch);
    from_ = DeviceArray<int32_t>(kBatch);
    recent_ = DeviceArray<int32_t>(kBatch);
    whole_counts_ = DeviceArray<int32_t>(std::vector<int32_t>(kBatch, whole));
    stride_ = std::max(tau, 1) + 3;
    units_ = DeviceArray<int32_t>(static_cast<size_t>(kBatch * kHeads * stride_));
    counts_ = DeviceArray<int32_t>(size_t{kBatch} * kHeads);
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(size_t{kBatch} * kHeads));
    q_ = DeviceArray<std::byte>(
        static_cast<size_t>(kBatch * geometry_.query_heads * head_dim * SizeOf(q_dtype)));
  }
  PickBucketsBatch Work() const {
    PickBucketsBatch w;
    w.tables = tables_.get();
    w.layer = kLayer;
    w.tokens = tokens_.get();
    w.queries_from = from_.get();
    w.whole = whole_counts_.get();
    w.recent_begin = recent_.get();
    w.q = q_.get();
    w.q_dtype = q_dtype_;
    w.batch = kBatch;
    w.kv_heads = kHeads;
    w.group = geometry_.group();
    w.head_dim = geometry_.head_dim;
    w.tau = tau_;
    w.units = units_.get();
    w.counts = counts_.get();
    w.list_stride = stride_;
    w.counters = counters_.get();
    return w;
  }
  // New queries of steps of `tokens`; 0 in `windows`: in full. A step of as many tokens as the one
  // before follows one that was given up.
  void Step(CapturedGraph& graph, const std::vector<int32_t>& tokens,
            const std::vector<int32_t>& from, const std::vector<int32_t>& windows) {
    const auto q = RandomElements(
        rng_, q_dtype_, static_cast<size_t>(kBatch * geometry_.query_heads * geometry_.head_dim));
    q_.Write(q);
    tokens_.Write(tokens);
    from_.Write(from);
    recent_.Write(windows);
    units_.Poison();
    counts_.Poison();
    graph.Replay();
    const std::vector<int32_t> whole(kBatch, whole_);
    std::vector<int32_t> units(units_.size(), -1), counts(counts_.size(), -1);
    PickBucketsBatch w = Work();
    w.tables = host_tables_.data();
    w.tokens = tokens.data();
    w.queries_from = from.data();
    w.whole = whole.data();
    w.recent_begin = windows.data();
    w.q = q.data();
    w.units = units.data();
    w.counts = counts.data();
    ScoreBucketsRef(w);
    for (int b = 0; b < kBatch; ++b) {
      const auto sequence = static_cast<size_t>(b);
      if (from[sequence] < 0 || windows[sequence] == 0) continue;
      ASSERT_NO_FATAL_FAILURE(TakeScores(sequence)) << "sequence " << b;
    }
    TakeBucketsRef(w);
    ASSERT_EQ(counts_.Read(), counts);
    const std::vector<int32_t> got = units_.Read();
    for (size_t list = 0; list < counts.size(); ++list) {
      const auto at = static_cast<std::ptrdiff_t>(list) * stride_;
      // And the poison behind it.
      ASSERT_TRUE(
          std::equal(got.begin() + at, got.begin() + at + counts[list] + 1, units.begin() + at))
          << "list " << list;
    }
  }
  // All means of the last sequence become equal.
  void Flatten() {
    Tables& t = *sequences_.back();
    HostTables& host = mirrors_.back();
    std::ranges::fill(host.means, FromFloat<BF16>(0.5f));
    std::ranges::fill(host.whole_means, FromFloat<BF16>(0.5f));
    t.means.Write(host.means);
    t.whole_means.Write(host.whole_means);
  }

  static constexpr int kBatch = 3, kHeads = 2, kLayer = 1;

 private:
  void Draw(Tables& t, int sequence) {
    std::vector<BF16> means(t.means.size()), whole_means(t.whole_means.size());
    for (BF16& x : means) x = FromFloat<BF16>(Normal(rng_));
    for (BF16& x : whole_means) x = FromFloat<BF16>(Normal(rng_));
    t.means.Write(means);
    t.whole_means.Write(whole_means);
    std::vector<int32_t> kept(t.kept.size(), -7), firsts(t.firsts.size(), -7), counts(t.rows);
    for (size_t row = 0; row < t.rows; ++row) {
      counts[row] = std::max(listed_ - Below(rng_, 5) - sequence, listed_ > 0 ? 1 : 0);
      int32_t position = 0, n = 0;
      for (int32_t i = 0; i < counts[row]; ++i) {
        firsts[row * static_cast<size_t>(listed_ + 1) + static_cast<size_t>(i)] = n;
        for (int32_t size = 1 + Below(rng_, 8); size > 0; --size) {
          kept[row * t.kept.size() / t.rows + static_cast<size_t>(n++)] = position;
          position += 1 + Below(rng_, 2);
        }
      }
      firsts[row * static_cast<size_t>(listed_ + 1) + static_cast<size_t>(counts[row])] = n;
    }
    t.kept.Write(kept);
    t.firsts.Write(firsts);
    t.counts.Write(counts);
    std::vector<int32_t> whole(t.whole.size(), -7);
    int32_t position = kWholeBegin;
    for (int32_t i = 0; i < whole_; ++i) {
      whole[static_cast<size_t>(2 * i)] = position;
      position += 1 + Below(rng_, 100);
      whole[static_cast<size_t>(2 * i + 1)] = position;
    }
    t.whole.Write(whole);
  }
  // Holds the device's scores to ref's, and has ref go on with them: near-ties choose alike.
  void TakeScores(size_t sequence) {
    HostTables& host = mirrors_[sequence];
    const std::vector<BucketScore> got = sequences_[sequence]->scores.Read();
    for (int h = 0; h < kHeads; ++h) {
      const int32_t listed = listed_ > 0 ? host.counts[size_t{kLayer} * kHeads + h] : 0;
      for (int32_t i = 0; i < listed + whole_; ++i) {
        const auto at = static_cast<size_t>(h * host.table.score_stride() + i);
        ASSERT_NEAR(got[at].score, host.scores[at].score, 1e-5 * geometry_.head_dim) << i;
        ASSERT_EQ(got[at].size, host.scores[at].size) << i;
        ASSERT_EQ(got[at].first, host.scores[at].first) << i;
        host.scores[at].score = got[at].score;
      }
    }
  }

  static constexpr int32_t kWholeBegin = 200000;
  Rng& rng_;
  Geometry geometry_{.layers = 2, .query_heads = 6, .kv_heads = kHeads, .head_dim = 64};
  int32_t listed_, whole_, tau_, stride_ = 0;
  DType q_dtype_;
  std::vector<std::unique_ptr<Tables>> sequences_;
  DeviceArray<SentenceTable> tables_;
  DeviceArray<int32_t> tokens_, from_, recent_, whole_counts_, units_, counts_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<std::byte> q_;
  std::vector<HostTables> mirrors_;
  std::vector<SentenceTable> host_tables_;  // the mirrors'
};

constexpr int32_t kBehindAll = 1 << 24;  // a window behind everything

TEST(PickBuckets, TakesTheBestBucketsUpToTau) {
  Rng rng(TestSeed());
  for (const auto& [dim, listed, whole, tau] : {std::tuple{128, 700, 60, 1024},
                                                {64, 1, 0, 40},
                                                {256, 0, 30, 300},
                                                {128, 300, 5, 0},
                                                {64, 30, 3, 5000},
                                                {128, 5000, 40, 1024},
                                                {128, 2500, 600, 9}}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      SCOPED_TRACE("dim " + std::to_string(dim) + ", " + std::to_string(listed) + " + " +
                   std::to_string(whole) + " buckets, tau " + std::to_string(tau));
      PickedBuckets picked(rng, dim, listed, whole, tau, dtype);
      const PickBucketsBatch w = picked.Work();
      CapturedGraph graph([&](cudaStream_t s) { return kvs_cuda_ops()->pick_buckets(w, s); });
      // Windows that cut a bucket, that cut none, that leave nothing.
      const std::vector<int32_t> windows = {kBehindAll, std::max(1, listed * 3), 200050};
      ASSERT_NO_FATAL_FAILURE(picked.Step(graph, {9, 90, 900}, {5, 80, 0}, windows));
      if (dtype != DType::kBF16) continue;
      picked.Flatten();
      ASSERT_NO_FATAL_FAILURE(
          picked.Step(graph, {10, 91, 907}, {5, 80, 0}, {kBehindAll, 1, kBehindAll}));
    }
  }
}

// A step that is given up, one that is attended in full, the end of a sentence, a sequence without
// buckets.
TEST(PickBuckets, AveragesTheQueriesOfTheSentence) {
  Rng rng(TestSeed());
  PickedBuckets picked(rng, 128, 200, 10, 100, DType::kBF16);
  const PickBucketsBatch w = picked.Work();
  CapturedGraph graph([&](cudaStream_t s) { return kvs_cuda_ops()->pick_buckets(w, s); });
  std::vector<int32_t> tokens = {100, 1000, 31}, from = {99, 999, 30};
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    std::vector<int32_t> windows = {kBehindAll, kBehindAll, i % 5 == 2 ? 0 : kBehindAll};
    if (i % 7 == 3) {
      ASSERT_NO_FATAL_FAILURE(picked.Step(graph, tokens, from, windows));
    }
    if (i % 9 == 8) from[1] = tokens[1] - 1;
    ASSERT_NO_FATAL_FAILURE(picked.Step(graph, tokens, from, windows));
    for (int32_t& t : tokens) t += 1 + (i % 4 == 1 ? 5 : 0);
  }
  // Without buckets nothing is picked, and no query is kept.
  ASSERT_NO_FATAL_FAILURE(picked.Step(graph, tokens, {-1, -1, -1}, {0, 0, 0}));
  for (int32_t& t : tokens) ++t;
  ASSERT_NO_FATAL_FAILURE(picked.Step(graph, tokens, from, {kBehindAll, kBehindAll, kBehindAll}));
}

// Small enough for racecheck (bench/cuda/run_gpu.sh).
TEST(PickBuckets, OfFewBuckets) {
  Rng rng(TestSeed());
  PickedBuckets picked(rng, 64, 30, 3, 40, DType::kBF16);
  const PickBucketsBatch w = picked.Work();
  CapturedGraph graph([&](cudaStream_t s) { return kvs_cuda_ops()->pick_buckets(w, s); });
  ASSERT_NO_FATAL_FAILURE(
      picked.Step(graph, {9, 90, 900}, {5, 80, 0}, {kBehindAll, 60, kBehindAll}));
}

TEST(PickBuckets, RefusesShapes) {
  PickBucketsBatch w;
  w.batch = w.kv_heads = w.group = 1;
  w.head_dim = 96;
  EXPECT_NE(kvs_cuda_ops()->pick_buckets(w, nullptr), 0);
  w.head_dim = 128;
  w.tau = 7;
  EXPECT_NE(kvs_cuda_ops()->pick_buckets(w, nullptr), 0);  // no room for the list
}

}  // namespace
}  // namespace kvstrata::cuda
