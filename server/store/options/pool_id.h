// SPDX-License-Identifier: Apache-2.0
// PoolId: a pool, the memory of one device or of the host. Plain values.
#ifndef KVSTRATA_SERVER_STORE_OPTIONS_POOL_ID_H_
#define KVSTRATA_SERVER_STORE_OPTIONS_POOL_ID_H_

#include <compare>
#include <cstddef>
#include <cstdint>

#include "kernels/pages/tier.h"

namespace kvstrata {

// A pool: that of the host, or that of a device, by its number in the store.
class PoolId {
 public:
  static constexpr uint32_t kMaxDevices = 64;

  static constexpr PoolId Host() { return PoolId(0); }
  static constexpr PoolId Device(uint32_t device) { return PoolId(device + 1); }

  Tier tier() const { return index_ == 0 ? Tier::kHost : Tier::kDevice; }
  uint32_t device() const { return index_ - 1; }  // REQUIRES: tier() is kDevice
  size_t index() const { return index_; }         // below 1 + the number of devices
  auto operator<=>(const PoolId&) const = default;

 private:
  explicit constexpr PoolId(uint32_t index) : index_(index) {}
  uint32_t index_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_OPTIONS_POOL_ID_H_
