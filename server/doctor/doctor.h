// SPDX-License-Identifier: Apache-2.0
// Doctor: this machine against a configuration, check by check, each with what was found and how to
// set it right: `kvstratad --check-config --deep`, which `kvstrata doctor` runs. What a start would
// refuse is kFail; what costs speed, safety or the next start is kWarn.
//
// It judges the process that asks: run it as the user, and in the container, that the daemon runs
// in; beside a running daemon too. Changes nothing but for an unnamed file in disk.path. Thread-
// safety: none. Cost: some hundred system calls, CUDA if a GPU is configured, and with a remote
// tier a PING of each server, for which a silent one has 5 s; as has a daemon at the socket.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/config/config.h"

namespace kvstrata {

enum class Verdict { kOk, kWarn, kFail };
std::string_view NameOf(Verdict verdict);  // "OK", "WARN", "FAIL"

struct Finding {
  std::string check;  // "memlock"
  Verdict verdict = Verdict::kOk;
  std::string reason;  // one of proto/reasons.h where a start would refuse; else ""
  std::string what;
  std::string fix;  // "" if kOk
};

// All that is wrong with the configuration itself, then all checks of the machine, in a fixed
// order. `tell` hears of each as soon as it is there: who waits no longer has those.
std::vector<Finding> Examine(const LoadedConfig& loaded,
                             const std::function<void(const Finding&)>& tell);

// Lines for people; a JSON object {"check", "verdict", "reason", "what", "fix"}.
std::string TextOf(const Finding& finding);
std::string JsonOf(const Finding& finding);

// Whether none is kFail.
bool IsHealthy(const std::vector<Finding>& findings);

// A configuration against this machine: what a start would refuse, told before anything starts and
// all of it at once.
//
// Nothing is changed, and what only the moment decides (another daemon that serves the path, what a
// cgroup is charged) is left to the start. Thread-safety: none. Cost: some system calls; CheckGpus
// loads CUDA.

// Errors: of unix_listener.h, pool_memory.h, numa_topology.h, DiskTier::CheckPlace,
// remote_secret.h, RedisValueTier::Check and node_credentials.h; INVALID_ARGUMENT WORK_CPUS,
// NOT_FOUND PARAMETERS_DIRECTORY.
std::vector<Status> CheckMachine(const Config& config);

// OK without a GPU in pool.device. UNAVAILABLE CUDA_LIBRARY, CUDA_NO_DEVICE; NOT_FOUND
// DEVICE_UNKNOWN.
Status CheckGpus(const Config& config);

}  // namespace kvstrata
