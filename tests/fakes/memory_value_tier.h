// SPDX-License-Identifier: Apache-2.0
// MemoryValueTier: a ValueTier in this process's memory, for tests of what is above one. Bounded:
// it evicts what was used longest ago. Checks what it returns.
//
// Beyond the interface it can be held, so that calls meet a tier that does not answer, and damage a
// value. Thread-safety: all methods, from any thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "server/tier/call_queue.h"
#include "server/tier/value_tier.h"

namespace kvstrata::testing {

class MemoryValueTier final : public ValueTier {
 public:
  explicit MemoryValueTier(uint64_t capacity_bytes);
  ~MemoryValueTier() override;

  void Probe(std::span<TierProbe> probes, TierCall call) override;
  void Get(std::span<TierGet> gets, TierCall call) override;
  void Put(std::span<TierPut> puts, TierCall call) override;
  void Forget(std::span<TierForget> keys, TierCall call) override;
  void Walk(TierWalk* walk, TierCall call) override;
  TierStats Stats() const override;

  // Between the two no request is answered.
  void Hold();
  void Release();
  // Flips a bit of a value that is there.
  void Damage(const std::string& key);

 private:
  struct Value {
    std::vector<std::string> buffers;
    std::vector<size_t> checksums;
    uint64_t number = 0;  // order of puts
    std::list<std::string>::iterator use;
    uint64_t bytes() const;
  };
  using Values = std::map<std::string, Value, std::less<>>;

  // Runs `one` for each request with the lock held, until the call may not go on.
  template <typename Request, typename One>
  void ForEach(std::span<Request> requests, const TierCall& call, const One& one);
  template <typename Request, typename One>
  void Add(size_t lane, std::span<Request> requests, TierCall call, One one);
  Status GetOne(TierGet* get);
  Status PutOne(const TierPut& put);
  void Erase(Values::iterator it);

  const uint64_t capacity_;
  mutable std::mutex mu_;
  std::condition_variable_any released_;
  bool held_ = false;
  Values values_;
  std::map<uint64_t, std::string> by_number_;
  std::list<std::string> uses_;  // the last one first
  uint64_t next_number_ = 1;
  TierStats stats_;
  CallQueue queue_{2};
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata::testing
