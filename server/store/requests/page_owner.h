// SPDX-License-Identifier: Apache-2.0
// PageOwner: whose pages a look-up is about. A plain value.
#ifndef KVSTRATA_SERVER_STORE_REQUESTS_PAGE_OWNER_H_
#define KVSTRATA_SERVER_STORE_REQUESTS_PAGE_OWNER_H_

#include <cstdint>
#include <string>

#include "kernels/pages/page_view.h"
#include "server/store/pages/prefix_key.h"

namespace kvstrata {

struct PageOwner {
  std::string tenant;
  KeyChain chain;
  Geometry geometry;
  uint32_t page_tokens = 0;
  uint64_t page_bytes = 0;
  std::string model_name;
  uint32_t device = 0;  // device of its session; without one the first
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_REQUESTS_PAGE_OWNER_H_
