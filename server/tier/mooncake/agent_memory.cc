// SPDX-License-Identifier: Apache-2.0
#include "server/tier/mooncake/agent_memory.h"

#include <algorithm>
#include <utility>

#include "server/memory/sealed_memfd.h"

namespace kvstrata {

struct AgentMemory::Taken : AgentBlock {
  ~Taken() {
    if (memory != nullptr) memory->GiveBack(offset, bytes.size());
  }
  std::shared_ptr<AgentMemory> memory;
};

Result<std::shared_ptr<AgentMemory>> AgentMemory::Map(uint64_t bytes) {
  KVS_ASSIGN_OR_RETURN(MappedMemory memory, MapSealedMemfd("kvstrata-agent", bytes));
  return std::shared_ptr<AgentMemory>(new AgentMemory(std::move(memory)));
}

AgentMemory::AgentMemory(MappedMemory memory) : memory_(std::move(memory)) {
  gaps_[0] = memory_.bytes;
}

AgentMemory::~AgentMemory() { UnmapSealedMemfd(std::move(memory_)); }

uint64_t AgentMemory::taken() const {
  MutexLock lock(mu_);
  return taken_;
}

uint64_t AgentMemory::most_taken() const {
  MutexLock lock(mu_);
  return most_taken_;
}

std::shared_ptr<AgentBlock> AgentMemory::TakeNow(uint64_t bytes) {
  const auto gap = std::ranges::find_if(gaps_, [&](const auto& g) { return g.second >= bytes; });
  if (gap == gaps_.end()) return nullptr;
  const auto [offset, size] = *gap;
  const auto block = std::make_shared<Taken>();
  if (size > bytes) gaps_[offset + bytes] = size - bytes;
  gaps_.erase(offset);
  taken_ += bytes;
  most_taken_ = std::max(most_taken_, taken_);
  block->offset = offset;
  block->bytes = {memory_.base + offset, bytes};
  block->memory = shared_from_this();
  return block;
}

std::shared_ptr<AgentBlock> AgentMemory::Take(uint64_t bytes, Deadline deadline) {
  bytes = WholeUnits(std::max<uint64_t>(bytes, 1));
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    for (;;) {
      std::shared_ptr<AgentBlock> block = TakeNow(bytes);
      if (block != nullptr || bytes > memory_.bytes) return block;
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) return TakeNow(bytes);
    }
  }();
}

void AgentMemory::GiveBack(uint64_t offset, uint64_t bytes) {
  MutexLock lock(mu_);
  taken_ -= bytes;
  const auto after = gaps_.find(offset + bytes);
  if (after != gaps_.end()) {
    bytes += after->second;
    gaps_.erase(after);
  }
  const auto next = gaps_.lower_bound(offset);
  const auto before = next == gaps_.begin() ? gaps_.end() : std::prev(next);
  if (before != gaps_.end() && before->first + before->second == offset) {
    before->second += bytes;
  } else {
    gaps_[offset] = bytes;
  }
  changed_.notify_all();
}

}  // namespace kvstrata
