// SPDX-License-Identifier: Apache-2.0
// The rows of the table of reasons, by file; proto/reasons.h is what others include.
#pragma once

#include <span>

#include "proto/reasons.h"

namespace kvstrata {

std::span<const Reason> DaemonReasons();  // areas start, connect, memory, disk, remote, work, admin
std::span<const Reason> EngineReasons();  // areas sequence, plan, tensor
std::span<const Reason> ProgramReasons();  // areas library, program

}  // namespace kvstrata
