// SPDX-License-Identifier: Apache-2.0
// Handles of the C ABI: sessions, steps and attentions over blocks that are alive in this process.
//
// A handle is a number that is never used again, dressed as a pointer, so that one used after its
// end, twice, or of the other kind is an error and never a crash. Look-ups share ownership: what a
// call uses stays until the call returns, whatever other threads end meanwhile.
// Threads: any; one short lock, held across fork() so that a child can be refused.
#ifndef KVSTRATA_CLIENT_ABI_ABI_HANDLES_H_
#define KVSTRATA_CLIENT_ABI_ABI_HANDLES_H_

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/status.h"
#include "client/include/kvstrata/block_attention.h"
#include "client/include/kvstrata/block_planes.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"
#include "kernels/blocks/block_attention.h"
#include "kernels/blocks/block_planes.h"

namespace kvstrata::client {

struct SessionHandle {
  std::unique_ptr<Session> session;
  pid_t owner = 0;  // the process that attached
};

struct StepHandle {
  std::shared_ptr<SessionHandle> session;  // before `step`: it must go after it
  std::unique_ptr<SessionStep> step;
  std::vector<bool> appended;  // per layer
  bool selected = false;       // some layer was
  std::atomic_flag busy;       // a call is inside
};

struct BlockAttentionHandle {
  std::unique_ptr<BlockAttention> attention;
  pid_t owner = 0;
};

struct BlockPlanesHandle {
  std::unique_ptr<BlockPlanes> planes;
  pid_t owner = 0;
};

kvs_session* AddSession(std::unique_ptr<Session> session);
kvs_step* AddStep(std::shared_ptr<SessionHandle> session, std::unique_ptr<SessionStep> step);
kvs_block_attention* AddBlockAttention(std::unique_ptr<BlockAttention> attention);
kvs_block_planes* AddBlockPlanes(std::unique_ptr<BlockPlanes> planes);

// HANDLE_INVALID (INVALID_ARGUMENT); FORKED (FAILED_PRECONDITION) in another process than its own.
Result<std::shared_ptr<SessionHandle>> FindSession(const kvs_session* handle);
Result<std::shared_ptr<StepHandle>> FindStep(const kvs_step* handle);
Result<std::shared_ptr<BlockAttentionHandle>> FindBlockAttention(const kvs_block_attention* handle);
Result<std::shared_ptr<BlockPlanesHandle>> FindBlockPlanes(const kvs_block_planes* handle);

// Removes a handle; null when there is none such. A session's steps are removed with it and go
// first. In a forked child what was removed is abandoned, not ended.
std::shared_ptr<StepHandle> TakeStep(const kvs_step* handle);
void EndSession(const kvs_session* handle);
void EndBlockAttention(const kvs_block_attention* handle);
void EndBlockPlanes(const kvs_block_planes* handle);

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_ABI_ABI_HANDLES_H_
