// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/prefix_messages.h"

#include <algorithm>

namespace kvstrata {

Result<PageKey> ReadPageKey(const std::string& bytes) {
  PageKey key{};
  if (bytes.size() != key.size()) {
    return InvalidArgument("PAGE_KEY", "a page key of " + std::to_string(bytes.size()) +
                                           " bytes; allowed: " + std::to_string(key.size()));
  }
  std::copy(bytes.begin(), bytes.end(), key.begin());
  return key;
}

void Write(const PrefixHit& hit, bool by_page, v1::LookupResponse* out) {
  out->set_held_tokens(hit.held_tokens());
  out->set_indexed_tokens(hit.indexed_tokens);
  if (hit.plan) out->set_plan(FormatPlan(*hit.plan));
  out->set_page_tokens(hit.page_tokens);
  out->set_device_tokens(hit.tokens_in(Tier::kDevice));
  out->set_host_tokens(hit.tokens_in(Tier::kHost));
  out->set_disk_tokens(hit.tokens_in(Tier::kDisk));
  for (size_t i = 0; by_page && i < hit.keys.size(); ++i) {
    v1::HeldPage* page = out->add_pages();
    page->set_key(hit.keys[i].data(), hit.keys[i].size());
    if (i < hit.pages.size()) page->set_tier(std::string(NameOf(hit.pages[i])));
  }
}

}  // namespace kvstrata
