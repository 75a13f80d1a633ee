// SPDX-License-Identifier: Apache-2.0
// Differences of selection totals, whatever a sequence grew to between the two.
#include "server/store/reports/selection_totals.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <numeric>
#include <random>

namespace kvstrata {
namespace {

constexpr uint32_t kPage = 16;

uint32_t Seed() {
  const char* given = std::getenv("KVS_TEST_SEED");
  const uint32_t seed = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                                         : std::random_device()();
  std::cout << "KVS_TEST_SEED=" << seed << "\n";
  return seed;
}

SelectionTotals TotalsOf(const std::vector<uint32_t>& pages, uint32_t buckets,
                         uint32_t bucket_tokens) {
  const uint32_t width = std::max(BucketPages(pages.size(), buckets), bucket_tokens / kPage);
  SelectionTotals totals;
  totals.bucket_tokens = width * kPage;
  totals.counts.resize((pages.size() + width - 1) / width);
  for (size_t i = 0; i < pages.size(); ++i) totals.counts[i / width] += pages[i];
  return totals;
}

TEST(SelectionTotalsTest, BucketsAreTheNarrowestPowerOfTwoThatIsEnough) {
  EXPECT_EQ(BucketPages(0, 512), 1u);
  EXPECT_EQ(BucketPages(512, 512), 1u);
  EXPECT_EQ(BucketPages(513, 512), 2u);
  EXPECT_EQ(BucketPages(1025, 512), 4u);
  EXPECT_EQ(BucketPages(65536, 1), 65536u);
  std::mt19937 random(Seed());
  for (int i = 0; i < 1000; ++i) {
    const uint32_t pages = random() % 100000 + 1, buckets = random() % 512 + 1;
    const uint32_t width = BucketPages(pages, buckets);
    EXPECT_LE((pages + width - 1) / width, buckets) << pages << " in " << buckets;
    if (width > 1) {
      EXPECT_GT((pages + width / 2 - 1) / (width / 2), buckets) << pages << " in " << buckets;
    }
  }
}

// Words that wrap, a sequence that grows past its buckets: the difference is what was added.
TEST(SelectionTotalsTest, ADifferenceIsWhatWasSelectedBetween) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 300; ++round) {
    std::vector<uint32_t> pages(random() % 2000);
    for (uint32_t& page : pages) page = random();
    const uint32_t buckets = random() % 512 + 1;
    const SelectionTotals before = TotalsOf(pages, buckets, 0);
    std::vector<uint32_t> added(pages.size() + random() % 4000);
    pages.resize(added.size());
    for (size_t i = 0; i < pages.size(); ++i) pages[i] += added[i] = random() % 1000;
    const SelectionTotals now = TotalsOf(pages, buckets, before.bucket_tokens);
    ASSERT_EQ(SelectedSince(before, now), TotalsOf(added, buckets, now.bucket_tokens).counts);
  }
}

TEST(SelectionTotalsTest, ASequenceThatWasCutOrLiesHasNoNegativeSelections) {
  const SelectionTotals before{64, 16, 4, {5, 6, 7, 8}};
  const SelectionTotals cut{32, 16, 5, {5, 9}};
  EXPECT_EQ(SelectedSince(before, cut), (std::vector<uint32_t>{0, 3}));
  const SelectionTotals lies{64, 16, 5, {1, 6, 7, 8}};
  EXPECT_EQ(SelectedSince(before, lies), (std::vector<uint32_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace kvstrata
