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

}  // namespace
}  // namespace kvstrata
