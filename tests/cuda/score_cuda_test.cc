// SPDX-License-Identifier: Apache-2.0
// Scores of units on the GPU are those of ref within 5e-3, for the candidates and nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/score/score.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Shape {
  int batch = 1, kv_heads = 2, group = 4, head_dim = 128, page = 16;
  DType dtype = DType::kBF16, q_dtype = DType::kBF16;
  IndexLayout::Kind kind = IndexLayout::Kind::kMinMax;
  int tokens_max = 6000;
};

class ScoreCase {
 public:
  ScoreCase(const Shape& s, std::mt19937_64& rng)
      : shape_(s), geometry_{2, s.kv_heads * s.group, s.kv_heads, s.head_dim, s.page, s.dtype} {
    index_ = MakeIndexLayout(s.kind, geometry_, &geometry_.page_tokens, 1, {}, s.dtype);
    const int blocks = index_.BlocksFor(s.tokens_max);
    blocks_ = std::make_unique<ScatteredPages>(s.batch, blocks, index_.block_bytes, s.dtype, rng);
    if (s.kind != IndexLayout::Kind::kMean) MendFields();
    q_.resize(int64_t{s.batch} * geometry_.query_heads * s.head_dim);
    for (float& x : q_) x = RoundedTo(s.q_dtype, Normal(rng));
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s.q_dtype));
    tokens_ = DeviceArray<int32_t>(s.batch);
    work_.rows = IndexRows(blocks_->addresses(), blocks_->stride(), index_, 0, kLayer, 0);
    work_.fields = index_.fields;
    work_.deviation = s.kind == IndexLayout::Kind::kDeviation;
    if (work_.fields == 2) {
      work_.field_stride = index_.RowOffset(0, kLayer, 1, 0, 0) - work_.rows.offset;
    }
    work_.rule = {s.page, 5, 77, 8, 0};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = s.batch;
    work_.query_heads = geometry_.query_heads;
    work_.unit_stride = (s.tokens_max / s.page + 7) / 8 * 8;
    scores_ = DeviceArray<float>(int64_t{s.batch} * s.kv_heads * work_.unit_stride);
    work_.scores = scores_.get();
  }

  const ScoreBatch& work() const { return work_; }
  DeviceArray<int32_t>& tokens() { return tokens_; }
  std::vector<float> Scores() const { return scores_.Read(); }
  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    scores_.Poison();
  }

  void ExpectReference() const {
    const std::vector<float> got = scores_.Read();
    double worst = 0;
    for (int b = 0; b < shape_.batch; ++b) {
      Candidates c = CandidatesOf(work_.rule, tokens_now_[b]);
      if (c.full) c.last = c.first;
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const float* row = &got[(int64_t{b} * shape_.kv_heads + h) * work_.unit_stride];
        const std::vector<float> want = Reference(b, h, {c.first, c.last});
        worst = std::max(worst, RelativeError({row, want.size()}, want));
        for (int i = c.count(); i < work_.unit_stride; ++i) ASSERT_TRUE(std::isnan(row[i]));
      }
    }
    EXPECT_LE(worst, shape_.q_dtype == DType::kF32 ? 1e-4 : 2e-5);
  }

 private:
  static constexpr int kLayer = 1;

  // A minimum is not above its maximum, and no variance is negative.
  void MendFields() {
    for (int b = 0; b < shape_.batch; ++b) {
      for (int u = 0; u < blocks_->stride() * index_.levels[0].units_per_block; ++u) {
        for (int h = 0; h < shape_.kv_heads; ++h) MendUnit(blocks_->TableOf(b), h, u);
      }
    }
    blocks_->Upload();
  }
  void MendUnit(std::byte* const* table, int head, int unit) {
    std::byte* low = index_.Row(table, 0, kLayer, 0, head, unit);
    std::byte* high = index_.Row(table, 0, kLayer, 1, head, unit);
    for (int64_t c = 0; c < shape_.head_dim; ++c) {
      const auto value = [&](const std::byte* row) {
        return shape_.dtype == DType::kF16 ? ToFloat(reinterpret_cast<const F16*>(row)[c])
                                           : ToFloat(reinterpret_cast<const BF16*>(row)[c]);
      };
      const float a = value(low), b = value(high);
      if (shape_.kind == IndexLayout::Kind::kDeviation) {
        StoreFloat(high + c * 2, shape_.dtype, std::abs(b));
        continue;
      }
      StoreFloat(low + c * 2, shape_.dtype, std::min(a, b));
      StoreFloat(high + c * 2, shape_.dtype, std::max(a, b));
    }
  }

  std::vector<float> Reference(int b, int h, kvstrata::Run units) const {
    std::vector<float> out(units.end - units.begin);
    ScoreWork w;
    w.kind = shape_.kind == IndexLayout::Kind::kMinMax      ? ScoreWork::Kind::kMinMax
             : shape_.kind == IndexLayout::Kind::kDeviation ? ScoreWork::Kind::kDeviation
                                                            : ScoreWork::Kind::kDot;
    w.q = &q_[(int64_t{b} * geometry_.query_heads + h * shape_.group) * shape_.head_dim];
    w.queries = shape_.group;
    w.rows = index_.Rows(blocks_->TableOf(b), 0, kLayer, 0, h);
    w.second_offset = work_.field_stride;
    w.units = units;
    w.out = out.data();
    ScoreRef(&w, 1, InlineExecutor());
    return out;
  }

  Shape shape_;
  Geometry geometry_;
  IndexLayout index_;
  std::unique_ptr<ScatteredPages> blocks_;
  std::vector<float> q_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<std::byte> device_q_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<float> scores_;
  ScoreBatch work_;
};

void RunScore(const ScoreBatch& work) {
  ASSERT_EQ(kvs_cuda_ops()->score(work, nullptr), 0);
  Check(cudaDeviceSynchronize(), "score");
}

TEST(ScoreCuda, IsTheReferenceForEveryShape) {
  std::mt19937_64 rng(TestSeed());
  const DType types[] = {DType::kBF16, DType::kF16};
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (const int head_dim : {64, 128, 256}) {
    for (const int group : {1, 3, 4, 7, 8}) {
      for (const auto kind :
           {IndexLayout::Kind::kMinMax, IndexLayout::Kind::kDeviation, IndexLayout::Kind::kMean}) {
        const Shape s{
            3, 2, group, head_dim, 16 << rng() % 3, types[rng() % 2], q_types[rng() % 3], kind};
        SCOPED_TRACE("dim " + std::to_string(head_dim) + ", group " + std::to_string(group) +
                     ", page " + std::to_string(s.page));
        ScoreCase score(s, rng);
        score.SetTokens({static_cast<int32_t>(rng() % 6000), 6000, 40});  // the last: no candidate
        RunScore(score.work());
        score.ExpectReference();
      }
    }
  }
}

TEST(ScoreCuda, TakesRaggedBatches) {
  std::mt19937_64 rng(TestSeed());
  Shape s;
  s.batch = 64;
  s.tokens_max = 1500;
  ScoreCase score(s, rng);
  std::vector<int32_t> tokens(64);
  for (int32_t& n : tokens) n = static_cast<int32_t>(rng() % 1501);
  score.SetTokens(tokens);
  RunScore(score.work());
  score.ExpectReference();
}

TEST(ScoreCuda, OneGraphServesGrowingSequencesAndRepeats) {
  std::mt19937_64 rng(TestSeed());
  ScoreCase score({}, rng);
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->score(score.work(), stream); });
  for (const int32_t tokens : {1, 300, 1000, 1001, 5999}) {
    SCOPED_TRACE(tokens);
    score.SetTokens({tokens});
    graph.Replay();
    score.ExpectReference();
  }
  const std::vector<float> first = score.Scores();
  graph.Replay();
  const std::vector<float> again = score.Scores();
  EXPECT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
}

// A copy, then the two kernels of a selection, in one graph: each sees what the one before wrote,
// though kernels may start before the last one has ended.
TEST(ScoreCuda, FeedsPickInOneGraph) {
  std::mt19937_64 rng(TestSeed());
  Shape s;
  s.batch = 3;
  ScoreCase score(s, rng);
  const int lists = s.batch * s.kv_heads, take = score.work().rule.take;
  const DeviceArray<int32_t> units(lists * take), counts(lists), sink(s.batch), recent(s.batch);
  PickBatch pick;
  pick.scores = score.work().scores;
  pick.score_stride = score.work().unit_stride;
  pick.batch = s.batch;
  pick.groups = s.kv_heads;
  pick.rule = score.work().rule;
  pick.tokens = score.work().tokens;
  pick.units = units.get();
  pick.counts = counts.get();
  pick.sink_end = sink.get();
  pick.recent_begin = recent.get();
  pick.list_stride = take;
  const DeviceArray<std::byte> scratch(
      std::vector<std::byte>(static_cast<size_t>(kvs_cuda_ops()->pick_scratch_bytes(pick))));
  pick.scratch = scratch.get();
  DeviceArray<int32_t> next(s.batch);
  CapturedGraph graph([&](Stream stream) -> int {
    Check(cudaMemcpyAsync(score.tokens().get(), next.get(), s.batch * sizeof(int32_t),
                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
          "cudaMemcpyAsync");
    const int error = kvs_cuda_ops()->score(score.work(), stream);
    return error != 0 ? error : kvs_cuda_ops()->pick(pick, stream);
  });
  for (int step = 0; step < 50; ++step) {
    std::vector<int32_t> tokens(s.batch);
    for (int32_t& n : tokens) n = static_cast<int32_t>(rng() % 6001);
    next.Write(tokens);
    graph.Replay();
    const std::vector<float> scores = score.Scores();
    const std::vector<int32_t> got = units.Read(), got_counts = counts.Read();
    for (int list = 0; list < lists; ++list) {
      const Candidates c = CandidatesOf(pick.rule, tokens[list / s.kv_heads]);
      ASSERT_EQ(got_counts[list], c.full ? 0 : take);
      if (c.full) continue;
      std::vector<int32_t> want(take);
      TopKRef({&scores[int64_t{list} * pick.score_stride], c.count(), take, want.data()});
      for (int i = 0; i < take; ++i) ASSERT_EQ(got[list * take + i], want[i] + c.first);
    }
  }
}

TEST(ScoreCuda, RefusesWhatItDoesNotTake) {
  std::mt19937_64 rng(TestSeed());
  ScoreCase score({}, rng);
  ScoreBatch work = score.work();
  work.rows.head_dim = 96;
  EXPECT_NE(kvs_cuda_ops()->score(work, nullptr), 0);
  work = score.work();
  work.query_heads = 9 * work.rows.kv_heads;
  EXPECT_NE(kvs_cuda_ops()->score(work, nullptr), 0);
  work = score.work();
  work.fields = 1, work.deviation = true;
  EXPECT_NE(kvs_cuda_ops()->score(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
