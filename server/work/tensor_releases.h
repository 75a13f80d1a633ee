// SPDX-License-Identifier: Apache-2.0
// TensorReleases: destroys engines' tensors on disposable threads. Unmapping memory of a process
// that died can hang in the GPU's driver, for good: nobody who serves may wait for it, and what
// hangs must not hold up the next. One thread destroys what was put, one after the other; when one
// of them takes longer than `deadline` that thread is given up, with what it destroys, and another
// goes on.
//
// Ownership: takes what it is given. Threads that hang outlive it, and end with the process.
// Thread-safety: all methods, from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "server/memory/tensor_memory.h"

namespace kvstrata {

class TensorReleases {
 public:
  explicit TensorReleases(std::chrono::milliseconds deadline);

  void Put(TensorMemory* memory);
  // Gives up what has taken too long; how many there are that were given up since the start and are
  // not destroyed. Called now and then while anything is pending.
  size_t GiveUpLate();
  // What was put and is not destroyed yet.
  size_t pending() const;
  // Waits until nothing is pending, or until `until`.
  void Await(std::chrono::steady_clock::time_point until);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace kvstrata
