// SPDX-License-Identifier: Apache-2.0
// TenantRates: how many bytes a second each tenant may move, by a TokenBucket for each, so that
// what one moves is nothing to the others.
//
// It tells who was refused, since the start. Bounds: kMost of those, and kMost buckets. One that
// has filled up again is as good as a new one and goes when there is another tenant; one more that
// moves bytes within that second moves none. Thread-safety: none; its owner's lock guards it. Cost:
// a map's look-up; with all buckets in use a look at each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "server/work/rates/token_bucket.h"

namespace kvstrata {

// Bytes a second; 0: no limit.
struct TenantRatesOptions {
  uint64_t usual = 0;
  std::map<std::string, uint64_t, std::less<>> tenants;  // that have a rate of their own
  bool operator==(const TenantRatesOptions&) const = default;
};

class TenantRates {
 public:
  static constexpr size_t kMost = 1024;
  using Refused = std::map<std::string, uint64_t, std::less<>>;

  explicit TenantRates(TenantRatesOptions options) : options_(std::move(options)) {}

  // With another rate all buckets are full again.
  void Set(const TenantRatesOptions& options) {
    if (options == options_) return;
    options_ = options;
    buckets_.clear();
  }
  // As TokenBucket's. `tenant` "": an operator asks, who has no rate.
  bool Take(std::string_view tenant, uint64_t bytes, TokenBucket::Time now) {
    if (TakeOf(tenant, bytes, now)) return true;
    const auto at = refused_.find(tenant);
    if (at != refused_.end()) ++at->second;
    if (at == refused_.end() && refused_.size() < kMost) refused_.emplace(tenant, 1);
    return false;
  }
  size_t buckets() const { return buckets_.size(); }
  // How often each was refused since the start, of the first kMost that were.
  const Refused& refused() const { return refused_; }

 private:
  bool TakeOf(std::string_view tenant, uint64_t bytes, TokenBucket::Time now) {
    const auto own = options_.tenants.find(tenant);
    const uint64_t rate = own == options_.tenants.end() ? options_.usual : own->second;
    if (tenant.empty() || rate == 0) return true;
    auto at = buckets_.find(tenant);
    if (at == buckets_.end()) {
      if (buckets_.size() >= kMost) {
        std::erase_if(buckets_, [now](const auto& bucket) { return bucket.second.IsFull(now); });
      }
      if (buckets_.size() >= kMost) return false;
      at = buckets_.emplace(tenant, TokenBucket(rate)).first;
    }
    return at->second.Take(bytes, now);
  }

  TenantRatesOptions options_;
  std::map<std::string, TokenBucket, std::less<>> buckets_;
  Refused refused_;
};

}  // namespace kvstrata
