// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/value_messages.h"

namespace kvstrata {

Status CheckValueKey(const std::string& key) {
  if (key.size() == 32 || (key.starts_with("pin/") && key.size() == 20)) return OkStatus();
  if (IsChunkKey(key)) return OkStatus();
  return InvalidArgument("VALUE_KEY",
                         "a key of " + std::to_string(key.size()) +
                             " bytes; allowed: 32, pin/ and 16 digits, or chunk/ and 32");
}

Status CheckFilter(const v1::ListValuesRequest& request) {
  const std::string& tier = request.tier();
  if (!tier.empty() && tier != "device" && tier != "host" && tier != "disk") {
    return InvalidArgument("VALUE_FILTER", "tier '" + tier + "'; allowed: device, host, disk");
  }
  if (request.limit() <= kMaxListed) return OkStatus();
  return InvalidArgument("VALUE_FILTER", "limit " + std::to_string(request.limit()) +
                                             "; allowed: 1 .. " + std::to_string(kMaxListed));
}

void Write(const ValueInfo& value, v1::Value* out) {
  out->set_key(value.key);
  out->set_kind(std::string(NameOf(value.kind)));
  out->set_model(value.model);
  out->set_tokens(value.tokens);
  out->set_bytes(value.bytes);
  for (const Tier tier : value.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_pinned(value.pinned);
}

void Write(const std::string& key, const ValueVerdict& verdict, v1::ValueVerdict* out) {
  out->set_key(key);
  out->set_verdict(std::string(NameOf(verdict.state)));
  for (const Tier tier : verdict.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_detail(verdict.detail);
}

}  // namespace kvstrata
