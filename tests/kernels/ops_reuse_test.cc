// SPDX-License-Identifier: Apache-2.0
// Ref of reuse by hand: hits, misses, steps that were given up.
#include "kernels/ops/reuse/reuse.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr int kFloats = 8, kTake = 5;  // two heads of four floats

class OneCache {
 public:
  OneCache() : memory_(static_cast<size_t>(kLayout.layer_bytes() * 2)) {
    options.layer = 1;
    options.theta = 0.9;
  }
  // A step of `tokens` whose heads' queries are (cos a, sin a, 0, 0) and (cos b, sin b, 0, 0).
  bool Hits(int32_t tokens, double a, double b) {
    const float q[kFloats] = {float(std::cos(a)), float(std::sin(a)), 0, 0,
                              float(std::cos(b)), float(std::sin(b)), 0, 0};
    const auto cache = reinterpret_cast<uint64_t>(memory_.data());
    options.caches = &cache;
    options.tokens = &tokens;
    options.voting = &voting;
    options.lists = &list;
    options.counts = &count;
    options.sink_end = &sink_end;
    options.recent_begin = &recent_begin;
    voting = count = sink_end = recent_begin = -9;
    ReuseRef(options, {1, 2, 10, kTake, 0}, {q, DType::kF32, 1, 2, kFloats / 2});
    return voting == kNoQuery;
  }
  // Which pick of the layer the list belongs to.
  int64_t pick() const {
    const uint64_t first =
        reinterpret_cast<uint64_t>(memory_.data()) + static_cast<uint64_t>(kLayout.layer_bytes());
    return static_cast<int64_t>(list - first) / kLayout.pick_bytes();
  }

  Reuse options;
  int32_t voting = 0, count = 0, sink_end = 0, recent_begin = 0;
  uint64_t list = 0;

 private:
  static constexpr PickCacheLayout kLayout{kFloats, kTake};
  std::vector<std::byte> memory_;
};

TEST(ReuseRef, ALikeQueryHits) {
  OneCache cache;
  EXPECT_FALSE(cache.Hits(100, 0, 0));
  EXPECT_EQ(cache.voting, 100);
  EXPECT_EQ(cache.pick(), 0);
  EXPECT_EQ(cache.count, -9);
  EXPECT_TRUE(cache.Hits(101, 0.3, -0.3));
  EXPECT_EQ(cache.count, kTake);
  EXPECT_EQ(cache.sink_end, 2);
  EXPECT_EQ(cache.recent_begin, 91);
  EXPECT_FALSE(cache.Hits(102, 1.5, 0));
  EXPECT_EQ(cache.pick(), 1);
  EXPECT_TRUE(cache.Hits(103, 1.5, 0));
  EXPECT_EQ(cache.pick(), 1);
  cache.options.append_departed = true;
  EXPECT_TRUE(cache.Hits(110, 1.5, 0));
  EXPECT_EQ(cache.recent_begin, 92);  // as of the pick
}

TEST(ReuseRef, OfEveryHeadByItself) {
  OneCache cache;
  cache.Hits(100, 0, 0);
  EXPECT_TRUE(cache.Hits(101, 0.55, 0));  // (cos 0.55 + 1) / 2
  cache.options.per_head = true;
  EXPECT_FALSE(cache.Hits(102, 0.55, 0));
}

TEST(ReuseRef, AStepThatWasGivenUpLeavesNothing) {
  OneCache cache;
  cache.Hits(100, 0, 0);
  EXPECT_FALSE(cache.Hits(101, 2, 2));  // given up
  EXPECT_TRUE(cache.Hits(101, 0, 0));   // by the first pick
  EXPECT_EQ(cache.pick(), 0);
  EXPECT_TRUE(cache.Hits(102, 0, 0));  // and what the step made is gone
  EXPECT_FALSE(cache.Hits(103, 2, 2));
}

TEST(ReuseRef, NeverInFullNorWithThetaOfOne) {
  OneCache cache;
  cache.Hits(100, 0, 0);
  EXPECT_FALSE(cache.Hits(17, 0, 0));  // as many candidates as are taken
  EXPECT_EQ(cache.voting, 17);
  cache.options.theta = 1;
  EXPECT_FALSE(cache.Hits(101, 0, 0));
}

}  // namespace
}  // namespace kvstrata::cuda
