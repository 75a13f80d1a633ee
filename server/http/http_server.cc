// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_server.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <cstring>
#include <exception>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/unique_fd.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Protocol = asio::generic::stream_protocol;
using Error = boost::system::error_code;

// After accept fails for want of descriptors or memory.
constexpr std::chrono::milliseconds kAcceptPause{100};

HttpAnswer PlainAnswer(unsigned status, std::string text) {
  HttpAnswer answer;
  answer.status = status;
  answer.body = std::move(text);
  return answer;
}

std::string_view ViewOf(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

// One request: its header within the deadline, the answer within the deadline, the end.
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using Answer = std::function<HttpAnswer(const HttpRequest&)>;
  using Ended = std::function<void(HttpConnection*)>;

  HttpConnection(asio::io_context* loop, int family, UniqueFd fd,
                 std::chrono::milliseconds deadline, HttpCounts* counts, Answer answer, Ended ended)
      : stream_(*loop),
        deadline_(deadline),
        counts_(*counts),
        answer_(std::move(answer)),
        ended_(std::move(ended)) {
    Error error;
    stream_.socket().assign(Protocol(family, 0), fd.get(), error);
    if (!error) (void)fd.release();
    parser_.header_limit(HttpServer::kMostHeaderBytes);
  }

  void Start() {
    stream_.expires_after(deadline_);
    http::async_read_header(
        stream_, buffer_, parser_,
        [self = shared_from_this()](Error error, size_t) { self->OnRequest(error); });
  }
  void Cut() { stream_.close(); }

 private:
  void OnRequest(Error error) {
    if (error) {
      NoteError(error);
      return ended_(this);
    }
    const http::request<http::empty_body>& request = parser_.get();
    const bool head = request.method() == http::verb::head;
    if (!head && request.method() != http::verb::get) {
      return Send(PlainAnswer(405, "only GET and HEAD are answered\n"), false);
    }
    const std::string_view target = ViewOf(request.target());
    const size_t query = std::min(target.find('?'), target.size());
    HttpRequest asked;
    asked.path = target.substr(0, query);
    asked.query = target.substr(std::min(query + 1, target.size()));
    asked.accept = ViewOf(request[http::field::accept]);
    asked.host = ViewOf(request[http::field::host]);
    asked.fetch_site = ViewOf(request["Sec-Fetch-Site"]);
    try {
      Send(answer_(asked), head);
    } catch (const std::exception&) {
      ended_(this);  // and the loop says so
      throw;
    }
  }

  void Send(HttpAnswer answer, bool head) {
    response_.result(answer.status);
    response_.version(11);
    response_.keep_alive(false);
    response_.set(http::field::content_type,
                  beast::string_view(answer.type.data(), answer.type.size()));
    response_.set(http::field::cache_control, "no-store");
    response_.set("X-Content-Type-Options", "nosniff");
    if (!answer.policy.empty()) {
      response_.set("Content-Security-Policy", answer.policy);
      response_.set("Referrer-Policy", "no-referrer");
      response_.set("Cross-Origin-Resource-Policy", "same-origin");
    }
    if (answer.status == 405) response_.set(http::field::allow, "GET, HEAD");
    response_.content_length(answer.body.size());
    if (!head) response_.body() = std::move(answer.body);
    serializer_.emplace(response_);
    stream_.expires_after(deadline_);
    http::async_write(stream_, *serializer_,
                      [self = shared_from_this()](Error error, size_t) { self->OnSent(error); });
  }

  void OnSent(Error error) {
    if (error) NoteError(error);
    Error ignored;
    stream_.socket().shutdown(asio::socket_base::shutdown_both, ignored);
    ended_(this);
  }

  void NoteError(Error error) {
    if (error == beast::error::timeout) {
      counts_.late.fetch_add(1, std::memory_order_relaxed);
    } else if (error.category() == http::make_error_code(http::error::bad_value).category() &&
               error != http::error::end_of_stream) {
      counts_.malformed.fetch_add(1, std::memory_order_relaxed);
    }  // else the peer went
  }

  beast::basic_stream<Protocol> stream_;
  const std::chrono::milliseconds deadline_;
  HttpCounts& counts_;
  const Answer answer_;
  const Ended ended_;
  beast::flat_buffer buffer_{HttpServer::kMostHeaderBytes};
  http::request_parser<http::empty_body> parser_;
  http::response<http::string_body> response_;
  std::optional<http::response_serializer<http::string_body>> serializer_;
};

class HttpServer::Impl {
 public:
  Impl(int listen_fd, int family, std::vector<HttpPath> paths, HttpCounts* counts,
       std::chrono::milliseconds deadline)
      : family_(family),
        paths_(std::move(paths)),
        counts_(*counts),
        deadline_(deadline),
        listener_(loop_, listen_fd),
        pause_(loop_) {
    KVS_CHECK(paths_.size() <= HttpCounts::kMostPaths);
    AwaitConnection();
    thread_ = StartThread("kvs-http", [this] { Run(); });
  }
  ~Impl() {
    loop_.stop();
    thread_.join();
  }

 private:
  void Run() {
    // A handler that throws has lost its connection, and the loop goes on.
    while (!Survive("kvs-http", [this] { loop_.run(); })) {
    }
  }

  void AwaitConnection() {
    listener_.async_wait(asio::posix::descriptor_base::wait_read, [this](Error error) {
      if (error) return;
      Accept();
    });
  }

  void Accept() {
    UniqueFd fd(accept4(listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      Begin(std::move(fd));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The connection stays in the queue, and the listener readable.
      pause_.expires_after(kAcceptPause);
      pause_.async_wait([this](Error error) {
        if (!error) AwaitConnection();
      });
      return;
    }
    AwaitConnection();
  }

  void Begin(UniqueFd fd) {
    if (connections_.size() == kMostConnections) {
      counts_.busy.fetch_add(1, std::memory_order_relaxed);
      connections_.front()->Cut();
      connections_.pop_front();
    }
    connections_.push_back(std::make_shared<HttpConnection>(
        &loop_, family_, std::move(fd), deadline_, &counts_,
        [this](const HttpRequest& request) { return Answer(request); },
        [this](HttpConnection* gone) {
          std::erase_if(connections_, [gone](const auto& c) { return c.get() == gone; });
        }));
    connections_.back()->Start();
  }

  HttpAnswer Answer(const HttpRequest& request) {
    std::string known;
    for (size_t i = 0; i < paths_.size(); ++i) {
      known += ' ' + std::string(paths_[i].path);
      if (paths_[i].path != request.path) continue;
      counts_.answered[i].fetch_add(1, std::memory_order_relaxed);
      return paths_[i].answer(request);
    }
    counts_.other.fetch_add(1, std::memory_order_relaxed);
    return PlainAnswer(404, "there is no such path; there are" + known + "\n");
  }

  const int family_;
  const std::vector<HttpPath> paths_;
  HttpCounts& counts_;
  const std::chrono::milliseconds deadline_;
  asio::io_context loop_{1};
  asio::posix::stream_descriptor listener_;
  asio::steady_timer pause_;
  std::list<std::shared_ptr<HttpConnection>> connections_;  // the oldest first
  std::thread thread_;
};

Result<std::unique_ptr<HttpServer>> HttpServer::Start(int listen_fd, std::vector<HttpPath> paths,
                                                      HttpCounts* counts,
                                                      std::chrono::milliseconds deadline) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  // The loop closes what it waits for.
  UniqueFd own(fcntl(listen_fd, F_DUPFD_CLOEXEC, 3));
  if (!own || getsockname(listen_fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Unavailable("HTTP_SYSTEM", std::string("http.listen: ") + std::strerror(errno));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(
      std::make_unique<Impl>(own.release(), bound.ss_family, std::move(paths), counts, deadline)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

}  // namespace kvstrata
