// SPDX-License-Identifier: Apache-2.0
// Executor: who runs the parts of an op. Ops own no threads (ADR 11); the caller passes one.
//
// Results never depend on the executor: ops split work by length, never by thread count.
// Thread-safety: ParallelFor may be called from several threads at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace kvstrata {

class Executor {
 public:
  virtual ~Executor() = default;

  // Calls fn(i) once for each i in [0, n), in any order, from any threads; returns after the last.
  // fn must not throw and must not call ParallelFor.
  virtual void ParallelFor(int64_t n, const std::function<void(int64_t)>& fn) = 0;

  // Threads that may run fn at the same time, the caller's included; >= 1.
  virtual int concurrency() const = 0;
};

// Runs everything on the calling thread. Never null; lives for the process.
Executor& InlineExecutor();

// A pool of `threads - 1` workers plus the caller. REQUIRES: threads >= 1.
// Workers spin briefly for the next ParallelFor, then sleep.
std::unique_ptr<Executor> NewThreadPool(int threads);

}  // namespace kvstrata
