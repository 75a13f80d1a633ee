// Top-k on the GPU is TopKRef bit for bit, whatever the scores and the split over CTAs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pick/pick.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

enum class Scores { kNormal, kVotes, kFewValues, kEqual, kSpecial, kNearlyEqual, kMostlyNaN };
constexpr Scores kAll[] = {Scores::kNormal,   Scores::kVotes,   Scores::kFewValues,
                           Scores::kEqual,    Scores::kSpecial, Scores::kNearlyEqual,
                           Scores::kMostlyNaN};

float Draw(Scores kind, std::mt19937_64& rng) {
  static constexpr float kSpecials[] = {0.0f, -0.0f, kInf, -kInf, kNaN, 1e-42f, -1e-42f, 1.0f};
  switch (kind) {
    case Scores::kNormal:
      return Normal(rng);
    case Scores::kVotes:
      return std::exp(4 * Normal(rng) - 20);
    case Scores::kFewValues:
      return static_cast<float>(rng() % 7) - 3;
    case Scores::kEqual:
      return 0.25f;
    case Scores::kSpecial:
      return rng() % 4 == 0 ? Normal(rng) : kSpecials[rng() % 8];
    case Scores::kNearlyEqual:
      return 1.0f + static_cast<float>(rng() % 4096) * 0x1p-23f;
    case Scores::kMostlyNaN:
      return rng() % 64 == 0 ? Normal(rng) : kNaN;
  }
  return 0;
}

struct Shape {
  int batch = 1, groups = 1, stride = 0, take = 0, ctas = 0;
  int unit_tokens = 1, sinks = 0, recent = 0;
  DType dtype = DType::kF32;
};

// One call's arrays on the device, and what they must become.
class PickCase {
 public:
  PickCase(const Shape& shape, Scores kind, std::mt19937_64& rng) : shape_(shape) {
    const int64_t lists = int64_t{shape.batch} * shape.groups;
    scores_.resize(lists * shape.stride);
    for (float& x : scores_) x = RoundedTo(shape.dtype, Draw(kind, rng));
    device_scores_ = DeviceArray<std::byte>(Encoded(scores_, shape.dtype));
    units_ = DeviceArray<int32_t>(lists * (shape.take + 5));
    counts_ = DeviceArray<int32_t>(lists);
    sink_end_ = DeviceArray<int32_t>(shape.batch);
    recent_begin_ = DeviceArray<int32_t>(shape.batch);
    tokens_ = DeviceArray<int32_t>(shape.batch);
    work_.scores = device_scores_.get();
    work_.dtype = shape.dtype;
    work_.score_stride = shape.stride;
    work_.batch = shape.batch;
    work_.groups = shape.groups;
    work_.rule = {shape.unit_tokens, shape.sinks, shape.recent, shape.take, 0};
    work_.tokens = tokens_.get();
    work_.units = units_.get();
    work_.counts = counts_.get();
    work_.sink_end = sink_end_.get();
    work_.recent_begin = recent_begin_.get();
    work_.list_stride = shape.take + 5;
    work_.ctas_per_list = shape.ctas;
    const int64_t bytes = kvs_cuda_ops()->pick_scratch_bytes(work_);
    scratch_ = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
    work_.scratch = scratch_.get();
  }

  const PickBatch& work() const { return work_; }

  // As many tokens as give each sequence about `counts[b]` candidates.
  void SetCandidates(const std::vector<int32_t>& counts) {
    tokens_now_.clear();
    const int32_t first = (shape_.sinks + shape_.unit_tokens - 1) / shape_.unit_tokens;
    for (const int32_t count : counts) {
      tokens_now_.push_back((first + count) * shape_.unit_tokens + shape_.recent);
    }
    tokens_.Write(tokens_now_);
    units_.Poison();
    counts_.Poison();
    sink_end_.Poison();
    recent_begin_.Poison();
  }

  std::vector<int32_t> Units() const { return units_.Read(); }

  void ExpectReference() const {
    const std::vector<int32_t> units = units_.Read(), counts = counts_.Read();
    const std::vector<int32_t> sink_end = sink_end_.Read(), recent_begin = recent_begin_.Read();
    for (int b = 0; b < shape_.batch; ++b) {
      const Candidates c = CandidatesOf(work_.rule, tokens_now_[b]);
      EXPECT_EQ(sink_end[b], c.full ? 0 : c.first * shape_.unit_tokens);
      EXPECT_EQ(recent_begin[b], c.full ? 0 : c.last * shape_.unit_tokens);
      for (int g = 0; g < shape_.groups; ++g) ExpectList(b * shape_.groups + g, c, units, counts);
    }
  }

 private:
  void ExpectList(int64_t list, const Candidates& c, const std::vector<int32_t>& units,
                  const std::vector<int32_t>& counts) const {
    const int32_t k = c.full ? 0 : shape_.take;
    ASSERT_EQ(counts[list], k);
    std::vector<int32_t> want(k);
    TopKRef({&scores_[list * shape_.stride], c.count(), k, want.data()});
    const int32_t* got = &units[list * work_.list_stride];
    for (int32_t i = 0; i < work_.list_stride; ++i) {
      const int32_t expected = i < k ? want[i] + c.first : -1;  // -1: the poison
      ASSERT_EQ(got[i], expected) << "list " << list << " entry " << i << " of " << k << " from "
                                  << c.count();
    }
  }

  Shape shape_;
  std::vector<float> scores_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<std::byte> device_scores_, scratch_;
  DeviceArray<int32_t> units_, counts_, sink_end_, recent_begin_, tokens_;
  PickBatch work_;
};

void RunPick(const PickBatch& work) {
  ASSERT_EQ(kvs_cuda_ops()->pick(work, nullptr), 0);
  Check(cudaDeviceSynchronize(), "pick");
}

TEST(PickCuda, IsTheReferenceForEveryKindOfScores) {
  std::mt19937_64 rng(TestSeed());
  for (const Scores kind : kAll) {
    for (const int ctas : {1, 3, 16}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const int take = 1 + static_cast<int>(rng() % 3000);
        PickCase pick({2, 2, 20000, take, ctas, 16, 5, 77, dtype}, kind, rng);
        SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", CTAs " +
                     std::to_string(ctas) + ", k " + std::to_string(take));
        // The second call finds the scratch as the first left it.
        for (int call = 0; call < 2; ++call) {
          pick.SetCandidates({static_cast<int32_t>(rng() % 20000), 20000});
          RunPick(pick.work());
          pick.ExpectReference();
        }
      }
    }
  }
}

TEST(PickCuda, TakesLongLists) {
  std::mt19937_64 rng(TestSeed());
  for (const Scores kind : kAll) {
    SCOPED_TRACE(static_cast<int>(kind));
    PickCase pick({1, 1, 1 << 20, 2048}, kind, rng);
    pick.SetCandidates({(1 << 20) - static_cast<int32_t>(rng() % 1000)});
    RunPick(pick.work());
    pick.ExpectReference();
  }
  PickCase most({1, 1, 300000, 8192}, Scores::kNormal, rng);
  most.SetCandidates({299999});
  RunPick(most.work());
  most.ExpectReference();
  PickCase alone({1, 1, 300000, 8192, 1}, Scores::kSpecial, rng);  // one CTA that cannot hold it
  alone.SetCandidates({299999});
  RunPick(alone.work());
  alone.ExpectReference();
}

TEST(PickCuda, BatchesOfSeveralSizesShareScratch) {
  std::mt19937_64 rng(TestSeed());
  constexpr int32_t kLists = 8;
  DeviceArray<std::byte> scratch;
  for (const int batch : {4, 1, 3, 2, 4}) {
    SCOPED_TRACE("batch " + std::to_string(batch));
    PickCase pick({batch, 2, 20000, 500, 16, 16, 5, 77}, Scores::kNearlyEqual, rng);
    PickBatch work = pick.work();
    work.scratch_lists = kLists;
    const auto bytes = static_cast<size_t>(kvs_cuda_ops()->pick_scratch_bytes(work));
    if (scratch.size() == 0) scratch = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
    ASSERT_LE(bytes, scratch.size());  // the first batch is the largest
    work.scratch = scratch.get();
    pick.SetCandidates(std::vector<int32_t>(static_cast<size_t>(batch), 19000));
    RunPick(work);
    pick.ExpectReference();
  }
}

TEST(PickCuda, TakesManyShortLists) {
  std::mt19937_64 rng(TestSeed());
  PickCase pick({64, 8, 2048, 128, 0, 16, 4, 100}, Scores::kNormal, rng);
  std::vector<int32_t> counts(64);
  for (int32_t& count : counts) count = static_cast<int32_t>(rng() % 2049);
  counts[0] = 0;
  counts[1] = 128;  // everything: "all"
  counts[2] = 129;
  pick.SetCandidates(counts);
  RunPick(pick.work());
  pick.ExpectReference();
}

TEST(PickCuda, CandidatesAreThoseOfTheSelectors) {
  // Quest: always-on sets rounded outwards; budget 2048 of pages of 16.
  const CandidateRule quest{16, 5, 77, 128, 4096};
  EXPECT_TRUE(CandidatesOf(quest, 4095).full);
  const Candidates c = CandidatesOf(quest, 5000);
  EXPECT_FALSE(c.full);
  EXPECT_EQ(c.first, 1);
  EXPECT_EQ(c.last, (5000 - 77) / 16);
  // TokenSelect: n_init + k + n_local >= N is full attention.
  const CandidateRule vote{1, 128, 512, 2048, 0};
  EXPECT_TRUE(CandidatesOf(vote, 128 + 512 + 2048).full);
  EXPECT_FALSE(CandidatesOf(vote, 128 + 512 + 2049).full);
  EXPECT_TRUE(CandidatesOf(vote, 1).full);
}

TEST(PickCuda, OneGraphServesGrowingSequences) {
  std::mt19937_64 rng(TestSeed());
  PickCase pick({2, 1, 65536, 1000, 0, 1, 128, 512}, Scores::kFewValues, rng);
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->pick(pick.work(), stream); });
  for (const int32_t count : {0, 999, 1000, 1001, 5000, 30000, 65536}) {
    SCOPED_TRACE(count);
    pick.SetCandidates({count, 65536 - count});
    graph.Replay();
    pick.ExpectReference();
  }
}

TEST(PickCuda, IsRepeatable) {
  std::mt19937_64 rng(TestSeed());
  PickCase pick({1, 1, 1 << 17, 2048}, Scores::kFewValues, rng);
  pick.SetCandidates({1 << 17});
  RunPick(pick.work());
  const std::vector<int32_t> first = pick.Units();
  for (int i = 0; i < 200; ++i) RunPick(pick.work());
  EXPECT_EQ(pick.Units(), first);
}

TEST(PickCuda, RefusesWhatItDoesNotTake) {
  std::mt19937_64 rng(TestSeed());
  PickCase pick({1, 1, 64, 8}, Scores::kNormal, rng);
  PickBatch work = pick.work();
  work.score_stride = 63;
  EXPECT_NE(kvs_cuda_ops()->pick(work, nullptr), 0);
  work = pick.work();
  work.list_stride = 7;
  EXPECT_NE(kvs_cuda_ops()->pick(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
