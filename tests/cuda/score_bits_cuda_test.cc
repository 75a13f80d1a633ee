// SPDX-License-Identifier: Apache-2.0
// Keys quantised on the GPU are those of ref bit for bit, and no other byte of a block is touched;
// logits by them are those of ref, for the candidates in sealed groups and nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/quantised_blocks.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int kBatch = 3, kTokensMax = 4500;

class QuantiseKeysCase {
 public:
  QuantiseKeysCase(DType dtype, QuantisedGroup format, Rng& rng)
      : format_(format),
        data_(Geometry{2, 6, 3, format.dim, 16, dtype}, format, kBatch, kTokensMax, rng),
        from_(kBatch),
        to_(kBatch) {
    AddSpecials(rng);
  }

  QuantiseKeysBatch Work() const {
    QuantiseKeysBatch w;
    w.keys = data_.Keys();
    w.groups = data_.Groups();
    w.from = from_.get();
    w.to = to_.get();
    w.batch = kBatch;
    w.groups_max = kTokensMax / format_.tokens;
    return w;
  }
  void SetRange(const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
    from_.Write(from);
    to_.Write(to);
  }
  // Applies ref to the host's copy for the same groups, and compares all bytes.
  void ExpectReference(const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
    for (int b = 0; b < kBatch; ++b) {
      data_.Quantise(b, {from[b] / format_.tokens, to[b] / format_.tokens});
    }
    const std::vector<std::byte> want = data_.blocks().host();
    data_.blocks().Download();
    EXPECT_EQ(std::memcmp(want.data(), data_.blocks().host().data(), want.size()), 0);
  }

 private:
  // Zeros of both signs, infinities, NaN, subnormals and the largest among the keys.
  void AddSpecials(Rng& rng) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float specials[] = {0.0f, -0.0f, kInf, -kInf, NAN, 1e-30f, -3e-8f, 65504.0f};
    std::vector<std::byte>& bytes = data_.pages().host();
    for (size_t i = 0; i < bytes.size(); i += 2) {
      if (Below(rng, 512) == 0) {
        StoreFloat(&bytes[i], data_.geometry().dtype, specials[Below(rng, 8)]);
      }
    }
    data_.pages().Upload();
  }

  QuantisedGroup format_;
  QuantisedBlocks data_;
  DeviceArray<int32_t> from_, to_;
};

TEST(QuantiseKeysCuda, GroupsAreTheReference) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        QuantiseKeysCase c(dtype, {dim, bits, 16 << Below(rng, 5)}, rng);
        // Ranges that begin and end inside groups; the last completes none.
        const std::vector<int32_t> from = {0, Below(rng, 2000), 1};
        const std::vector<int32_t> to = {4500, 2000 + Below(rng, 2000), 15};
        c.SetRange(from, to);
        ASSERT_EQ(kvs_cuda_ops()->quantise_keys(c.Work(), nullptr), 0);
        c.ExpectReference(from, to);
      }
    }
  }
}

TEST(QuantiseKeysCuda, OneGraphServesEveryRange) {
  Rng rng(TestSeed());
  QuantiseKeysCase c(DType::kBF16, {128, 2, 64}, rng);
  const QuantiseKeysBatch work = c.Work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->quantise_keys(work, stream); });
  for (int32_t at = 0; at < 4000; at += 1000) {
    const std::vector<int32_t> from = {at, at / 2, 0}, to = {at + 1000, at / 2 + 500, 0};
    c.SetRange(from, to);
    graph.Replay();
    c.ExpectReference(from, to);
  }
}

TEST(QuantiseKeysCuda, RefusesWhatHasNoKernel) {
  Rng rng(TestSeed());
  QuantiseKeysCase c(DType::kBF16, {64, 2, 64}, rng);
  QuantiseKeysBatch work = c.Work();
  work.keys.dtype = DType::kF32;
  EXPECT_NE(kvs_cuda_ops()->quantise_keys(work, nullptr), 0);
  work = c.Work();
  work.groups.format.tokens = 1;
  EXPECT_NE(kvs_cuda_ops()->quantise_keys(work, nullptr), 0);
}

struct BitsShapeOfTest {
  int kv_heads = 2, group = 4;
  QuantisedGroup format{128, 2, 64};
  DType q_dtype = DType::kBF16;
};

class ScoreBitsCase {
 public:
  ScoreBitsCase(const BitsShapeOfTest& s, Rng& rng)
      : shape_(s),
        data_(Geometry{2, s.kv_heads * s.group, s.kv_heads, s.format.dim, 16, DType::kBF16},
              s.format, kBatch, kTokensMax, rng),
        tokens_(kBatch) {
    for (int b = 0; b < kBatch; ++b) data_.Quantise(b, {0, kTokensMax / s.format.tokens});
    data_.blocks().Upload();
    q_.resize(int64_t{kBatch} * s.kv_heads * s.group * s.format.dim);
    for (float& x : q_) x = RoundedTo(s.q_dtype, 4 * Normal(rng));
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s.q_dtype));
    work_.groups = data_.Groups();
    work_.rule = {1, 5, 9, 64, 300};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = kBatch;
    work_.query_heads = s.kv_heads * s.group;
    work_.scale = 0.0884f;
    work_.candidate_stride = kTokensMax + 3;
    logits_ = DeviceArray<float>(int64_t{kBatch} * work_.query_heads * work_.candidate_stride);
    work_.logits = logits_.get();
  }

  const ScoreBitsBatch& work() const { return work_; }
  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    logits_.Poison();
  }
  void ExpectReference() const {
    const std::vector<float> got = logits_.Read();
    for (int b = 0; b < kBatch; ++b) {
      for (int h = 0; h < shape_.kv_heads; ++h) ExpectHead(got, b, h);
    }
  }

 private:
  void ExpectHead(const std::vector<float>& got, int b, int h) const {
    const Candidates c = CandidatesOf(work_.rule, tokens_now_[b]);
    const int sealed = (tokens_now_[b] - 1) / shape_.format.tokens * shape_.format.tokens;
    const int end = c.full ? c.first : std::max(c.first, std::min(c.last, sealed));
    const int n = end - c.first;
    std::vector<float> want(static_cast<size_t>(shape_.group) * n);
    const int64_t first = int64_t{b} * work_.query_heads + h * shape_.group;
    const ScoreBitsWork w{data_.HostRows(b, h),
                          {c.first, end},
                          &q_[first * shape_.format.dim],
                          shape_.group,
                          work_.scale,
                          want.data(),
                          n};
    ScoreBitsRef(&w, 1, InlineExecutor());
    for (int i = 0; i < shape_.group; ++i) {
      const float* row = &got[(first + i) * work_.candidate_stride];
      const float* expected = want.data() + int64_t{i} * n;
      // The op's bound is of sums that cancel: of the logits themselves it is three times that.
      EXPECT_LE(RelativeError({row, row + n}, {expected, expected + n}), 3e-3) << b << " " << h;
      for (int t = n; t < work_.candidate_stride; ++t) ASSERT_TRUE(std::isnan(row[t])) << t;
    }
  }

  BitsShapeOfTest shape_;
  QuantisedBlocks data_;
  std::vector<float> q_;
  DeviceArray<std::byte> device_q_;
  DeviceArray<int32_t> tokens_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<float> logits_;
  ScoreBitsBatch work_;
};

TEST(ScoreBitsCuda, EveryShapeIsTheReference) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      for (const int group : {1, 3, 4, 7, 8}) {
        const DType q_dtype = group == 3 ? DType::kF32 : group == 4 ? DType::kF16 : DType::kBF16;
        ScoreBitsCase c({2, group, {dim, bits, 32 << Below(rng, 4)}, q_dtype}, rng);
        // In full; some; the last group completed by the step's own token, which is not sealed.
        c.SetTokens({299, 300 + Below(rng, 4000), 4352});
        ASSERT_EQ(kvs_cuda_ops()->score_bits(c.work(), nullptr), 0);
        c.ExpectReference();
      }
    }
  }
}

TEST(ScoreBitsCuda, OneGraphServesEveryLength) {
  Rng rng(TestSeed());
  ScoreBitsCase c({}, rng);
  const ScoreBitsBatch work = c.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->score_bits(work, stream); });
  for (const int tokens : {500, 641, 4097, 4500}) {
    c.SetTokens({tokens, tokens - 63, 10});
    graph.Replay();
    c.ExpectReference();
  }
}

TEST(ScoreBitsCuda, RefusesWhatHasNoKernel) {
  Rng rng(TestSeed());
  ScoreBitsCase c({}, rng);
  ScoreBitsBatch work = c.work();
  work.groups.format.tokens = 48;
  EXPECT_NE(kvs_cuda_ops()->score_bits(work, nullptr), 0);
  work = c.work();
  work.query_heads = 18;
  EXPECT_NE(kvs_cuda_ops()->score_bits(work, nullptr), 0);
  work = c.work();
  work.rule.unit_tokens = 16;
  EXPECT_NE(kvs_cuda_ops()->score_bits(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
