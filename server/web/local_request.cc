// SPDX-License-Identifier: Apache-2.0
// Who may ask for the status page: a browser at this machine, for a page of this daemon's.
#include <algorithm>
#include <array>

#include "server/web/pages.h"

namespace kvstrata {
namespace {

// The name of "name:port".
std::string_view NameOfHost(std::string_view host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.find(':'));
}

}  // namespace

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
