// SPDX-License-Identifier: Apache-2.0
// What a disk tier (disk_tier.h) is made with, and what it tells of itself. Plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/tier/disk/files/io_queue.h"

namespace kvstrata {

struct DiskTierOptions {
  std::string directory;
  uint64_t budget_bytes = 0;              // bytes of all files
  uint64_t segment_bytes = 256ull << 20;  // a value must fit; never changes for a directory
  uint32_t depth = 64;                    // requests in flight, of reads and of writes
  std::function<IoQueueChoice(uint32_t depth)> new_queue = NewIoQueue;
  // Hears of each value that left because its slot could not be read or failed its check; from the
  // thread that read, without locks. Null: nobody does.
  std::function<void(std::string_view key, uint32_t segment, const Status& why)> lost;
};

struct DiskTierStats {
  bool direct = false;  // O_DIRECT
  std::string queue;    // "io_uring", "pread"
  Status degraded;      // why no io_uring, or fewer segments than the budget allows; OK: neither
  uint64_t capacity_bytes = 0, used_bytes = 0;  // slots whole
  uint64_t entries = 0;
  uint64_t corrupt = 0;    // values that failed a check, and left
  uint64_t io_errors = 0;  // errors of the device
  uint64_t deadlines = 0;  // requests that it did not answer in time
  // The last of both: "segment.3: read 0 of 4096 bytes at offset 8192: Input/output error"; "":
  // none.
  std::string last_error;
  int64_t last_error_time_us = 0;  // since 1970, UTC
  uint64_t lost_flushes = 0;
  uint32_t stopped_segments = 0;
  bool breaker_open = false;           // left alone; the next two are 0 when it is not
  int64_t left_alone_since_us = 0;     // since 1970, UTC
  std::chrono::microseconds retry{0};  // until whoever asks it then is let through
  uint64_t scanned_segments = 0;       // at start, because no checkpoint covered them
  uint64_t cut_segments = 0;           // at start: their files were too long
};

}  // namespace kvstrata
