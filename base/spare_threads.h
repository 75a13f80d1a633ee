// SPDX-License-Identifier: Apache-2.0
// Whether this process would get more threads now: they are made, and end. A program that is about
// to start many asks first, since what it starts with may abort halfway when one is refused.
//
// Any thread. Nothing stays; somebody else may take the last one meanwhile. Cost: some 20 us a
// thread.
#pragma once

#include "base/status.h"

namespace kvstrata {

// OK, or THREADS (RESOURCE_EXHAUSTED): the limit of the user, the cgroup or the machine is near.
Status CheckSpareThreads(int threads);

}  // namespace kvstrata
