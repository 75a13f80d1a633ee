// SPDX-License-Identifier: Apache-2.0
// ChunkProcesses: the processes behind connections of the chunk socket, each watched until it is
// dead or of no interest, by its pidfd.
//
// Thread-safety: none; the loop's. Cost: a system call or two.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_PROCESSES_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_PROCESSES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "base/unique_fd.h"
#include "server/sockets/event_poll.h"

namespace kvstrata {

class ChunkProcesses {
 public:
  explicit ChunkProcesses(EventPoll* events) : events_(events) {}

  // `pidfd` of a live process is watched from now on, if it is not already. False: the kernel
  // watches no more. REQUIRES: !IsStale(process).
  bool Add(uint32_t process, UniqueFd pidfd);
  // Whether a process of this number was watched that is dead: the number is another's now.
  bool IsStale(uint32_t process) const;
  // Whose death an event with that number tells; nothing: it is watched no more.
  std::optional<uint32_t> ProcessOf(uint64_t number) const;
  void Remove(uint32_t process);
  // Those that `wanted` is false for.
  void RemoveUnless(const std::function<bool(uint32_t process)>& wanted);
  size_t size() const { return watched_.size(); }

 private:
  struct Watched {
    UniqueFd pidfd;
    uint64_t number = 0;  // its events have it
  };

  EventPoll* const events_;
  uint64_t numbers_ = 0;
  std::map<uint32_t, Watched> watched_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_PROCESSES_H_
