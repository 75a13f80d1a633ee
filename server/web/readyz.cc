// SPDX-License-Identifier: Apache-2.0
// /readyz: whether engines should come: 503 while a part fails without which none can be served. An
// ill disk or remote tier is none: sequences then open with less, and the rest of the page says so.
#include <algorithm>

#include "server/web/pages.h"

namespace kvstrata {

HttpAnswer ReadyzPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> parts = HealthNow(*source);
  const bool ready = std::ranges::all_of(
      parts, [](const PartHealth& part) { return part.failure.empty() || !part.needed; });
  return HealthAnswer(parts, ready, request);
}

}  // namespace kvstrata
