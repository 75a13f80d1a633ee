// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include "server/daemon/daemon.h"
#include "server/daemon/daemon_parts.h"
#include "server/telemetry/log.h"

namespace kvstrata {

Result<PageListener> PageListener::Listen(const Config& config) {
  PageListener listener;
  if (config.http.kind == HttpAddress::Kind::kUnix) {
    listener.address_ = "unix:" + config.http.path;
    KVS_ASSIGN_OR_RETURN(listener.path_,
                         UnixListener::Listen(config.http.path, SOCK_STREAM, config.socket_group));
  } else {
    KVS_ASSIGN_OR_RETURN(listener.port_, ListenOnLoopback(config.http));
    listener.address_ = BoundAddress(listener.port_.get());
  }
  return listener;
}

Result<std::unique_ptr<PageServer>> PageServer::Start(PageListener listener, PageSource* source) {
  std::unique_ptr<PageServer> pages(new PageServer(std::move(listener)));
  LogEvent(LogLevel::kInfo, "http", {{"listen", pages->listener_.address()}});
  KVS_ASSIGN_OR_RETURN(
      pages->server_, HttpServer::Start(pages->listener_.fd(), DaemonPages(source), &source->http));
  return pages;
}

}  // namespace kvstrata
