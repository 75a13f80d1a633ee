// SPDX-License-Identifier: Apache-2.0
// PrefixPin: a prefix that eviction spares, in memory and in the tier below, until its time is
// over.
//
// A pin belongs to the daemon, not to a session: it outlives the client that asked for it,
// sequences, evictions and, where there is a disk, the daemon (PageTier::Pin). It names keys: what
// is under them now or later stays; it brings nothing back that is gone. Plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "server/store/pages/prefix_key.h"

namespace kvstrata {

struct PrefixPin {
  uint64_t id = 0;
  std::string tenant, model_name;
  uint32_t page_tokens = 0;
  uint64_t bytes = 0;          // bytes of all that it keeps; what the limit counts
  std::vector<PageKey> pages;  // pages of the prefix, in order; none that its artefact stands for
  std::vector<PageKey> index_blocks;  // for a pinned sequence's plan
  std::vector<PageKey> artefact;  // keys for its prompt: the record, then the extents; empty: none
  std::chrono::steady_clock::time_point expires;

  uint32_t tokens() const { return static_cast<uint32_t>(pages.size()) * page_tokens; }
};

// As an operator sees it.
struct PinInfo {
  PrefixPin pin;
  uint32_t device_pages = 0, host_pages = 0, disk_pages = 0;  // where its pages are, memory first
  std::chrono::microseconds ttl_left{};
};

}  // namespace kvstrata
