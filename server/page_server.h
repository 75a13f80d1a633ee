// PageServer: the daemon's pages (server/pages/pages.h) at http.listen.
//
// Ownership: borrows the source. Thread-safety: made and destroyed by the daemon. Errors: those of
// ListenOnLoopback, UnixListener::Listen and HttpServer::Start.
#ifndef KVSTRATA_SERVER_PAGE_SERVER_H_
#define KVSTRATA_SERVER_PAGE_SERVER_H_

#include <memory>

#include "base/status.h"
#include "server/attach/unix_listener.h"
#include "server/config.h"
#include "server/http/http_server.h"
#include "server/pages/pages.h"

namespace kvstrata {

class PageServer {
 public:
  // Serves when it returns. REQUIRES: config.http is some address; the source has numbers.
  static Result<std::unique_ptr<PageServer>> Start(const Config& config, PageSource* source);

 private:
  explicit PageServer(PageSource* source) : source_(source) {}
  Status Listen(const Config& config);

  PageSource* const source_;
  std::unique_ptr<UnixListener> path_;  // null: a port
  std::unique_ptr<HttpServer> server_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_PAGE_SERVER_H_
