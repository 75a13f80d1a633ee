// Votes by quantised keys are those of ref within 5e-3: logits of op score_bits, then op vote.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/vote/vote.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/quantised_blocks.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Shape {
  int batch = 2, kv_heads = 2, group = 4;
  QuantisedGroup format{128, 2, 64};
  DType q_dtype = DType::kBF16;
  int sinks = 37, recent = 301;
  bool per_head = true;
  bool shares = false;  // with `always`
  int tokens_max = 5000;
  float q_size = 2.0f;  // logits of a few units, as real heads have
};

class VoteBitsCase {
 public:
  VoteBitsCase(const Shape& s, Rng& rng)
      : shape_(s),
        data_(Geometry{2, s.kv_heads * s.group, s.kv_heads, s.format.dim, 16, DType::kBF16},
              s.format, s.batch, s.tokens_max, rng),
        tokens_(static_cast<size_t>(s.batch)) {
    for (int b = 0; b < s.batch; ++b) data_.Quantise(b, {0, s.tokens_max / s.format.tokens});
    data_.blocks().Upload();
    q_.resize(static_cast<size_t>(s.batch * s.kv_heads * s.group * s.format.dim));
    for (float& x : q_) x = RoundedTo(s.q_dtype, s.q_size * Normal(rng));
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s.q_dtype));
    work_.groups = data_.Groups();
    work_.scale = 1.0f / std::sqrt(static_cast<float>(s.format.dim));
    work_.rule = {1, s.sinks, s.recent, 100, 0};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = s.batch;
    work_.query_heads = s.kv_heads * s.group;
    work_.output_rows = s.per_head ? s.kv_heads : 1;
    work_.candidate_stride = (s.tokens_max + 7) / 8 * 8;
    votes_ = DeviceArray<float>(static_cast<size_t>(s.batch * work_.output_rows) *
                                static_cast<size_t>(work_.candidate_stride));
    work_.votes = votes_.get();
    scratch_ =
        DeviceArray<std::byte>(static_cast<size_t>(kvs_cuda_ops()->vote_scratch_bytes(work_)));
    work_.scratch = scratch_.get();
    if (s.shares) DrawAlways(rng);
  }

  VoteBatch& work() { return work_; }
  std::vector<float> Votes() const { return votes_.Read(); }
  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    votes_.Poison();
    scratch_.Poison();
  }
  void Run() {
    ASSERT_EQ(kvs_cuda_ops()->vote(work_, nullptr), 0);
    Check(cudaDeviceSynchronize(), "vote");
  }

  // The worst relative error of a row; beyond the candidates nothing is written.
  double ExpectReference() const {
    const std::vector<float> got = votes_.Read();
    double worst = 0;
    for (int b = 0; b < shape_.batch; ++b) {
      Candidates c = CandidatesOf(work_.rule, tokens_now_[static_cast<size_t>(b)]);
      if (c.full) c.last = c.first;
      const auto n = static_cast<size_t>(c.count());
      for (int row = 0; row < work_.output_rows; ++row) {
        const float* own = &got[static_cast<size_t>(b * work_.output_rows + row) *
                                static_cast<size_t>(work_.candidate_stride)];
        const std::vector<float> want = Reference(b, row, c);
        worst = std::max(worst, RelativeError({own, n}, want));
        for (auto i = n; i < static_cast<size_t>(work_.candidate_stride); ++i) {
          EXPECT_TRUE(std::isnan(own[i])) << i;
        }
      }
    }
    EXPECT_LE(worst, 5e-3);
    return worst;
  }

 private:
  // The votes of a row's heads for the candidates.
  std::vector<float> Reference(int b, int row, const Candidates& c) const {
    const int32_t n = c.count(), heads = work_.query_heads / work_.output_rows;
    const auto count = static_cast<size_t>(n);
    std::vector<float> logits(static_cast<size_t>(heads) * count), max(static_cast<size_t>(heads)),
        sum(max.size()), votes(count);
    for (int i = 0; i < heads; i += shape_.group) {
      const int first = row * heads + i;
      const ScoreBitsWork w{
          data_.HostRows(b, first / shape_.group),
          {c.first, c.last},
          &q_[static_cast<size_t>((b * work_.query_heads + first) * shape_.format.dim)],
          shape_.group,
          work_.scale,
          logits.data() + static_cast<size_t>(i) * count,
          n};
      ScoreBitsRef(&w, 1, InlineExecutor());
    }
    VoteWork w{logits.data(), n, heads, n, max.data(), sum.data(), votes.data()};
    const auto own = static_cast<size_t>(b * work_.query_heads + row * heads);
    if (shape_.shares) {
      w.always = &always_logits_[own];
      w.always_n = 1;
      w.noise = &noise_[own];
    }
    VoteRef(w, InlineExecutor());
    return votes;
  }
  // One row that is always attended, as far above the others as sinks are, and noise.
  void DrawAlways(Rng& rng) {
    std::vector<float> always;
    for (int i = 0; i < shape_.batch * work_.query_heads; ++i) {
      always_logits_.push_back(8 + 3 * Normal(rng));
      noise_.push_back(std::abs(Normal(rng)));
      const float log2 = always_logits_.back() * 1.4426950408889634f;
      always.insert(always.end(), {log2, 1.0f, std::exp(-noise_.back() / 2)});
    }
    device_always_ = DeviceArray<float>(always);
    work_.always = device_always_.get();
  }

  Shape shape_;
  QuantisedBlocks data_;
  std::vector<float> q_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<std::byte> device_q_, scratch_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<float> votes_, device_always_;
  std::vector<float> always_logits_, noise_;  // by query head
  VoteBatch work_;
};

// Groups of whole blocks of op vote, of half a block, and of one and a half.
TEST(VoteBitsCuda, IsTheReferenceForEveryShape) {
  Rng rng(TestSeed());
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  double worst = 0;
  for (const int dim : {64, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      for (const int group : {1, 3, 4, 7, 8}) {
        Shape s;
        s.group = group;
        s.format = {dim, bits, std::vector{32, 64, 96, 128, 224, 256}[Below(rng, 6)]};
        s.q_dtype = q_types[Below(rng, 3)];
        s.sinks = std::vector{0, 4, 37, 100, 250}[Below(rng, 5)];
        s.recent = s.format.tokens + Below(rng, 70);
        s.per_head = Below(rng, 4) > 0;
        s.tokens_max = 3000;
        SCOPED_TRACE("dim " + std::to_string(dim) + " bits " + std::to_string(bits) + " group " +
                     std::to_string(group) + " unit " + std::to_string(s.format.tokens) +
                     " sinks " + std::to_string(s.sinks));
        VoteBitsCase vote(s, rng);
        vote.work().ahead = Below(rng, 2) == 0;
        vote.SetTokens({Below(rng, 3000), 2990 + Below(rng, 11)});
        ASSERT_NO_FATAL_FAILURE(vote.Run());
        worst = std::max(worst, vote.ExpectReference());
      }
    }
  }
  std::printf("worst relative error %.2g\n", worst);
}

TEST(VoteBitsCuda, MakesSharesOfAllAttention) {
  Rng rng(TestSeed());
  for (const int group : {1, 4, 8}) {
    Shape s;
    s.group = group;
    s.shares = true;
    VoteBitsCase vote(s, rng);
    vote.SetTokens({4999, 400 + Below(rng, 4000)});
    ASSERT_NO_FATAL_FAILURE(vote.Run());
    vote.ExpectReference();
  }
}

// Candidates that end at each place of a block, the last group sealed by the token before.
TEST(VoteBitsCuda, TakesEveryLength) {
  Rng rng(TestSeed());
  for (const int unit : {32, 64, 96, 128}) {
    Shape s;
    s.format.tokens = unit;
    s.sinks = 4;
    s.recent = unit;
    s.tokens_max = 1024;
    VoteBitsCase vote(s, rng);
    for (int tokens = 700; tokens < 700 + 2 * unit; tokens += 5) {
      SCOPED_TRACE(std::to_string(unit) + ", " + std::to_string(tokens));
      vote.SetTokens({tokens, tokens + 3});
      ASSERT_NO_FATAL_FAILURE(vote.Run());
      vote.ExpectReference();
    }
  }
}

TEST(VoteBitsCuda, TakesRaggedBatchesAndManyHeads) {
  Rng rng(TestSeed());
  for (const int group : {4, 8}) {
    Shape s;
    s.batch = 32;
    s.kv_heads = 8;
    s.group = group;
    s.format.dim = 64;
    s.tokens_max = 1200;
    VoteBitsCase vote(s, rng);
    std::vector<int32_t> tokens(32);
    for (int32_t& n : tokens) n = Below(rng, 1201);
    vote.SetTokens(tokens);
    ASSERT_NO_FATAL_FAILURE(vote.Run());
    vote.ExpectReference();
  }
}

// Many blocks a warp, and candidates that begin inside a block.
TEST(VoteBitsCuda, TakesLongSequences) {
  Rng rng(TestSeed());
  Shape s;
  s.batch = 1;
  s.kv_heads = 1;
  s.tokens_max = 200000;
  VoteBitsCase vote(s, rng);
  vote.SetTokens({199999});
  ASSERT_NO_FATAL_FAILURE(vote.Run());
  vote.ExpectReference();
}

TEST(VoteBitsCuda, OneGraphServesGrowingSequencesAndRepeats) {
  Rng rng(TestSeed());
  VoteBitsCase vote({}, rng);
  const VoteBatch work = vote.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->vote(work, stream); });
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

TEST(VoteBitsCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  VoteBitsCase vote({}, rng);
  const VoteBatch valid = vote.work();
  VoteBatch work = valid;
  work.groups.format.tokens = 48;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.rule.recent_tokens = 63;  // a candidate may be in the group that is not sealed
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.rule.unit_tokens = 16;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.query_heads = 18;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
