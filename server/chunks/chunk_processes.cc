// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_processes.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace kvstrata {

bool ChunkProcesses::Add(uint32_t process, UniqueFd pidfd) {
  if (watched_.contains(process)) return true;
  const uint64_t number = ++numbers_;
  if (!events_->Watch(pidfd.get(), EventPoll::kPidfd, number, EPOLLIN)) return false;
  watched_[process] = {std::move(pidfd), number};
  return true;
}

bool ChunkProcesses::IsStale(uint32_t process) const {
  const auto found = watched_.find(process);
  if (found == watched_.end()) return false;
  pollfd dead{found->second.pidfd.get(), POLLIN, 0};
  return poll(&dead, 1, 0) != 0;
}

std::optional<uint32_t> ChunkProcesses::ProcessOf(uint64_t number) const {
  const auto found = std::ranges::find_if(
      watched_, [number](const auto& entry) { return entry.second.number == number; });
  return found == watched_.end() ? std::nullopt : std::optional(found->first);
}

void ChunkProcesses::Remove(uint32_t process) {
  const auto found = watched_.find(process);
  if (found == watched_.end()) return;
  events_->Unwatch(found->second.pidfd.get());
  watched_.erase(found);
}

void ChunkProcesses::RemoveUnless(const std::function<bool(uint32_t process)>& wanted) {
  std::erase_if(watched_, [&](const auto& entry) {
    if (wanted(entry.first)) return false;
    events_->Unwatch(entry.second.pidfd.get());
    return true;
  });
}

}  // namespace kvstrata
