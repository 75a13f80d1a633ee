// SPDX-License-Identifier: Apache-2.0
// RemoteNames: what a tenant's values are called in a remote tier (docs/remote_format.md, "Names").
//
// kv1:{PLACE}:H:STRIPE, of 56 bytes and the stripe's number. PLACE and H are HMACs under keys of
// the tenant, so that neither tells anything about key, place or prompt to who has no secret.
// {PLACE} is a hash tag: what is equal there lies in one slot of a Redis Cluster. Thread-safety:
// const methods from any thread. Cost: two HMACs of a block, 0.5 us.
#ifndef KVSTRATA_SERVER_TIER_REMOTE_REMOTE_NAMES_H_
#define KVSTRATA_SERVER_TIER_REMOTE_REMOTE_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/tier/remote/hmac_key.h"
#include "server/tier/remote/remote_secret.h"

namespace kvstrata::remote {

// For SCAN: the first stripe of every value, of all tenants.
inline constexpr std::string_view kFirstStripes = "kv1:{*}:*:0";

class RemoteNames {
 public:
  explicit RemoteNames(const TenantKeys& keys) : place_(keys.place), name_(keys.name) {}

  // `place` empty: the key takes its place.
  std::string NameOf(std::string_view key, std::string_view place, uint32_t stripe) const;

 private:
  HmacKey place_, name_;
};

// The stripe's number, of what is such a name; nothing of what is none.
std::optional<uint32_t> StripeOfName(std::string_view name);

}  // namespace kvstrata::remote

#endif  // KVSTRATA_SERVER_TIER_REMOTE_REMOTE_NAMES_H_
