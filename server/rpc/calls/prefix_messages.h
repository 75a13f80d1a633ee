// SPDX-License-Identifier: Apache-2.0
// What Control.Lookup and Admin.LookupPrefix share: page keys in, a hit out. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "kvstrata/v1/control.pb.h"
#include "server/store/store.h"

namespace kvstrata {

// INVALID_ARGUMENT PAGE_KEY.
Result<PageKey> ReadPageKey(const std::string& bytes);

// The keys of a request that has either tokens or page_keys; empty if it has tokens.
// INVALID_ARGUMENT PAGE_KEY, LOOKUP_WHAT: a plan's open is of tokens.
template <typename Request>
Result<std::vector<PageKey>> ReadPageKeys(const Request& request) {
  if (request.tokens_size() > 0 && request.page_keys_size() > 0) {
    return InvalidArgument("LOOKUP_WHAT", "tokens and page_keys are given; allowed: one of them");
  }
  if constexpr (requires { request.plan(); }) {
    if (!request.plan().empty() && request.page_keys_size() > 0) {
      return InvalidArgument("LOOKUP_WHAT",
                             "a plan and page_keys are given; allowed with a plan: tokens");
    }
  }
  std::vector<PageKey> keys;
  for (const std::string& bytes : request.page_keys()) {
    KVS_ASSIGN_OR_RETURN(keys.emplace_back(), ReadPageKey(bytes));
  }
  return keys;
}

template <typename Request>
LookupPlan ReadLookupPlan(const Request& request) {
  return {request.plan(), request.device_uuid()};
}

void Write(const PrefixHit& hit, bool by_page, v1::LookupResponse* out);

}  // namespace kvstrata
