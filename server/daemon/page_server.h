// SPDX-License-Identifier: Apache-2.0
// PageServer: the daemon's pages (server/web/pages.h) at http.listen.
//
// Ownership: borrows the source. Thread-safety: made and destroyed by the daemon. Errors: those of
// ListenOnLoopback, UnixListener::Listen and HttpServer::Start.
#ifndef KVSTRATA_SERVER_DAEMON_PAGE_SERVER_H_
#define KVSTRATA_SERVER_DAEMON_PAGE_SERVER_H_

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/config/config.h"
#include "server/http/http_server.h"
#include "server/sockets/unix_listener.h"
#include "server/web/pages.h"

namespace kvstrata {

// Where pages will be served: whoever connects waits until a PageServer does.
class PageListener {
 public:
  // REQUIRES: config.http is some address.
  static Result<PageListener> Listen(const Config& config);

  int fd() const { return path_ != nullptr ? path_->fd() : port_.get(); }
  const std::string& address() const { return address_; }

 private:
  std::unique_ptr<UnixListener> path_;  // null: a port
  UniqueFd port_;
  std::string address_;
};

class PageServer {
 public:
  // Serves when it returns. The source has numbers, and outlives the server.
  static Result<std::unique_ptr<PageServer>> Start(PageListener listener, PageSource* source);

 private:
  explicit PageServer(PageListener listener) : listener_(std::move(listener)) {}

  PageListener listener_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_PAGE_SERVER_H_
