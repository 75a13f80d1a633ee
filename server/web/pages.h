// SPDX-License-Identifier: Apache-2.0
// The pages that http.listen serves, one file each; a new one gets a file and a row in pages.cc.
//
// Threads: kvs-http's alone. Cost: some ten microseconds; no lock that a step could wait for, no
// call that blocks.
#ifndef KVSTRATA_SERVER_WEB_PAGES_H_
#define KVSTRATA_SERVER_WEB_PAGES_H_

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http_server.h"
#include "server/web/daemon_numbers.h"
#include "server/web/label_cap.h"
#include "server/web/page_requests.h"

namespace kvstrata {

// What pages are made of; outlives the server.
struct PageSource {
  static constexpr size_t kMostUsers = 32;  // that have series of their own
  static constexpr size_t kMostRemoteServers = 64;

  LatestNumbers numbers;
  HttpCounts http;
  LabelCap users{kMostUsers};
  LabelCap remote_servers{kMostRemoteServers};
  std::atomic<std::chrono::microseconds> patience{};  // with a loop, until it counts as hanging
  std::string_view version, commit;
  std::chrono::steady_clock::time_point started;
  PageAudits audits;
  WatchedPage status;  // whether somebody looks at it
};

// All, in the order of HttpCounts::answered.
std::vector<HttpPath> DaemonPages(PageSource* source);
std::vector<std::string_view> PagePaths();

HttpAnswer MetricsPage(PageSource* source, const HttpRequest& request);
// Kubernetes' probes; `?verbose` lists all parts.
HttpAnswer LivezPage(PageSource* source, const HttpRequest& request);
HttpAnswer ReadyzPage(PageSource* source, const HttpRequest& request);
HttpAnswer HealthzPage(PageSource* source, const HttpRequest& request);
// The status page, what it asks for once a second (`?after=N`: events behind that number only), and
// its audit.
HttpAnswer StatusPage(PageSource* source, const HttpRequest& request);
HttpAnswer StatusDataPage(PageSource* source, const HttpRequest& request);
HttpAnswer AuditPage(PageSource* source, const HttpRequest& request);

// local_request.cc: a refusal for what a page of somebody else's in an operator's browser asked: by
// a name that leads here (DNS rebinding), or from another site. Nothing: it may be answered.
std::optional<HttpAnswer> RefuseForeign(const HttpRequest& request);

// health.cc: what these three share. "loops" is looked up now, so that a daemon whose kvs-watch
// hangs is found out; the rest is of the latest numbers.
std::vector<PartHealth> HealthNow(const PageSource& source);
HttpAnswer HealthAnswer(const std::vector<PartHealth>& parts, bool well,
                        const HttpRequest& request);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WEB_PAGES_H_
