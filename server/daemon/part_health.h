// SPDX-License-Identifier: Apache-2.0
// PartHealth of the daemon's parts (server/web/daemon_numbers.h), from what they say of
// themselves. Pure; any thread.
#ifndef KVSTRATA_SERVER_DAEMON_PART_HEALTH_H_
#define KVSTRATA_SERVER_DAEMON_PART_HEALTH_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/sockets/descriptor_closer.h"
#include "server/web/daemon_numbers.h"

namespace kvstrata {

// "descriptors", "pools", "disk", "remote", each with the first failure that it has. illness: the
// tiers'; nothing: there is no such tier, and it is no part.
std::vector<PartHealth> HealthOfParts(std::span<const ClosingCounters> closing,
                                      std::span<const PoolInfo> pools,
                                      std::optional<std::string> disk_illness,
                                      std::optional<std::string> remote_illness);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_PART_HEALTH_H_
