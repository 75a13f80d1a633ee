// SPDX-License-Identifier: Apache-2.0
// ChunkBoard: the numbers of chunks as of the last time that something happened, for whoever asks;
// and the log's line when engines begin to get no credits (event=chunks_full).
//
// Thread-safety: Put is the loop's; Get from any thread. Cost: a lock, and a copy.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_BOARD_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_BOARD_H_

#include <chrono>
#include <cstdint>
#include <utility>

#include "base/sync.h"
#include "server/chunks/room/chunk_numbers.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class ChunkBoard {
 public:
  void Put(const ChunkNumbers& numbers) KVS_EXCLUDES(mu_) {
    TellFull(numbers);
    MutexLock lock(mu_);
    numbers_ = numbers;
  }
  ChunkNumbers Get() const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return numbers_;
  }

 private:
  void TellFull(const ChunkNumbers& now) {
    const bool was = std::exchange(full_, now.starved > 0);
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    const auto second = std::chrono::duration_cast<std::chrono::seconds>(time).count();
    uint64_t suppressed = 0;
    if (was || !full_ || !log_.Allow(second, &suppressed)) return;
    LogEvent(LogLevel::kWarn, "chunks_full",
             {{"leased_bytes", now.leased.bytes},
              {"credited_bytes", now.of(ChunkState::kCredited).bytes},
              {"suppressed", suppressed}});
  }

  LogLimiter log_{1};
  bool full_ = false;
  mutable Mutex mu_;
  ChunkNumbers numbers_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_BOARD_H_
