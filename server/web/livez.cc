// SPDX-License-Identifier: Apache-2.0
// /livez: whether a restart would help: 503 while a loop hangs.
#include "server/web/pages.h"

namespace kvstrata {

HttpAnswer LivezPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> loops{HealthNow(*source).front()};
  return HealthAnswer(loops, loops.front().failure.empty(), request);
}

}  // namespace kvstrata
