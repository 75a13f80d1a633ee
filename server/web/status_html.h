// SPDX-License-Identifier: Apache-2.0
// The text of status.html, which the build puts into the program.
#ifndef KVSTRATA_SERVER_WEB_STATUS_HTML_H_
#define KVSTRATA_SERVER_WEB_STATUS_HTML_H_

#include <string_view>

namespace kvstrata {

extern const std::string_view kStatusHtml;

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WEB_STATUS_HTML_H_
