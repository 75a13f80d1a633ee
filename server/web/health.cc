// SPDX-License-Identifier: Apache-2.0
// /livez, /readyz and /healthz.
#include <algorithm>

#include "server/telemetry/thread_top.h"
#include "server/web/pages.h"

namespace kvstrata {

std::vector<PartHealth> HealthNow(const PageSource& source) {
  PartHealth loops{"loops", "", true};
  for (const HangingLoop& loop : HangingLoops(source.patience)) {
    loops.failure += (loops.failure.empty() ? "" : ", ") + loop.thread + " has not answered for " +
                     std::to_string(loop.since.count()) + " s";
  }
  std::vector<PartHealth> parts{std::move(loops)};
  const auto numbers = source.numbers.Get();
  parts.insert(parts.end(), numbers->parts.begin(), numbers->parts.end());
  return parts;
}

HttpAnswer HealthAnswer(const std::vector<PartHealth>& parts, bool well,
                        const HttpRequest& request) {
  HttpAnswer answer;
  answer.status = well ? 200 : 503;
  if (well && request.query != "verbose") {
    answer.body = "ok\n";
    return answer;
  }
  for (const PartHealth& part : parts) {
    answer.body += (part.failure.empty() ? "[+] " : "[-] ") + std::string(part.part) +
                   (part.failure.empty() ? " ok" : ": " + part.failure) + '\n';
  }
  answer.body += well ? "ok\n" : "failed\n";
  return answer;
}

// /livez: whether a restart would help: 503 while a loop hangs.
HttpAnswer LivezPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> loops{HealthNow(*source).front()};
  return HealthAnswer(loops, loops.front().failure.empty(), request);
}

// /readyz: whether engines should come: 503 while a part fails without which none can be served. An
// ill disk or remote tier is none: sequences then open with less, and the rest of the page says so.
HttpAnswer ReadyzPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> parts = HealthNow(*source);
  const bool ready = std::ranges::all_of(
      parts, [](const PartHealth& part) { return part.failure.empty() || !part.needed; });
  return HealthAnswer(parts, ready, request);
}

// /healthz: whether an operator should look: 503 while any part fails, as `kvstrata health` says.
HttpAnswer HealthzPage(PageSource* source, const HttpRequest& request) {
  const std::vector<PartHealth> parts = HealthNow(*source);
  const bool well =
      std::ranges::all_of(parts, [](const PartHealth& part) { return part.failure.empty(); });
  return HealthAnswer(parts, well, request);
}

}  // namespace kvstrata
