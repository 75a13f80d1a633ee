// SPDX-License-Identifier: Apache-2.0
#include "server/web/pages.h"

#include <array>

namespace kvstrata {
namespace {

struct PageRow {
  std::string_view path;
  HttpAnswer (*answer)(PageSource*, const HttpRequest&);
};
constexpr PageRow kPages[] = {
    {"/metrics", MetricsPage},  {"/livez", LivezPage}, {"/readyz", ReadyzPage},
    {"/healthz", HealthzPage},  {"/", StatusPage},     {"/status.json", StatusDataPage},
    {"/audit.json", AuditPage},
};

// The name of "name:port".
std::string_view NameOfHost(std::string_view host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.find(':'));
}

}  // namespace

std::vector<HttpPath> DaemonPages(PageSource* source) {
  std::vector<HttpPath> paths;
  for (const PageRow& page : kPages) {
    paths.push_back({page.path, [source, answer = page.answer](const HttpRequest& request) {
                       return answer(source, request);
                     }});
  }
  return paths;
}

std::vector<std::string_view> PagePaths() {
  std::vector<std::string_view> paths;
  for (const PageRow& page : kPages) paths.push_back(page.path);
  return paths;
}

std::optional<HttpAnswer> RefuseForeign(const HttpRequest& request) {
  static constexpr std::array<std::string_view, 4> kLocal = {"localhost", "127.0.0.1", "[::1]", ""};
  HttpAnswer refused;
  if (std::ranges::find(kLocal, NameOfHost(request.host)) == kLocal.end()) {
    refused.status = 421;
    refused.body = "this page is asked for as localhost, 127.0.0.1 or [::1]\n";
    return refused;
  }
  if (request.fetch_site == "cross-site" || request.fetch_site == "same-site") {
    refused.status = 403;
    refused.body = "a page of another site asked for this\n";
    return refused;
  }
  return std::nullopt;
}

}  // namespace kvstrata
