// SPDX-License-Identifier: Apache-2.0
// Answers: what somebody waits to hear, found out under the store's lock and told without it.
//
// Ownership: keeps each answer until it is told, once. Thread-safety: Add under the store's lock;
// Tell from any thread, which it tells in.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

class Answers {
 public:
  explicit Answers(StoreMutex& mu) : mu_(mu) {}

  void Add(SettleDone done, Status status) KVS_REQUIRES(store_lock) {
    answers_.emplace_back(std::move(done), std::move(status));
  }
  // Tells all that there is to tell. After everything that may have closed or finished something.
  void Tell() KVS_EXCLUDES(store_lock) {
    std::vector<std::pair<SettleDone, Status>> answers;
    {
      StoreLock lock(mu_);
      answers.swap(answers_);
    }
    for (const auto& [done, status] : answers) done(status);
  }
  // What `work` returns, and then Tell.
  template <typename Work>
  auto TellAfter(Work&& work) KVS_EXCLUDES(store_lock) {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      Tell();
    } else {
      auto result = work();
      Tell();
      return result;
    }
  }

 private:
  StoreMutex& mu_;
  std::vector<std::pair<SettleDone, Status>> answers_ KVS_GUARDED_BY(store_lock);
};

}  // namespace kvstrata
