// SPDX-License-Identifier: Apache-2.0
// /healthz: whether an operator should look: 503 while any part fails, as `kvstrata health` says.
#include <algorithm>

#include "server/web/pages.h"

namespace kvstrata {

HttpAnswer HealthzPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> parts = HealthNow(*source);
  const bool well =
      std::ranges::all_of(parts, [](const PartHealth& part) { return part.failure.empty(); });
  return HealthAnswer(parts, well, request);
}

}  // namespace kvstrata
