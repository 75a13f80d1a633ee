// SPDX-License-Identifier: Apache-2.0
// Refs of SentenceKV's ops (observe, importance, buckets, pick_buckets) by hand and against what
// the CPU's selector does.
#include <numeric>

#include "kernels/plans/sentencekv/ops/buckets/buckets.h"
#include "kernels/plans/sentencekv/ops/importance/importance.h"
#include "kernels/plans/sentencekv/ops/observe/observe.h"
#include "kernels/plans/sentencekv/ops/pick_buckets/pick_buckets.h"
#include "kernels/select/max_pool.h"
#include "kernels/select/ranking.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

TEST(ObserveRef, KeepsTheLastAtTheirPlaces) {
  // Positions 5, 6, 7 with room for two, in layer 1 of 2; queries of one float.
  const float q[] = {50, 60, 70};
  const int32_t visible[] = {6, 7, 8};
  std::vector<float> ring(4, -1);
  SentenceTable table;
  table.observed = ring.data();
  ObserveBatch w;
  w.tables = &table;
  w.layer = 1;
  w.capacity = 2;
  w.visible = visible;
  w.q = q;
  w.q_dtype = DType::kF32;
  w.batch = 1;
  w.new_tokens = 3;
  w.query_floats = 1;
  ObserveRef(w);
  EXPECT_EQ(ring, (std::vector<float>{-1, -1, 60, 70}));
}

TEST(ImportanceRef, PoolsTheSumsOfAllItems) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (const int pool : {1, 2, 5, 40}) {
    constexpr int kTokens = 60, kStride = 64, kBegin = 3;
    std::vector<float> votes(4 * kStride), sums(kStride), got(kStride, kNaN), scratch;
    for (float& x : votes) x = std::abs(random.Normal());
    std::vector<float> want(kTokens);
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t i = 0; i < 4; ++i) want[t] += votes[i * kStride + t];
    }
    MaxPool(pool, want.data(), kTokens, &scratch);
    ImportanceBatch w;
    w.kv_heads = 1;
    w.stride = kStride;
    w.tokens = kTokens;
    w.pool = pool;
    w.begin = kBegin;
    w.sums = sums.data();
    w.importance = got.data();
    for (const int items : {3, 1}) {
      w.votes = items == 3 ? votes.data() : votes.data() + 3 * kStride;
      w.items = items;
      w.first = items == 3;
      w.last = items == 1;
      ImportanceRef(w);
    }
    for (size_t t = kBegin; t < kTokens; ++t) EXPECT_NEAR(got[t - kBegin], want[t], 1e-5) << t;
    EXPECT_TRUE(std::isnan(got[kTokens - kBegin]));
  }
}

// Keys of one layer and head, token t all t + 1, in pages of four.
class RampKeys {
 public:
  RampKeys() {
    for (int t = 0; t < kTokens; ++t) {
      keys_.insert(keys_.end(), kDim, FromFloat<BF16>(static_cast<float>(t + 1)));
    }
    for (int page = 0; page < kTokens / 4; ++page) {
      pages_.push_back(reinterpret_cast<uint64_t>(keys_.data() + page * 4 * kDim));
    }
  }
  DeviceRows Rows() const {
    return {pages_.data(), kTokens / 4, 4, 1, kDim, DType::kBF16, 0, 0, kDim * 2};
  }
  static constexpr int kTokens = 32, kDim = 8;

 private:
  std::vector<BF16> keys_;
  std::vector<uint64_t> pages_;
};

TEST(BucketsRef, OfAPromptByHand) {
  const RampKeys keys;
  std::vector<int32_t> kept = {2, 3, 9, -1, -1}, firsts(4, -1), counts = {-1};
  std::vector<BF16> means(3 * RampKeys::kDim);
  const int32_t ends[] = {4, 12, 31, 32};
  PromptBucketsBatch w;
  w.keys = keys.Rows();
  w.layers = 1;
  w.table.kept = kept.data();
  w.table.firsts = firsts.data();
  w.table.counts = counts.data();
  w.table.means = means.data();
  w.table.kept_stride = 5;
  w.table.bucket_stride = 3;
  w.ranked = 3;
  w.window = {10, 12};
  w.ends = ends;
  w.sentences = 4;
  PromptBucketsRef(w);
  EXPECT_EQ(kept, (std::vector<int32_t>{2, 3, 9, 10, 11}));
  EXPECT_EQ(firsts, (std::vector<int32_t>{0, 2, 5, -1}));
  EXPECT_EQ(counts[0], 2);
  EXPECT_EQ(ToFloat(means[0]), 3.5f);
  EXPECT_EQ(ToFloat(means[RampKeys::kDim]), 11.0f);
}

TEST(BucketsRef, OfWholeSentencesByHand) {
  const RampKeys keys;
  std::vector<int32_t> whole(4, -1);
  std::vector<BF16> means(2 * RampKeys::kDim);
  WholeBucketsBatch w;
  w.keys = keys.Rows();
  w.layers = 1;
  w.table.whole = whole.data();
  w.table.whole_means = means.data();
  w.first = 1;
  w.count = 1;
  w.sentences[0] = {3, 8};
  WholeBucketsRef(w);
  EXPECT_EQ(whole, (std::vector<int32_t>{-1, -1, 3, 8}));
  EXPECT_EQ(ToFloat(means[RampKeys::kDim]), 6.0f);
}

// One list: buckets of the prompt {0, 2}, {5, 6, 7}, and whole ones [10, 14) and [20, 22).
class PickedTokens {
 public:
  PickedTokens() {
    for (const float x : {1.0f, 3.0f}) means_.insert(means_.end(), kDim, FromFloat<BF16>(x));
    for (const float x : {2.0f, -1.0f}) {
      whole_means_.insert(whole_means_.end(), kDim, FromFloat<BF16>(x));
    }
    table_.queries = queries_.data();
    table_.kept = kept_;
    table_.firsts = firsts_;
    table_.counts = &listed_;
    table_.means = means_.data();
    table_.whole = whole_;
    table_.whole_means = whole_means_.data();
    table_.scores = scores_;
    table_.kept_stride = 5;
    table_.bucket_stride = table_.whole_stride = 2;
    table_.rows = 1;
  }
  // A step of `tokens` whose query is all q; queries of steps of more than `from` tokens count.
  std::vector<int32_t> Pick(int32_t tokens, float q, int32_t window, int32_t tau,
                            int32_t from = 0) {
    const std::vector<float> query(kDim, q);
    const int32_t whole = 2;
    std::vector<int32_t> units(20, -1);
    int32_t count = -1;
    PickBucketsBatch w;
    w.tables = &table_;
    w.tokens = &tokens;
    w.queries_from = &from;
    w.whole = &whole;
    w.recent_begin = &window;
    w.q = query.data();
    w.q_dtype = DType::kF32;
    w.batch = w.kv_heads = w.group = 1;
    w.head_dim = kDim;
    w.tau = tau;
    w.units = units.data();
    w.counts = &count;
    w.list_stride = 20;
    ScoreBucketsRef(w);
    TakeBucketsRef(w);
    units.resize(static_cast<size_t>(count));
    return units;
  }
  float score(int bucket) const { return scores_[bucket].score; }

 private:
  static constexpr int kDim = 4;
  std::vector<float> queries_ = std::vector<float>(2 * static_cast<size_t>(QuerySumFloats(kDim)));
  int32_t kept_[5] = {0, 2, 5, 6, 7}, firsts_[3] = {0, 2, 5}, listed_ = 2;
  int32_t whole_[4] = {10, 14, 20, 22};
  std::vector<BF16> means_, whole_means_;
  BucketScore scores_[4];
  SentenceTable table_;
};

using Tokens = std::vector<int32_t>;

TEST(PickBucketsRef, TakesTheBestAndCutsTheLast) {
  PickedTokens picked;
  EXPECT_EQ(picked.Pick(9, 1, 100, 5), (Tokens{5, 6, 7, 10, 11}));
  EXPECT_EQ(picked.score(1), 12.0f);
  // Below the window alone: of bucket 1 its first token, of the whole ones none.
  EXPECT_EQ(picked.Pick(10, 1, 6, 5), (Tokens{0, 2, 5}));
  EXPECT_EQ(picked.Pick(11, 1, 100, 0), Tokens());
  EXPECT_EQ(picked.Pick(12, 1, 0, 5), Tokens());                    // in full
  EXPECT_EQ(picked.Pick(13, 1, 100, 5, -1), Tokens());              // no buckets yet
  EXPECT_EQ(picked.Pick(14, -9, 100, 3, 13), (Tokens{0, 20, 21}));  // worst first
}

TEST(PickBucketsRef, AveragesTheQueriesThatCount) {
  PickedTokens picked;
  picked.Pick(9, 1, 100, 5);
  picked.Pick(10, 3, 100, 5);
  EXPECT_EQ(picked.score(0), 8.0f);  // (1 + 3) / 2, four channels of 1
  picked.Pick(10, 7, 100, 5);        // the step before was given up
  EXPECT_EQ(picked.score(0), 16.0f);
  picked.Pick(12, 0, 0, 5);  // a query counts where all is attended, too
  picked.Pick(13, 6, 100, 5);
  EXPECT_EQ(picked.score(0), 14.0f);  // (1 + 7 + 0 + 6) / 4
  picked.Pick(20, 7, 100, 5, 13);     // another sentence
  EXPECT_EQ(picked.score(0), 28.0f);
}

}  // namespace
}  // namespace kvstrata::cuda
