// SPDX-License-Identifier: Apache-2.0
// FarTier: one node's way to a tier that nodes share, for tests: asynchronous, knows nothing by
// itself, and fails as it is told. A value is found under its key and place together, so that who
// names another place misses it.
//
// Ownership: borrows the shared tier. Thread-safety: all methods, from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "server/tier/call_queue.h"
#include "server/tier/value_tier.h"

namespace kvstrata::testing {

class FarTier final : public ValueTier {
 public:
  explicit FarTier(ValueTier* shared);
  ~FarTier() override;

  void Probe(std::span<TierProbe> probes, TierCall call) override;
  void Get(std::span<TierGet> gets, TierCall call) override;
  void Put(std::span<TierPut> puts, TierCall call) override;
  void Forget(std::span<TierForget> keys, TierCall call) override;
  void Walk(TierWalk* walk, TierCall call) override;
  TierStats Stats() const override { return shared_->Stats(); }

  // From now on calls of that kind are answered by their deadline and no sooner, until Release.
  // Buffers of gets stay in use until then.
  void HoldProbes() { Hold(&probes_held_); }
  void HoldGets() { Hold(&gets_held_); }
  void HoldPuts() { Hold(&puts_held_); }
  void Release();
  // Each call waits so long first.
  void Delay(std::chrono::microseconds by) { delay_ = by; }
  // Gets miss it, though probes find it.
  void Lose(const std::string& key);
  // Probes say that everything is there, of this size.
  void LieAbout(uint64_t size) { lie_ = size; }

  uint64_t probes() const { return probes_; }  // calls
  uint64_t probed() const { return probed_; }  // keys
  size_t kept() const;                         // buffers of gets that are in use

 private:
  enum Lane : size_t { kProbes, kGets, kPuts, kLanes };

  void Hold(bool* what);
  // Waits as it is told; OK: the call may go on.
  Status Arrive(const bool* held, const TierCall& call);
  template <typename Request>
  void Add(Lane lane, std::span<Request> requests, TierCall call,
           std::function<void(const TierCall&)> run);

  ValueTier* const shared_;
  mutable std::mutex mu_;
  std::condition_variable_any released_;
  bool probes_held_ = false, gets_held_ = false, puts_held_ = false;
  std::set<std::string> lost_;
  std::vector<std::shared_ptr<void>> in_use_;
  std::atomic<std::chrono::microseconds> delay_{};
  std::atomic<uint64_t> lie_ = 0, probes_ = 0, probed_ = 0;
  CallQueue queue_{kLanes};
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata::testing
