// SPDX-License-Identifier: Apache-2.0
// Negative controls: with one guard of the remote format left out, the attacks that it stands
// against must succeed. Linked with a format whose guards can be left out (server/tier/guard.h).
#include <gtest/gtest.h>

#include <set>

#include "tests/server/tier/remote_attacks.h"

namespace kvstrata {

Guard left_out_guard = Guard::kNone;

namespace remote {
namespace {

TEST(RemoteControls, WithAllGuardsNoAttackSucceeds) {
  std::mt19937_64 random(TestSeed());
  for (const Attack& attack : Attacks()) {
    for (const Seal seal : {Seal::kNone, Seal::kGcm}) {
      EXPECT_EQ(attack.of(seal, &random).reason(), attack.reason) << attack.name;
    }
  }
}

TEST(RemoteControls, WithoutItsGuardEachAttackSucceeds) {
  std::mt19937_64 random(TestSeed());
  std::set<Guard> guards;
  for (const Attack& attack : Attacks()) {
    left_out_guard = attack.guard;
    guards.insert(attack.guard);
    for (const Seal seal : attack.seals) {
      const Status status = attack.of(seal, &random);
      EXPECT_TRUE(status.ok()) << attack.name << ", " << SealName(seal) << ": "
                               << status.ToString();
    }
    left_out_guard = Guard::kNone;
  }
  EXPECT_EQ(guards.size(), 8u) << "a guard of the remote format has no attack";
}

}  // namespace
}  // namespace remote
}  // namespace kvstrata
