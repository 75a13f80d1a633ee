// SPDX-License-Identifier: Apache-2.0
// A worker's share of a build (server/store/requests/build_job.h): index rows from keys, extents of
// a codec from rows.
#ifndef KVSTRATA_SERVER_WORK_BUILD_H_
#define KVSTRATA_SERVER_WORK_BUILD_H_

#include <cstdint>

#include "kernels/backend/backend.h"
#include "kernels/cpu/executor.h"
#include "server/store/codecs/builds.h"

namespace kvstrata {

// Makes and hands over piece after piece until the sequence's build is over. Takes as long as that:
// index rows read all keys once; a codec takes seconds. Holds no lock.
void RunBuild(Builds* builds, uint64_t sequence, const Backend& backend, Executor* executor);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_BUILD_H_
