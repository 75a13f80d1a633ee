// SPDX-License-Identifier: Apache-2.0
// HttpServer: answers GET and HEAD on a listening socket, one request a connection: what monitoring
// asks of the daemon. It is in nobody's way, whoever is at the other end.
//
// One thread ("kvs-http") serves all connections and runs the handlers, which must not wait.
// Bounds: kMostConnections at a time, of which the oldest goes when another one comes, so that
// connections that say nothing keep nobody out; kMostHeaderBytes of a request; kDeadline from the
// first byte to the last, each way, however slowly they come. A body is not read.
//
// Boost.Beast parses: its deadlines are of whole operations, its buffers are bounded, and it takes
// sockets of any family (docs/adr/0016-http-by-boost-beast.md).
// Ownership: borrows the socket. Cost: none without a connection.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata {

struct HttpRequest {
  std::string_view path, query;  // "/readyz", "verbose"
  std::string_view accept;
  std::string_view host;        // "localhost:9465"
  std::string_view fetch_site;  // Sec-Fetch-Site, which browsers send: "same-origin", "cross-site"
};
struct HttpAnswer {
  unsigned status = 200;
  std::string_view type = "text/plain; charset=utf-8";
  std::string body;
  std::string policy;  // Content-Security-Policy; "": none
};
struct HttpPath {
  std::string_view path;
  std::function<HttpAnswer(const HttpRequest&)> answer;
};

// What became of requests and connections, since the start. Any thread.
struct HttpCounts {
  static constexpr size_t kMostPaths = 16;
  std::array<std::atomic<uint64_t>, kMostPaths> answered{};  // by path, in the server's order
  std::atomic<uint64_t> other{0};                            // a path that there is not
  // Closed without an answer: too many at a time; the deadline; no request.
  std::atomic<uint64_t> busy{0}, late{0}, malformed{0};
};

class HttpServer {
 public:
  static constexpr size_t kMostConnections = 32;
  static constexpr size_t kMostHeaderBytes = 8192;
  static constexpr std::chrono::milliseconds kDeadline{5000};

  // UNAVAILABLE HTTP_SYSTEM. REQUIRES: listen_fd is a listening stream socket, non-blocking.
  // At most HttpCounts::kMostPaths paths; `counts` outlives it.
  static Result<std::unique_ptr<HttpServer>> Start(int listen_fd, std::vector<HttpPath> paths,
                                                   HttpCounts* counts,
                                                   std::chrono::milliseconds deadline = kDeadline);
  // Every connection is cut.
  ~HttpServer();

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
