// SPDX-License-Identifier: Apache-2.0
// Doctor: this machine against a configuration, check by check, each with what was found and how to
// set it right: `kvstratad --check-config --deep`, which `kvstrata doctor` runs. What a start would
// refuse is kFail; what costs speed, safety or the next start is kWarn.
//
// It judges the process that asks: run it as the user, and in the container, that the daemon runs
// in; beside a running daemon too. Changes nothing but for an unnamed file in disk.path. Thread-
// safety: none. Cost: some hundred system calls, and CUDA if a GPU is configured.
#ifndef KVSTRATA_SERVER_DOCTOR_H_
#define KVSTRATA_SERVER_DOCTOR_H_

#include <string>
#include <string_view>
#include <vector>

#include "server/config.h"

namespace kvstrata {

enum class Verdict { kOk, kWarn, kFail };
std::string_view NameOf(Verdict verdict);  // "OK", "WARN", "FAIL"

struct Finding {
  std::string check;  // "memlock"
  Verdict verdict = Verdict::kOk;
  std::string reason;  // of the table (proto/reasons.h), of what a start would refuse; else ""
  std::string what;
  std::string fix;  // "" if kOk
};

// All that is wrong with the configuration itself, then all checks of the machine, in a fixed
// order.
std::vector<Finding> Examine(const LoadedConfig& loaded);

// Lines for people, or one JSON object: {"healthy", "uid", "checks": [{check, verdict, ..}]}.
std::string TextOf(const std::vector<Finding>& findings);
std::string JsonOf(const std::vector<Finding>& findings);

// Whether none is kFail.
bool IsHealthy(const std::vector<Finding>& findings);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DOCTOR_H_
