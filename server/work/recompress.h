// SPDX-License-Identifier: Apache-2.0
// RecompressQueue: the threads that recompress sequences away from decode (docs/design.md,
// "Recompression") and build what was asked for (build.h), and the bounded queue in front of them.
//
// Order: first come, first served; while the device pool is above its watermark, who releases most
// bytes first, which builds do not. What the queue has no room for stays due in the store and is
// offered again when there is. A worker never holds a lock while it computes or copies; decode
// waits for nobody here. A worker looks for refused and failed sequences every `kRetryEvery`.
//
// Ownership: borrows the store, which must outlive it, and the backend.
// Thread-safety: Offer and Withdraw from any thread (the store's, under its lock); one lock of its
// own, held for a look at the queue and never while the store is called.
// Errors: a run that fails is logged with its sequence, kept by the store and shown by
// `kvstrata work ls`; nothing is thrown away.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "kernels/backend/backend.h"
#include "kernels/cpu/executor.h"
#include "server/store/store.h"

namespace kvstrata {

struct WorkOptions {
  uint32_t threads = 1;     // workers; 0: none, rows stay raw
  uint32_t queue = 1024;    // sequences that may wait
  uint32_t op_threads = 1;  // threads of one worker's ops
  std::vector<int> cpus;    // that workers and their ops may run on; empty: all
};

class RecompressQueue final : public RecompressSink {
 public:
  static constexpr std::chrono::milliseconds kRetryEvery{200};

  // `gpu_packers`: of the GPUs that the device pools are on, by the store's numbers, borrowed;
  // empty: there is none.
  RecompressQueue(const WorkOptions& options, Store* store, const Backend* backend,
                  std::vector<const GpuPackers*> gpu_packers = {});
  // Stop.
  ~RecompressQueue() override;
  // Cancels what runs (of a build after the piece under way), drops what waits, joins. The store
  // answers waiting settles. Idempotent.
  void Stop() KVS_EXCLUDES(mu_);

  bool Offer(uint64_t sequence, int64_t releasable_bytes) override KVS_EXCLUDES(mu_);
  void Withdraw(uint64_t sequence) override KVS_EXCLUDES(mu_);
  bool OfferBuild(uint64_t sequence) override KVS_EXCLUDES(mu_);
  void WithdrawBuild(uint64_t sequence) override KVS_EXCLUDES(mu_);

  size_t waiting() const KVS_EXCLUDES(mu_);

 private:
  struct Entry {
    uint64_t sequence = 0;
    int64_t releasable_bytes = 0;
    bool build = false;  // else a recompression
  };

  void Run() KVS_EXCLUDES(mu_);
  bool Push(Entry entry) KVS_EXCLUDES(mu_);
  void Erase(uint64_t sequence, bool build) KVS_EXCLUDES(mu_);
  // The next sequence; 0: none came in time, or the queue stops.
  Entry Next() KVS_EXCLUDES(mu_);
  bool stopping() const KVS_EXCLUDES(mu_);
  void Recompress(uint64_t sequence, Executor* executor);

  const WorkOptions options_;
  Store* const store_;
  const Backend* const backend_;
  const std::vector<const GpuPackers*> gpu_packers_;

  mutable Mutex mu_;
  std::condition_variable wake_;
  std::deque<Entry> entries_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
