// SPDX-License-Identifier: Apache-2.0
// Negative controls: with one guard of the engine left out, the oracle that guard is there for must
// find harm. Linked with an engine whose guards can be left out (server/tier/guard.h).
#include <gtest/gtest.h>

#include "server/tier/guard.h"
#include "tests/server/tier/crash_oracle.h"

namespace kvstrata {

Guard left_out_guard = Guard::kNone;

namespace {

class WithoutGuard : public ::testing::Test {
 protected:
  void TearDown() override { left_out_guard = Guard::kNone; }
  // Stops at the first finding.
  Findings Crashes(Guard guard, uint64_t states = 200000) {
    left_out_guard = guard;
    Findings found = ReplayCrashes(TestSeed(), states, Until::kFirstFinding);
    std::printf("%lu states: %s\n", found.states, found.first.c_str());
    return found;
  }
  FlipFindings Flips(Guard guard, const FlipCounts& counts) {
    left_out_guard = guard;
    return FlipBits(TestSeed(), counts);
  }
};

TEST_F(WithoutGuard, NoneNothingIsFound) {
  EXPECT_TRUE(Crashes(Guard::kNone, 1000).none());
  EXPECT_EQ(Flips(Guard::kNone, {1000, 1000, 100, 100}).undetected, 0u);
}
TEST_F(WithoutGuard, PayloadChecksum) { EXPECT_FALSE(Crashes(Guard::kPayloadChecksum).none()); }
TEST_F(WithoutGuard, Place) { EXPECT_FALSE(Crashes(Guard::kPlace).none()); }
TEST_F(WithoutGuard, Identity) { EXPECT_FALSE(Crashes(Guard::kIdentity).none()); }
TEST_F(WithoutGuard, Newest) { EXPECT_FALSE(Crashes(Guard::kNewest).none()); }
TEST_F(WithoutGuard, DirtyMark) { EXPECT_FALSE(Crashes(Guard::kDirtyMark).none()); }
TEST_F(WithoutGuard, Erasure) { EXPECT_FALSE(Crashes(Guard::kErasure).none()); }

TEST_F(WithoutGuard, PayloadChecksumFlips) {
  EXPECT_GT(Flips(Guard::kPayloadChecksum, {1000, 0, 0, 0}).undetected, 0u);
}
TEST_F(WithoutGuard, HeaderChecksumFlips) {
  EXPECT_GT(Flips(Guard::kHeaderChecksum, {0, 1000, 0, 0}).undetected, 0u);
}
TEST_F(WithoutGuard, CheckpointChecksumFlips) {
  const FlipFindings found = Flips(Guard::kCheckpointChecksum, {0, 0, 100, 0});
  EXPECT_GT(found.undetected, 0u);
  EXPECT_GT(found.lost, 0u);
}
TEST_F(WithoutGuard, SuperblockChecksumFlips) {
  EXPECT_GT(Flips(Guard::kSuperblockChecksum, {0, 0, 0, 1000}).undetected, 0u);
}

}  // namespace
}  // namespace kvstrata
