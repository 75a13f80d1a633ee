// SPDX-License-Identifier: Apache-2.0
// IoQueue: reads, writes and flushes of files in flight together; the seam under the disk tier.
//
// Implementations: uring_queue.cc (io_uring with registered files and memory) and pread_queue.cc
// (threads, where io_uring is forbidden). Recording and faults are adaptors of the tests.
// Ownership: borrows descriptors, and the memory of a request until its result was returned. A wait
// ends at its deadline, the request does not: its memory stays borrowed, if need be for good, as a
// device that does not answer may write to it later. The destructor waits a second at most.
// Thread-safety: one thread at a time. Units: bytes; O_DIRECT files want multiples of 4096 (memory,
// offset and length). Errors: -errno in a result; a result may be short.
// Cost: one system call for each Submit (io_uring), one for each request (threads).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"

namespace kvstrata {

using Deadline = std::chrono::steady_clock::time_point;

struct IoRequest {
  enum class Op : uint8_t {
    kRead,
    kWrite,
    kFlush,  // fdatasync of the whole file: of writes that have completed before it was submitted
  };
  Op op = Op::kRead;
  uint32_t file = 0;
  uint32_t bytes = 0;
  uint64_t offset = 0;
  std::byte* data = nullptr;
  uint64_t tag = 0;  // comes back with the result
};

struct IoResult {
  uint64_t tag = 0;
  int32_t result = 0;  // bytes done, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;

  // The number by which requests name `fd`, which must stay open. RESOURCE_EXHAUSTED IO_FILES.
  virtual Result<uint32_t> AddFile(int fd) = 0;

  // A hint that requests will use this memory: io_uring locks it and spares the kernel its pages'
  // look-up. It stays mapped as it is for as long as the queue lives.
  virtual void AddMemory(std::byte* base, uint64_t bytes) = 0;

  // Starts the first n requests and returns n: fewer than given when `depth` are in flight then.
  virtual size_t Submit(std::span<const IoRequest> requests) = 0;

  // Results in any order: waits for one at least, until `deadline` (the past: only looks), returns
  // how many there are. 0: none came in time, or none is in flight.
  virtual size_t Wait(std::span<IoResult> results, Deadline deadline) = 0;

  virtual std::string_view name() const = 0;  // "io_uring", "pread"
};

inline constexpr uint32_t kIoFiles = 8192;  // that a queue takes at most

// UNAVAILABLE IO_URING when the kernel, a seccomp filter or a limit forbids it.
Result<std::unique_ptr<IoQueue>> NewUringQueue(uint32_t depth);

// `depth` threads.
std::unique_ptr<IoQueue> NewPreadQueue(uint32_t depth);

// io_uring, or threads and the reason why.
struct IoQueueChoice {
  std::unique_ptr<IoQueue> queue;
  Status degraded;  // OK: it is io_uring
};
IoQueueChoice NewIoQueue(uint32_t depth);

}  // namespace kvstrata
