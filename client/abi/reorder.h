// SPDX-License-Identifier: Apache-2.0
// Reorder: beams as forks. Both transports.
#ifndef KVSTRATA_CLIENT_ABI_REORDER_H_
#define KVSTRATA_CLIENT_ABI_REORDER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/session.h"

namespace kvstrata::client {

// For each parent, an index into `sequences`, a sequence that continues it: the first that names a
// parent gets the parent itself, later ones forks; sequences that are no parent are closed.
// INVALID_ARGUMENT REORDER_PARENT, REORDER_REPEATED (a sequence that is named twice); errors of
// Fork: then nothing has changed. Threads: all of them are this thread's. Cost: a message to the
// daemon for each fork and each close.
Result<std::vector<uint64_t>> Reorder(Session* session, std::span<const uint64_t> sequences,
                                      std::span<const uint32_t> parents);

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_ABI_REORDER_H_
