// SPDX-License-Identifier: Apache-2.0
// What selectors that keep no intermediate arrays answer to Inspect. Private to selectors.
#ifndef KVSTRATA_KERNELS_SELECT_NO_INSPECTION_H_
#define KVSTRATA_KERNELS_SELECT_NO_INSPECTION_H_

#include <string>
#include <string_view>

#include "base/status.h"

namespace kvstrata {

inline Status NothingToInspect(std::string_view selector, std::string_view name) {
  return NotFound("INSPECT_UNKNOWN", "array '" + std::string(name) + "': selector '" +
                                         std::string(selector) + "' keeps no arrays");
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_NO_INSPECTION_H_
