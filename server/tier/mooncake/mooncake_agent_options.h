// SPDX-License-Identifier: Apache-2.0
// How the daemon starts the agent that calls Mooncake Store (mooncake_agent.h). Thread-safety:
// values.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kvstrata {

struct MooncakeAgentOptions {
  std::string python, program;  // paths
  std::string master;           // HOST:PORT
  std::string metadata, protocol, devices, interface;
  uint64_t memory_bytes = uint64_t{64} << 20;
  std::chrono::milliseconds first_pause{1000}, longest_pause{30000};  // between its lives
  std::chrono::milliseconds start_timeout{30000}, stall_timeout{60000};
};

}  // namespace kvstrata
