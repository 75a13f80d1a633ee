// SPDX-License-Identifier: Apache-2.0
// The StepDevice of pages in host memory: ops of a CPU backend, run by an executor. Begin and
// Attend cost what the ops do.
#ifndef KVSTRATA_SERVER_RPC_STEPS_CPU_STEPS_H_
#define KVSTRATA_SERVER_RPC_STEPS_CPU_STEPS_H_

#include "kernels/backend/backend.h"
#include "server/rpc/steps/step_runner.h"

namespace kvstrata {

// Borrows both.
std::unique_ptr<StepDevice> NewCpuSteps(const Backend* backend, Executor* executor);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_STEPS_CPU_STEPS_H_
