// SPDX-License-Identifier: Apache-2.0
// CallsUnderWay: how many calls have begun and are not over, so that a daemon that stops can let
// them end. A call is over when gRPC is done with its reactor: its answer is with the kernel.
//
// CallUnderWay: one of them; a member of the call's reactor. UnaryCall: a reactor that counts, for
// calls of one answer.
//
// Thread-safety: all of it, from any thread. Ownership: calls borrow the count, which outlives
// them; a UnaryCall owns itself until gRPC calls OnDone. Cost: a short lock at each end of a call.
#ifndef KVSTRATA_SERVER_RPC_CALLS_CALLS_UNDER_WAY_H_
#define KVSTRATA_SERVER_RPC_CALLS_CALLS_UNDER_WAY_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>

#include "base/sync.h"

namespace kvstrata {

class CallsUnderWay {
 public:
  // `all`: counts these calls too, with those of others; it outlives this.
  explicit CallsUnderWay(CallsUnderWay* all = nullptr) : all_(all) {}
  void Begin() KVS_EXCLUDES(mu_);
  void End() KVS_EXCLUDES(mu_);
  size_t calls() const KVS_EXCLUDES(mu_);
  // Blocks until there is none; false: `deadline` came first.
  bool AwaitNone(std::chrono::steady_clock::time_point deadline) KVS_EXCLUDES(mu_);

 private:
  CallsUnderWay* const all_;
  mutable Mutex mu_;
  std::condition_variable none_;
  size_t calls_ KVS_GUARDED_BY(mu_) = 0;
};

class CallUnderWay {
 public:
  explicit CallUnderWay(CallsUnderWay* calls) : calls_(calls) { calls_->Begin(); }
  ~CallUnderWay() { End(); }
  CallUnderWay(const CallUnderWay&) = delete;
  CallUnderWay& operator=(const CallUnderWay&) = delete;

  // It is over before this object is. One thread.
  void End() {
    if (calls_ != nullptr) calls_->End();
    calls_ = nullptr;
  }

 private:
  CallsUnderWay* calls_;
};

class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryCall(CallsUnderWay* calls) : under_way_(calls) {}
  void OnDone() override { delete this; }

 private:
  CallUnderWay under_way_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_CALLS_UNDER_WAY_H_
