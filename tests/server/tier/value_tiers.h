// SPDX-License-Identifier: Apache-2.0
// Implementations of ValueTier under one face, for the suite that holds them all to the contract.
// A new one adds a class and a row in value_tiers.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/tier/value_tier.h"

namespace kvstrata {

class TierUnderTest {
 public:
  virtual ~TierUnderTest() = default;
  virtual ValueTier* tier() = 0;
  virtual void Destroy() = 0;  // the tier, not what it stands on
  // Until Release, which comes once, nothing below the tier answers.
  virtual void Stall() = 0;
  virtual void Release() = 0;
  // Flips a bit of the only value that is there.
  virtual void Damage(const std::string& key) = 0;
  // What Stats and Probe say of what is below is as of now, or later.
  virtual void Settle() {}
};

struct TierRow {
  const char* name;
  // Makes a tier of at least so many bytes; at most twice as many, in values of 100 kB.
  std::unique_ptr<TierUnderTest> (*make)(uint64_t bytes);
  // What is below takes any read for a use.
  bool inspections_are_uses = false;
  // What is below tells what it holds and how much it takes: for Walk, Stats and refusals.
  bool surveys = true;
};
const std::vector<TierRow>& TierRows();

}  // namespace kvstrata
