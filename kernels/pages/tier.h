// SPDX-License-Identifier: Apache-2.0
// Tier: the kinds of memory that hold keys and values. A plan names the one that pages are taken
// from, the store has a pool of each device's and the host's memory. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvstrata {

// kDisk holds copies of what is sealed: no plan names it, and it has no pool.
enum class Tier : uint16_t { kDevice, kHost, kDisk };

constexpr std::string_view NameOf(Tier tier) {
  constexpr std::string_view kNames[] = {"device", "host", "disk"};
  return kNames[static_cast<size_t>(tier)];
}

}  // namespace kvstrata
