// SPDX-License-Identifier: Apache-2.0
// Mover: the thread ("kvs-move") that moves pages in the background: what sequences opened on to
// the device, and what nobody uses away from pools above their high mark (Moves::MoveSome, which
// decides). No allocation, open or step waits for it.
//
// Rate: pieces of 4 MiB, or a page; behind each it waits for as long as the piece may take at
// `bytes_per_second`, so that an engine's own copies and kernels keep the bus and the memory.
// Ownership: borrows the store, which outlives it; sets and unsets itself as its move sink.
// Thread-safety: all methods, from any thread. Errors: none; what cannot be copied stays.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <thread>

#include "base/sync.h"
#include "server/store/store.h"

namespace kvstrata {

struct MoverOptions {
  uint64_t bytes_per_second = uint64_t{2} << 30;  // 0: as fast as it goes
};

class Mover {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

  Mover(const MoverOptions& options, Store* store);
  // Ends after the piece under way.
  ~Mover();
  // From the next piece on.
  void SetRate(uint64_t bytes_per_second) { bytes_per_second_ = bytes_per_second; }

 private:
  void Run() KVS_EXCLUDES(mu_);
  // False: the end.
  bool AwaitWork() KVS_EXCLUDES(mu_);
  // Waits until `at`; false: the end.
  bool AwaitTime(std::chrono::steady_clock::time_point at) KVS_EXCLUDES(mu_);

  std::atomic<uint64_t> bytes_per_second_;
  Store* const store_;

  Mutex mu_;
  std::condition_variable wake_;
  bool work_ KVS_GUARDED_BY(mu_) = false;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvstrata
