// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/known_values.h"

namespace kvstrata {

void KnownValues::Saw(std::string_view key, const ValueSizes& sizes) {
  MutexLock lock(mu_);
  auto it = values_.find(key);
  if (it == values_.end()) {
    if (values_.size() == kMost) {
      values_.erase(values_.find(by_age_.front()));
      by_age_.pop_front();
    }
    it = values_.emplace(key, Value{}).first;
    it->second.age = by_age_.insert(by_age_.end(), it->first);
  } else {
    by_age_.splice(by_age_.end(), by_age_, it->second.age);
  }
  it->second.sizes.assign(sizes.all().begin(), sizes.all().end());
  it->second.until = std::chrono::steady_clock::now() + holds_;
}

void KnownValues::Lost(std::string_view key) {
  MutexLock lock(mu_);
  const auto it = values_.find(key);
  if (it == values_.end()) return;
  by_age_.erase(it->second.age);
  values_.erase(it);
}

ValueSizes KnownValues::Find(std::string_view key) const {
  MutexLock lock(mu_);
  const auto it = values_.find(key);
  if (it == values_.end() || it->second.until < std::chrono::steady_clock::now()) return {};
  return ValueSizes(it->second.sizes);
}

}  // namespace kvstrata
