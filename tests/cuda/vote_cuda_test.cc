// SPDX-License-Identifier: Apache-2.0
// Votes on the GPU are those of ref within 5e-3: over tokens, summed over all heads, and over units
// by KV head; what is picked from them is TopKRef of the same votes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/score/score.h"
#include "kernels/ops/vote/vote.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Shape {
  int batch = 2, kv_heads = 2, group = 4, head_dim = 128, page = 16;
  DType dtype = DType::kBF16, q_dtype = DType::kBF16;
  bool per_head = false;  // one output per KV head
  int tokens_max = 5000;
  float q_size = 3.0f;  // logits of a few units, as real heads have
};

class VoteCase {
 public:
  VoteCase(const Shape& s, std::mt19937_64& rng)
      : shape_(s), geometry_{2, s.kv_heads * s.group, s.kv_heads, s.head_dim, s.page, s.dtype} {
    layout_ = PageLayout::Of(geometry_);
    const int pages = (s.tokens_max + s.page - 1) / s.page;
    pages_ = std::make_unique<ScatteredPages>(s.batch, pages, geometry_.page_bytes(), s.dtype, rng);
    q_.resize(int64_t{s.batch} * geometry_.query_heads * s.head_dim);
    for (float& x : q_) x = RoundedTo(s.q_dtype, s.q_size * Normal(rng));
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s.q_dtype));
    tokens_ = DeviceArray<int32_t>(s.batch);
    PagedLayer layer;
    layer.pages = pages_->addresses();
    layer.page_stride = pages_->stride();
    layer.page_tokens = s.page;
    layer.kv_heads = s.kv_heads;
    layer.head_dim = s.head_dim;
    layer.dtype = s.dtype;
    layer.key_offset = layout_.KeyOffset(kLayer, 0, 0);
    layer.head_stride = layout_.head_stride;
    layer.slot_stride = layout_.slot_stride;
    work_.rows = KeyRows(layer);
    work_.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    work_.rule = {1, 37, 301, 100, 0};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = s.batch;
    work_.query_heads = geometry_.query_heads;
    work_.output_rows = s.per_head ? s.kv_heads : 1;
    work_.candidate_stride = (s.tokens_max + 7) / 8 * 8;
    votes_ = DeviceArray<float>(int64_t{s.batch} * work_.output_rows * work_.candidate_stride);
    work_.votes = votes_.get();
    scratch_ = DeviceArray<std::byte>(kvs_cuda_ops()->vote_scratch_bytes(work_));
    work_.scratch = scratch_.get();
  }

  const VoteBatch& work() const { return work_; }
  std::vector<float> Votes() const { return votes_.Read(); }
  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    votes_.Poison();
    scratch_.Poison();
  }

  // The worst relative error of a row.
  double ExpectReference() const {
    const std::vector<float> got = votes_.Read();
    const int heads = geometry_.query_heads / work_.output_rows;
    double worst = 0;
    for (int b = 0; b < shape_.batch; ++b) {
      Candidates c = CandidatesOf(work_.rule, tokens_now_[b]);
      if (c.full) c.last = c.first;
      for (int row = 0; row < work_.output_rows; ++row) {
        const float* own = &got[(int64_t{b} * work_.output_rows + row) * work_.candidate_stride];
        const std::vector<float> want = Reference(b, row * heads, heads, c);
        worst = std::max(worst, RelativeError({own, want.size()}, want));
        for (int i = c.count(); i < work_.candidate_stride; ++i) EXPECT_TRUE(std::isnan(own[i]));
      }
    }
    EXPECT_LE(worst, 5e-3);
    return worst;
  }

 private:
  static constexpr int kLayer = 1;

  std::vector<float> Reference(int b, int first_head, int heads, const Candidates& c) const {
    const int32_t n = c.count();
    std::vector<float> logits(int64_t{heads} * n), max(heads), sum(heads), votes(n);
    for (int i = 0; i < heads; ++i) {
      ScoreTokensWork w;
      w.rows = KeysOf(pages_->TableOf(b), layout_, kLayer, (first_head + i) / shape_.group);
      w.run = {c.first, c.last};
      w.q = &q_[(int64_t{b} * geometry_.query_heads + first_head + i) * shape_.head_dim];
      w.scale = work_.scale;
      w.out = logits.data() + int64_t{i} * n;
      w.out_query = n;
      ScoreTokensRef(&w, 1, InlineExecutor());
    }
    VoteRef({logits.data(), n, heads, n, max.data(), sum.data(), votes.data()}, InlineExecutor());
    return votes;
  }

  Shape shape_;
  Geometry geometry_;
  PageLayout layout_;
  std::unique_ptr<ScatteredPages> pages_;
  std::vector<float> q_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<std::byte> device_q_, scratch_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<float> votes_;
  VoteBatch work_;
};

void RunVote(const VoteBatch& work) {
  ASSERT_EQ(kvs_cuda_ops()->vote(work, nullptr), 0);
  Check(cudaDeviceSynchronize(), "vote");
}

TEST(VoteCuda, IsTheReferenceForEveryShape) {
  std::mt19937_64 rng(TestSeed());
  const DType types[] = {DType::kBF16, DType::kF16};
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  double worst = 0;
  for (const int head_dim : {64, 128, 256}) {
    for (const int group : {1, 3, 4, 7, 8}) {
      for (const bool per_head : {false, true}) {
        const Shape s{
            2,        2,   group, head_dim, 16 << rng() % 3, types[rng() % 2], q_types[rng() % 3],
            per_head, 3000};
        SCOPED_TRACE("dim " + std::to_string(head_dim) + ", group " + std::to_string(group));
        VoteCase vote(s, rng);
        vote.SetTokens({static_cast<int32_t>(rng() % 3000), 3000});
        RunVote(vote.work());
        worst = std::max(worst, vote.ExpectReference());
      }
    }
  }
  std::printf("worst relative error %.2g\n", worst);
}

TEST(VoteCuda, HoldsForPeakedHeads) {
  std::mt19937_64 rng(TestSeed());
  Shape s;
  s.q_size = 40.0f;  // logits up to 150: nearly one token a head
  VoteCase vote(s, rng);
  vote.SetTokens({5000, 4000});
  RunVote(vote.work());
  vote.ExpectReference();
}

TEST(VoteCuda, TakesRaggedBatchesAndManyHeads) {
  std::mt19937_64 rng(TestSeed());
  Shape s;
  s.batch = 32;
  s.kv_heads = 8;
  s.group = 8;
  s.head_dim = 64;
  s.tokens_max = 1200;
  VoteCase vote(s, rng);
  std::vector<int32_t> tokens(32);
  for (int32_t& n : tokens) n = static_cast<int32_t>(rng() % 1201);
  vote.SetTokens(tokens);
  RunVote(vote.work());
  vote.ExpectReference();
}

TEST(VoteCuda, OneGraphServesGrowingSequencesAndRepeats) {
  std::mt19937_64 rng(TestSeed());
  VoteCase vote({}, rng);
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->vote(vote.work(), stream); });
  for (const int32_t tokens : {1, 438, 439, 2000, 4999}) {
    SCOPED_TRACE(tokens);
    vote.SetTokens({tokens, 5000 - tokens});
    graph.Replay();
    vote.ExpectReference();
  }
  const std::vector<float> first = vote.Votes();
  graph.Replay();
  const std::vector<float> again = vote.Votes();
  EXPECT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
}

class VoteCudaUnits : public testing::TestWithParam<IndexLayout::Kind> {
 protected:
  bool deviation() const { return GetParam() == IndexLayout::Kind::kDeviation; }

  // A minimum is not above its maximum, and no variance is negative.
  void Mend(const IndexLayout& index, int32_t units, ScatteredPages* blocks) const {
    for (int u = 0; u < units; ++u) {
      for (int h = 0; h < index.kv_heads; ++h) {
        auto* low = reinterpret_cast<BF16*>(index.Row(blocks->TableOf(0), 0, 1, 0, h, u));
        auto* high = reinterpret_cast<BF16*>(index.Row(blocks->TableOf(0), 0, 1, 1, h, u));
        for (int c = 0; c < index.head_dim; ++c) {
          if (deviation()) {
            high[c] = FromFloat<BF16>(std::abs(ToFloat(high[c])));
          } else if (ToFloat(low[c]) > ToFloat(high[c])) {
            std::swap(low[c], high[c]);
          }
        }
      }
    }
    blocks->Upload();
  }
};

// Units of an index by Quest's bound, or by mean and deviation; a softmax of each head, one output
// per KV head.
TEST_P(VoteCudaUnits, AreVotedForByTheirScores) {
  std::mt19937_64 rng(TestSeed());
  const Geometry g{2, 8, 2, 128, 16, DType::kBF16};
  const IndexLayout index = MakeIndexLayout(GetParam(), g, &g.page_tokens, 1);
  const int tokens = 20000;
  ScatteredPages blocks(1, index.BlocksFor(tokens), index.block_bytes, g.dtype, rng);
  Mend(index, index.UnitsFor(0, tokens), &blocks);
  std::vector<float> q(int64_t{8} * 128);
  for (float& x : q) x = RoundedTo(DType::kBF16, Normal(rng));
  const DeviceArray<std::byte> device_q(Encoded(q, DType::kBF16));
  const DeviceArray<int32_t> n(std::vector<int32_t>{tokens});
  VoteBatch w;
  w.rows = IndexRows(blocks.addresses(), blocks.stride(), index, 0, 1, 0);
  w.fields = 2;
  w.deviation = deviation();
  w.field_stride = index.RowOffset(0, 1, 1, 0, 0) - w.rows.offset;
  w.scale = 1.0f / std::sqrt(128.0f);
  w.rule = {16, 20, 100, 64, 0};
  w.tokens = n.get();
  w.q = device_q.get();
  w.batch = 1;
  w.query_heads = 8;
  w.output_rows = 2;
  w.candidate_stride = 1280;
  const DeviceArray<float> votes(2 * 1280);
  w.votes = votes.get();
  const DeviceArray<std::byte> scratch(kvs_cuda_ops()->vote_scratch_bytes(w));
  w.scratch = scratch.get();
  RunVote(w);

  const std::vector<float> got = votes.Read();
  const Candidates c = CandidatesOf(w.rule, tokens);
  for (int h = 0; h < 2; ++h) {
    std::vector<float> logits(4 * static_cast<size_t>(c.count())), max(4), sum(4), want(c.count());
    for (int i = 0; i < 4; ++i) {
      ScoreWork s;
      s.kind = deviation() ? ScoreWork::Kind::kDeviation : ScoreWork::Kind::kMinMax;
      s.q = &q[(int64_t{h} * 4 + i) * 128];
      s.rows = index.Rows(blocks.TableOf(0), 0, 1, 0, h);
      s.second_offset = w.field_stride;
      s.units = {c.first, c.last};
      s.out = &logits[static_cast<size_t>(i) * c.count()];
      ScoreRef(&s, 1, InlineExecutor());
    }
    for (float& x : logits) x *= w.scale;
    VoteRef({logits.data(), c.count(), 4, c.count(), max.data(), sum.data(), want.data()},
            InlineExecutor());
    EXPECT_LE(RelativeError({&got[int64_t{h} * 1280], want.size()}, want), 5e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, VoteCudaUnits,
                         testing::Values(IndexLayout::Kind::kMinMax,
                                         IndexLayout::Kind::kDeviation));

TEST(VoteCuda, RefusesWhatItDoesNotTake) {
  std::mt19937_64 rng(TestSeed());
  VoteCase vote({}, rng);
  VoteBatch work = vote.work();
  work.rows.head_dim = 96;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = vote.work();
  work.output_rows = 3;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
