// SPDX-License-Identifier: Apache-2.0
// The crash oracle and the bit flips on the product's engine (the negative controls:
// disk_controls_test.cc).
#include <gtest/gtest.h>

#include "tests/server/tier/crash_oracle.h"

namespace kvstrata {
namespace {

TEST(DiskCrash, NoStateShowsWrongBytesOrLosesWhatAFlushCovered) {
  const Findings found = ReplayCrashes(TestSeed(), 10000);
  EXPECT_GE(found.states, 10000u);
  for (const uint64_t of_kind : found.by_kind) EXPECT_GE(of_kind, 1000u);
  EXPECT_GE(found.reads, found.states);  // the states are not empty
  EXPECT_EQ(found.wrong, 0u) << found.first;
  EXPECT_EQ(found.lost, 0u) << found.first;
  EXPECT_EQ(found.failed_starts, 0u) << found.first;
  std::printf("%lu states, %lu values read\n", found.states, found.reads);
}

TEST(DiskFlips, EveryFlippedBitIsFoundAndNothingElseIsLost) {
  const FlipFindings found = FlipBits(TestSeed(), {80000, 15000, 2500, 2500});
  EXPECT_GE(found.flips, 100000u);
  EXPECT_EQ(found.undetected, 0u);
  EXPECT_EQ(found.lost, 0u);
}

}  // namespace
}  // namespace kvstrata
