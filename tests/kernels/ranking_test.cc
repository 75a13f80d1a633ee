// SPDX-License-Identifier: Apache-2.0
// Ranking: what is taken in one pass is what visiting one by one takes.
#include "kernels/select/ranking.h"

#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace kvstrata {
namespace {

std::vector<int32_t> TakenOneByOne(const std::vector<float>& scores,
                                   const std::vector<int32_t>& weights, int32_t room) {
  std::vector<int32_t> taken(weights.size());
  VisitRanked(scores.data(), static_cast<int32_t>(scores.size()), [&](int32_t i) {
    taken[i] = std::min(weights[i], room);
    room -= taken[i];
    return room > 0;
  });
  return taken;
}

TEST(TakeRanked, TakesWhatVisitsOneByOneTake) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const int32_t n = std::uniform_int_distribution<int32_t>(0, 70)(random);
    // Few scores, so that many are equal; some are not numbers.
    std::uniform_int_distribution<int32_t> score(-3, 4);
    std::uniform_int_distribution<int32_t> weight(0, round % 2 == 0 ? 3 : 100);
    std::vector<float> scores;
    std::vector<int32_t> weights;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t s = score(random);
      scores.push_back(s == 4 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(s));
      weights.push_back(weight(random));
    }
    const int32_t room = std::uniform_int_distribution<int32_t>(1, 300)(random);
    const std::vector<int32_t> wanted = TakenOneByOne(scores, weights, room);
    TakeRanked(scores.data(), weights.data(), n, room);
    ASSERT_EQ(weights, wanted) << "round " << round << ", room " << room;
  }
}

}  // namespace
}  // namespace kvstrata
