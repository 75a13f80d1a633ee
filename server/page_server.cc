#include "server/page_server.h"

#include <sys/socket.h>

#include <string>
#include <utility>

#include "server/daemon.h"
#include "server/telemetry/log.h"

namespace kvstrata {

Result<std::unique_ptr<PageServer>> PageServer::Start(const Config& config, PageSource* source) {
  std::unique_ptr<PageServer> pages(new PageServer(source));
  KVS_RETURN_IF_ERROR(pages->Listen(config));
  return pages;
}

Status PageServer::Listen(const Config& config) {
  UniqueFd port;
  std::string at = "unix:" + config.http.path;
  if (config.http.kind == HttpAddress::Kind::kUnix) {
    KVS_ASSIGN_OR_RETURN(path_,
                         UnixListener::Listen(config.http.path, SOCK_STREAM, config.socket_group));
  } else {
    KVS_ASSIGN_OR_RETURN(port, ListenOnLoopback(config.http));
    at = BoundAddress(port.get());
  }
  LogEvent(LogLevel::kInfo, "http", {{"listen", at}});
  KVS_ASSIGN_OR_RETURN(server_, HttpServer::Start(path_ != nullptr ? path_->fd() : port.get(),
                                                  DaemonPages(source_), &source_->http));
  return OkStatus();
}

}  // namespace kvstrata
