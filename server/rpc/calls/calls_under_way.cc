// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/calls_under_way.h"

namespace kvstrata {

void CallsUnderWay::Begin() {
  if (all_ != nullptr) all_->Begin();
  MutexLock lock(mu_);
  ++calls_;
}

void CallsUnderWay::End() {
  CallsUnderWay* const all = all_;
  {
    MutexLock lock(mu_);
    if (--calls_ == 0) none_.notify_all();  // under the lock: the waiter may end this object
  }
  if (all != nullptr) all->End();
}

size_t CallsUnderWay::calls() const {
  MutexLock lock(mu_);
  return calls_;
}

bool CallsUnderWay::AwaitNone(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mu_.native());
  return none_.wait_until(lock, deadline,
                          [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return calls_ == 0; });
}

}  // namespace kvstrata
