// The pages that http.listen serves, one file each; a new one gets a file and a row in pages.cc.
//
// Threads: kvs-http's alone. Cost: some ten microseconds; no lock that a step could wait for, no
// call that blocks.
#ifndef KVSTRATA_SERVER_PAGES_PAGES_H_
#define KVSTRATA_SERVER_PAGES_PAGES_H_

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http_server.h"
#include "server/pages/daemon_numbers.h"
#include "server/pages/label_cap.h"

namespace kvstrata {

// What pages are made of; outlives the server.
struct PageSource {
  static constexpr size_t kMostUsers = 32;  // that have series of their own

  LatestNumbers numbers;
  HttpCounts http;
  LabelCap users{kMostUsers};
  std::atomic<std::chrono::microseconds> patience{};  // with a loop, until it counts as hanging
  std::string_view version, commit;
};

// All, in the order of HttpCounts::answered.
std::vector<HttpPath> DaemonPages(PageSource* source);
std::vector<std::string_view> PagePaths();

HttpAnswer MetricsPage(PageSource* source, const HttpRequest& request);
// Kubernetes' probes; `?verbose` lists all parts.
HttpAnswer LivezPage(PageSource* source, const HttpRequest& request);
HttpAnswer ReadyzPage(PageSource* source, const HttpRequest& request);
HttpAnswer HealthzPage(PageSource* source, const HttpRequest& request);

// health.cc: what these three share. "loops" is looked up now, so that a daemon whose kvs-watch
// hangs is found out; the rest is of the latest numbers.
std::vector<PartHealth> HealthNow(const PageSource& source);
HttpAnswer HealthAnswer(const std::vector<PartHealth>& parts, bool well,
                        const HttpRequest& request);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_PAGES_PAGES_H_
