// SPDX-License-Identifier: Apache-2.0
// What /livez, /readyz and /healthz share.
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

}  // namespace kvstrata
