// SPDX-License-Identifier: Apache-2.0
// KnownValues: which values of servers this process saw lately, and their sizes, for whoever asks
// without waiting. Bounded in number and age; no promise. Thread-safety: any thread. Cost: a map's
// look-up; at most 16 MiB.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <string_view>

#include "base/sync.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

class KnownValues {
 public:
  explicit KnownValues(std::chrono::milliseconds holds) : holds_(holds) {}

  void Saw(std::string_view key, const ValueSizes& sizes) KVS_EXCLUDES(mu_);
  void Lost(std::string_view key) KVS_EXCLUDES(mu_);
  // None: it is not known.
  ValueSizes Find(std::string_view key) const KVS_EXCLUDES(mu_);

 private:
  static constexpr size_t kMost = 65536;
  struct Value {
    std::vector<uint64_t> sizes;
    Deadline until{};
    std::list<std::string_view>::iterator age;
  };

  const std::chrono::milliseconds holds_;
  mutable Mutex mu_;
  std::map<std::string, Value, std::less<>> values_ KVS_GUARDED_BY(mu_);
  std::list<std::string_view> by_age_ KVS_GUARDED_BY(mu_);  // keys of `values_`, oldest first
};

}  // namespace kvstrata
