// SPDX-License-Identifier: Apache-2.0
#include "server/web/pages.h"

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

}  // namespace kvstrata
