// SPDX-License-Identifier: Apache-2.0
// Top-k on the GPU is TopKRef bit for bit, whatever the scores, the split over CTAs and the way
// these tell each other what they have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
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

struct Way {
  const char* name;
  PickExchange exchange;
  int ctas;
};
void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }
constexpr Way kOneCta{"OneCta", PickExchange::kGlobalMemory, 1};
constexpr Way kGlobal{"GlobalMemory", PickExchange::kGlobalMemory, 16};
constexpr Way kCluster{"Cluster", PickExchange::kCluster, 0};
constexpr Way kByShape{"ByShape", PickExchange::kByShape, 0};
constexpr Way kWays[] = {
    kOneCta, {"GlobalMemoryOf3", PickExchange::kGlobalMemory, 3}, kGlobal, kCluster, kByShape};

bool DeviceHasClusters() {
  int device = 0, major = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "attribute");
  return major >= 9;
}

#define SKIP_WITHOUT_CLUSTERS()                                                            \
  if (!DeviceHasClusters()) {                                                              \
    GTEST_SKIP() << "SKIPPED: clusters need compute capability 9.0, this device has less"; \
  }                                                                                        \
  static_assert(true)

struct Shape {
  int batch = 1, groups = 1, stride = 0, take = 0;
  Way way = kByShape;
  int unit_tokens = 1, sinks = 0, recent = 0;
  DType dtype = DType::kF32;
};

// One call's arrays on the device, and what they must become.
class PickCase {
 public:
  PickCase(const Shape& shape, Scores kind, std::mt19937_64& rng) : shape_(shape) {
    const int64_t lists = Lists();
    scores_.resize(lists * shape.stride);
    for (float& x : scores_) x = RoundedTo(shape.dtype, Draw(kind, rng));
    device_scores_ = DeviceArray<std::byte>(Encoded(scores_, shape.dtype));
    units_ = DeviceArray<int32_t>(lists * (shape.take + 5));
    counts_ = DeviceArray<int32_t>(lists);
    sink_end_ = DeviceArray<int32_t>(shape.batch);
    recent_begin_ = DeviceArray<int32_t>(shape.batch);
    tokens_ = DeviceArray<int32_t>(shape.batch);
    takes_.assign(shape.batch, shape.take);
    for (int64_t i = 0; i < lists; ++i) places_.push_back(i);
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
    SetWay(shape.way);
  }

  const PickBatch& work() const { return work_; }

  // Sets the way, with scratch of its own.
  void SetWay(const Way& way) {
    work_.exchange = way.exchange;
    work_.ctas_per_list = way.ctas;
    const int64_t bytes = kvs_cuda_ops()->pick_scratch_bytes(work_);
    scratch_ = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
    work_.scratch = scratch_.get();
  }

  // As many tokens as give each sequence about `counts[b]` candidates; kNoQuery: no query.
  void SetCandidates(const std::vector<int32_t>& counts) {
    tokens_now_.clear();
    const int32_t first = (shape_.sinks + shape_.unit_tokens - 1) / shape_.unit_tokens;
    for (const int32_t count : counts) {
      const int32_t tokens = (first + count) * shape_.unit_tokens + shape_.recent;
      tokens_now_.push_back(count == kNoQuery ? kNoQuery : tokens);
    }
    tokens_.Write(tokens_now_);
    units_.Poison();
    counts_.Poison();
    sink_end_.Poison();
    recent_begin_.Poison();
  }

  // What each sequence takes, at most shape.take.
  void SetTakes(const std::vector<int32_t>& takes) {
    takes_ = takes;
    device_takes_ = DeviceArray<int32_t>(takes);
    work_.takes = device_takes_.get();
  }

  // Each list goes to the place of another one.
  void ScatterLists(std::mt19937_64& rng) {
    std::shuffle(places_.begin(), places_.end(), rng);
    std::vector<uint64_t> addresses;
    for (const int64_t place : places_) {
      addresses.push_back(units_.address() + place * work_.list_stride * sizeof(int32_t));
    }
    device_lists_ = DeviceArray<uint64_t>(addresses);
    work_.lists = device_lists_.get();
    work_.units = nullptr;
  }

  std::vector<int32_t> Units() const { return units_.Read(); }

  void ExpectReference() const {
    const std::vector<int32_t> units = units_.Read(), counts = counts_.Read();
    const std::vector<int32_t> sink_end = sink_end_.Read(), recent_begin = recent_begin_.Read();
    for (int b = 0; b < shape_.batch; ++b) {
      const bool query = tokens_now_[b] != kNoQuery;
      CandidateRule rule = work_.rule;
      rule.take = takes_[b];
      const Candidates c = CandidatesOf(rule, tokens_now_[b]);
      const int32_t sinks = c.full ? 0 : c.first * shape_.unit_tokens;
      const int32_t recent = c.full ? 0 : c.last * shape_.unit_tokens;
      EXPECT_EQ(sink_end[b], query ? sinks : kPoison);
      EXPECT_EQ(recent_begin[b], query ? recent : kPoison);
      for (int64_t list = int64_t{b} * shape_.groups; list < int64_t{b + 1} * shape_.groups;
           ++list) {
        ASSERT_EQ(counts[list], !query ? kPoison : c.full ? 0 : rule.take);
        ExpectList(list, c, query && !c.full ? rule.take : 0, units);
      }
    }
  }

 private:
  static constexpr int32_t kPoison = -1;

  int64_t Lists() const { return int64_t{shape_.batch} * shape_.groups; }

  void ExpectList(int64_t list, const Candidates& c, int32_t k,
                  const std::vector<int32_t>& units) const {
    std::vector<int32_t> want(k);
    TopKRef({&scores_[list * shape_.stride], c.count(), k, want.data()});
    const int32_t* got = &units[places_[list] * work_.list_stride];
    for (int32_t i = 0; i < work_.list_stride; ++i) {
      ASSERT_EQ(got[i], i < k ? want[i] + c.first : kPoison)
          << "list " << list << " entry " << i << " of " << k << " from " << c.count();
    }
  }

  Shape shape_;
  std::vector<float> scores_;
  std::vector<int32_t> tokens_now_, takes_;
  std::vector<int64_t> places_;
  DeviceArray<std::byte> device_scores_, scratch_;
  DeviceArray<int32_t> units_, counts_, sink_end_, recent_begin_, tokens_, device_takes_;
  DeviceArray<uint64_t> device_lists_;
  PickBatch work_;
};

void RunPick(const PickBatch& work) {
  ASSERT_EQ(kvs_cuda_ops()->pick(work, nullptr), 0);
  Check(cudaDeviceSynchronize(), "pick");
}

class PickCudaWays : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().exchange == PickExchange::kCluster) SKIP_WITHOUT_CLUSTERS();
  }
  std::mt19937_64 rng_{TestSeed()};
};

INSTANTIATE_TEST_SUITE_P(, PickCudaWays, testing::ValuesIn(kWays),
                         [](const auto& way) { return way.param.name; });

TEST_P(PickCudaWays, IsTheReferenceForEveryKindOfScores) {
  for (const Scores kind : kAll) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const int take = 1 + static_cast<int>(rng_() % 3000);
      PickCase pick({2, 2, 20000, take, GetParam(), 16, 5, 77, dtype}, kind, rng_);
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", k " +
                   std::to_string(take));
      // The second call finds the scratch as the first left it.
      for (int call = 0; call < 2; ++call) {
        pick.SetCandidates({static_cast<int32_t>(rng_() % 20000), 20000});
        RunPick(pick.work());
        pick.ExpectReference();
      }
    }
  }
}

// Lists far shorter than their room, and lists whose end cuts a vector, a warp's run or a CTA's
// part, with one to be taken, and all but one.
TEST_P(PickCudaWays, TakesListsOfAnyLength) {
  constexpr int kRoom = 9000;
  for (const Scores kind : kAll) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      PickCase pick({8, 1, kRoom, kRoom, GetParam(), 1, 3, 2, dtype}, kind, rng_);
      std::vector<int32_t> counts = {2, 3, 31, 129, 4097, kRoom - 1}, takes;
      while (counts.size() < 8) counts.push_back(2 + static_cast<int32_t>(rng_() % (kRoom - 2)));
      for (const bool one : {true, false}) {
        SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + (one ? ", 1" : ", n - 1"));
        takes.clear();
        for (const int32_t count : counts) takes.push_back(one ? 1 : count - 1);
        pick.SetTakes(takes);
        pick.SetCandidates(counts);
        RunPick(pick.work());
        pick.ExpectReference();
      }
    }
  }
}

TEST_P(PickCudaWays, FollowsTablesOfTakesListsAndQueries) {
  for (const bool ahead : {false, true}) {
    PickCase pick({4, 3, 12000, 700, GetParam(), 16, 5, 77}, Scores::kNearlyEqual, rng_);
    pick.SetTakes({700, static_cast<int32_t>(rng_() % 700), 0, 333});
    pick.ScatterLists(rng_);
    PickBatch work = pick.work();
    work.ahead = ahead;  // nothing on the stream writes them
    for (const std::vector<int32_t>& counts : {std::vector<int32_t>{11999, 9000, 12000, kNoQuery},
                                               {kNoQuery, 701, kNoQuery, 8000},
                                               {kNoQuery, kNoQuery, kNoQuery, kNoQuery},
                                               {12000, 12000, 12000, 12000}}) {
      pick.SetCandidates(counts);
      RunPick(work);
      pick.ExpectReference();
    }
  }
}

TEST_P(PickCudaWays, IsRepeatable) {
  PickCase pick({1, 1, 1 << 17, 2048, GetParam()}, Scores::kFewValues, rng_);
  pick.SetCandidates({1 << 17});
  RunPick(pick.work());
  pick.ExpectReference();
  const std::vector<int32_t> first = pick.Units();
  for (int i = 0; i < 200; ++i) RunPick(pick.work());
  EXPECT_EQ(pick.Units(), first);
}

// Calls one behind the other without a wait: each may start while the one before ends.
TEST_P(PickCudaWays, OneGraphServesGrowingSequences) {
  PickCase pick({2, 1, 65536, 1000, GetParam(), 1, 128, 512}, Scores::kFewValues, rng_);
  CapturedGraph graph([&](Stream stream) {
    int error = 0;
    for (int i = 0; i < 4 && error == 0; ++i) error = kvs_cuda_ops()->pick(pick.work(), stream);
    return error;
  });
  for (const int32_t count : {0, 999, 1000, 1001, 5000, 30000, 65536}) {
    SCOPED_TRACE(count);
    pick.SetCandidates({count, 65536 - count});
    graph.Replay();
    pick.ExpectReference();
  }
}

TEST_P(PickCudaWays, BatchesOfSeveralSizesShareScratch) {
  constexpr int32_t kLists = 8;
  DeviceArray<std::byte> scratch;
  for (const int batch : {4, 1, 3, 2, 4}) {
    SCOPED_TRACE("batch " + std::to_string(batch));
    PickCase pick({batch, 2, 20000, 500, GetParam(), 16, 5, 77}, Scores::kNearlyEqual, rng_);
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

// A batch that has clusters between batches that meet in scratch leaves it alone.
TEST(PickCuda, ClustersShareScratchWithOtherWays) {
  SKIP_WITHOUT_CLUSTERS();
  std::mt19937_64 rng(TestSeed());
  DeviceArray<std::byte> scratch;
  for (const Way& way : {kGlobal, kCluster, kGlobal, kOneCta, kCluster, kGlobal}) {
    SCOPED_TRACE(way.name);
    PickCase pick({2, 2, 20000, 500, way}, Scores::kVotes, rng);
    PickBatch work = pick.work();
    const auto bytes = static_cast<size_t>(kvs_cuda_ops()->pick_scratch_bytes(work));
    if (scratch.size() == 0) scratch = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
    ASSERT_LE(bytes, scratch.size());
    work.scratch = scratch.get();
    pick.SetCandidates({20000, 15001});
    RunPick(work);
    pick.ExpectReference();
  }
}

TEST(PickCuda, AllWaysGiveTheSameBits) {
  SKIP_WITHOUT_CLUSTERS();
  std::mt19937_64 rng(TestSeed());
  constexpr int kLongest = 8 * kPickKeysOfCta;
  for (const Scores kind : kAll) {
    for (const int stride : {8192, 32768, kLongest}) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + " of " +
                   std::to_string(stride));
      PickCase pick({1, 2, stride, 2048, kOneCta}, kind, rng);
      const int32_t count = stride - static_cast<int32_t>(rng() % 100);
      std::vector<int32_t> first;
      for (const Way& way : kWays) {
        SCOPED_TRACE(way.name);
        pick.SetWay(way);
        pick.SetCandidates({count});
        RunPick(pick.work());
        if (first.empty()) {
          pick.ExpectReference();
          first = pick.Units();
        }
        ASSERT_EQ(pick.Units(), first);
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
  PickCase alone({1, 1, 300000, 8192, kOneCta}, Scores::kSpecial, rng);  // that cannot hold it
  alone.SetCandidates({299999});
  RunPick(alone.work());
  alone.ExpectReference();
}

// More than keep the device busy: a CTA a list, and clusters that queue for the device.
TEST(PickCuda, TakesManyLists) {
  std::mt19937_64 rng(TestSeed());
  for (const Way& way : {kByShape, kCluster}) {
    if (way.exchange == PickExchange::kCluster) SKIP_WITHOUT_CLUSTERS();
    SCOPED_TRACE(way.name);
    PickCase pick({40, 8, 6000, 300, way, 16, 4, 100}, Scores::kVotes, rng);
    std::vector<int32_t> counts(40);
    for (int32_t& count : counts) count = static_cast<int32_t>(rng() % 6001);
    pick.SetCandidates(counts);
    RunPick(pick.work());
    pick.ExpectReference();
  }
}

TEST(PickCuda, TakesManyShortLists) {
  std::mt19937_64 rng(TestSeed());
  PickCase pick({64, 8, 2048, 128, kByShape, 16, 4, 100}, Scores::kNormal, rng);
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

TEST(PickCuda, RefusesClustersThatCannotBe) {
  std::mt19937_64 rng(TestSeed());
  PickCase longest({1, 1, 8 * kPickKeysOfCta, 8, kCluster}, Scores::kNormal, rng);
  longest.SetCandidates({8 * kPickKeysOfCta});
  EXPECT_EQ(kvs_cuda_ops()->pick(longest.work(), nullptr) == 0, DeviceHasClusters());
  PickCase longer({1, 1, 8 * kPickKeysOfCta + 8, 8, kCluster}, Scores::kNormal, rng);
  longer.SetCandidates({8 * kPickKeysOfCta + 8});
  EXPECT_EQ(kvs_cuda_ops()->pick(longer.work(), nullptr), int{cudaErrorInvalidValue});
}

}  // namespace
}  // namespace kvstrata::cuda
