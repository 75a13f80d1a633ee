// SPDX-License-Identifier: Apache-2.0
// Tiers on a MooncakeFolder, over the real agent.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "base/check.h"
#include "server/tier/mooncake/mooncake_value_tier.h"
#include "tests/fakes/mooncake_folder.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {

// The agent as it is shipped; pauses and patience are those of tests.
inline MooncakeTierOptions TestMooncake() {
  MooncakeTierOptions options;
  options.agent.python = "/usr/bin/python3";
  options.agent.program = KVS_SOURCE_DIR "/integrations/mooncake_agent/agent.py";
  options.agent.master = "127.0.0.1:50051";
  options.agent.metadata = "P2PHANDSHAKE";
  options.agent.protocol = "tcp";
  options.agent.interface = "lo";
  options.agent.first_pause = std::chrono::milliseconds(5);
  options.agent.longest_pause = std::chrono::milliseconds(50);
  options.agent.stall_timeout = std::chrono::minutes(10);  // tests wait while it is stalled
  return options;
}

template <typename Condition>
bool Becomes(const Condition& condition) {
  const Deadline end = Soon();
  while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return condition();
}

inline std::unique_ptr<MooncakeValueTier> OpenMooncake(const MooncakeTierOptions& options,
                                                       remote::RemoteFormat format) {
  auto opened = MooncakeValueTier::Open(options, std::move(format));
  KVS_CHECK(opened.ok());
  return std::move(*opened);
}
inline bool AwaitReady(const MooncakeValueTier& tier) {
  return Becomes([&] { return tier.Agent().ready; });
}

}  // namespace kvstrata
