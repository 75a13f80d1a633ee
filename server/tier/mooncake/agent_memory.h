// SPDX-License-Identifier: Apache-2.0
// AgentMemory: a memfd that this process shares with an agent, in blocks of whole pages.
//
// A block is taken for a call and comes back with its last holder; while the agent may touch it,
// somebody holds it. Thread-safety: all methods, from any thread; blocks may go in any. Blocking:
// Take, until there is room. Cost: a look at each gap.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/sync.h"
#include "server/memory/memory_resource.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct AgentBlock {
  uint64_t offset = 0;  // in the memfd
  std::span<std::byte> bytes;
};

class AgentMemory : public std::enable_shared_from_this<AgentMemory> {
 public:
  static constexpr uint64_t kUnit = 4096;
  static uint64_t WholeUnits(uint64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

  // `bytes`: a multiple of 4096. Errors of MapSealedMemfd.
  static Result<std::shared_ptr<AgentMemory>> Map(uint64_t bytes);
  ~AgentMemory();

  int fd() const { return memory_.fd.get(); }
  uint64_t bytes() const { return memory_.bytes; }
  // Now, and the most that it was.
  uint64_t taken() const KVS_EXCLUDES(mu_);
  uint64_t most_taken() const KVS_EXCLUDES(mu_);
  // At least so many bytes. Null: there was no room by the deadline.
  std::shared_ptr<AgentBlock> Take(uint64_t bytes, Deadline deadline) KVS_EXCLUDES(mu_);

 private:
  struct Taken;
  explicit AgentMemory(MappedMemory memory);
  // Null: no gap is large enough.
  std::shared_ptr<AgentBlock> TakeNow(uint64_t bytes) KVS_REQUIRES(mu_);
  void GiveBack(uint64_t offset, uint64_t bytes) KVS_EXCLUDES(mu_);

  MappedMemory memory_;
  mutable Mutex mu_;
  std::condition_variable changed_;
  std::map<uint64_t, uint64_t> gaps_ KVS_GUARDED_BY(mu_);  // bytes by offset; none touch
  uint64_t taken_ KVS_GUARDED_BY(mu_) = 0, most_taken_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace kvstrata
