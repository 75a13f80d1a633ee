// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/part_health.h"

#include <algorithm>
#include <utility>

namespace kvstrata {
namespace {

std::string HealthOfDescriptors(std::span<const ClosingCounters> closing) {
  const auto late = std::ranges::find_if(closing, [](const auto& c) { return c.late != 0; });
  if (late == closing.end()) return "";
  return std::to_string(late->late) + " descriptors that clients of user " +
         std::to_string(late->late_user) + (late->late == 1 ? "" : " and others") +
         " passed do not close";
}

std::string HealthOfPools(std::span<const PoolInfo> pools) {
  const auto lost = std::ranges::find_if(pools, [](const auto& p) { return !p.failure.empty(); });
  if (lost == pools.end()) return "";
  const bool several = std::ranges::count(pools, Tier::kDevice, &PoolInfo::tier) > 1;
  return "the " + std::string(NameOf(lost->tier)) + " pool" +
         (several ? " of " + lost->device : "") + " is lost: " + lost->failure;
}

}  // namespace

std::vector<PartHealth> HealthOfParts(std::span<const ClosingCounters> closing,
                                      std::span<const PoolInfo> pools,
                                      std::optional<std::string> disk_illness,
                                      std::optional<std::string> remote_illness) {
  std::vector<PartHealth> parts = {{"descriptors", HealthOfDescriptors(closing), false},
                                   {"pools", HealthOfPools(pools), true}};
  if (disk_illness) parts.push_back({"disk", std::move(*disk_illness), false});
  if (remote_illness) parts.push_back({"remote", std::move(*remote_illness), false});
  return parts;
}

}  // namespace kvstrata
