// SPDX-License-Identifier: Apache-2.0
// HttpServer on real sockets: what it answers, and that nobody at the other end is in its way.
#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "server/http/http_address.h"

namespace kvstrata {
namespace {

constexpr int kPatienceMs = 10'000;  // the test's
constexpr std::chrono::milliseconds kLong{60'000};

UniqueFd ConnectTo(int listener) {
  sockaddr_storage to{};
  socklen_t size = sizeof(to);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&to), &size), 0);
  UniqueFd fd(socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), size), 0)
      << std::strerror(errno);
  return fd;
}

void Say(const UniqueFd& fd, std::string_view text) {
  (void)send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
}

// What comes until the other end closes; "late" if it does not.
std::string ReadAll(const UniqueFd& fd) {
  std::string text;
  for (char buffer[4096];;) {
    pollfd wait{fd.get(), POLLIN, 0};
    if (poll(&wait, 1, kPatienceMs) != 1) return "late";
    const ssize_t n = read(fd.get(), buffer, sizeof(buffer));
    if (n <= 0) return text;
    text.append(buffer, static_cast<size_t>(n));
  }
}

class HttpServerTest : public ::testing::Test {
 protected:
  void Serve(std::chrono::milliseconds deadline = kLong) {
    HttpAddress address;
    address.kind = HttpAddress::Kind::kIpv4;
    listener_ = ListenOnLoopback(address).value();
    ServeOn(listener_.get(), deadline);
  }
  void ServeOn(int listener, std::chrono::milliseconds deadline = kLong) {
    std::vector<HttpPath> paths;
    paths.push_back({"/echo", [](const HttpRequest& r) {
                       HttpAnswer answer;
                       answer.body = std::string(r.query) + "|" + std::string(r.accept);
                       return answer;
                     }});
    paths.push_back({"/large", [](const HttpRequest&) {
                       HttpAnswer answer;
                       answer.status = 503;
                       answer.body = std::string(size_t{4} << 20, 'x');
                       return answer;
                     }});
    paths.push_back({"/throws", [](const HttpRequest&) -> HttpAnswer { throw std::bad_alloc(); }});
    server_ = HttpServer::Start(listener, std::move(paths), &counts_, deadline).value();
  }
  std::string Ask(std::string_view request) {
    const UniqueFd fd = ConnectTo(listener_.get());
    Say(fd, request);
    return ReadAll(fd);
  }
  bool Serves() { return Ask("GET /echo?on HTTP/1.1\r\nHost: x\r\n\r\n").ends_with("\r\n\r\non|"); }

  UniqueFd listener_;
  HttpCounts counts_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersGetAndHead) {
  Serve();
  const std::string got = Ask("GET /echo?a=b HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n");
  EXPECT_TRUE(got.starts_with("HTTP/1.1 200 OK\r\n")) << got;
  EXPECT_NE(got.find("Content-Type: text/plain; charset=utf-8\r\n"), got.npos) << got;
  EXPECT_NE(got.find("Content-Length: 14\r\n"), got.npos) << got;
  EXPECT_NE(got.find("Connection: close\r\n"), got.npos) << got;
  EXPECT_TRUE(got.ends_with("\r\n\r\na=b|text/plain")) << got;
  const std::string head = Ask("HEAD /echo?a HTTP/1.0\r\n\r\n");
  EXPECT_NE(head.find("Content-Length: 2\r\n"), head.npos) << head;
  EXPECT_TRUE(head.ends_with("\r\n\r\n")) << head;
  EXPECT_EQ(counts_.answered[0], 2u);
}

TEST_F(HttpServerTest, RefusesWhatThereIsNot) {
  Serve();
  const std::string other = Ask("GET /nothing HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(other.starts_with("HTTP/1.1 404 ")) << other;
  EXPECT_TRUE(other.ends_with("there are /echo /large /throws\n")) << other;
  const std::string posted = Ask("POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_TRUE(posted.starts_with("HTTP/1.1 405 ")) << posted;
  EXPECT_NE(posted.find("Allow: GET, HEAD\r\n"), posted.npos) << posted;
  EXPECT_EQ(counts_.other, 1u);
}

TEST_F(HttpServerTest, SendsMoreThanASocketHolds) {
  Serve();
  const UniqueFd fd = ConnectTo(listener_.get());
  Say(fd, "GET /large HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(Serves());  // nobody reads the first one meanwhile
  const std::string got = ReadAll(fd);
  EXPECT_TRUE(got.starts_with("HTTP/1.1 503 ")) << got.substr(0, 80);
  EXPECT_GT(got.size(), size_t{4} << 20);
}

TEST_F(HttpServerTest, ServesUnixSockets) {
  const std::string path = ::testing::TempDir() + "/http_" + std::to_string(getpid()) + ".sock";
  unlink(path.c_str());
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path, path.data(), path.size());
  listener_.Reset(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  ASSERT_EQ(listen(listener_.get(), 8), 0);
  ServeOn(listener_.get());
  EXPECT_TRUE(Serves());
  unlink(path.c_str());
}

TEST_F(HttpServerTest, ClosesOnGarbage) {
  Serve();
  const std::string_view garbage[] = {"\0\xff\x16\x03\x01\x02\r\n\r\n",
                                      "GET\r\n\r\n",
                                      "\r\n\r\n\r\n\r\n\r\n\r\n",
                                      "GET /echo HTTP/9.9\r\n\r\n",
                                      "GET /echo HTTP/1.1\r\nbad header\r\n\r\n",
                                      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"};
  for (const std::string_view text : garbage) {
    const UniqueFd fd = ConnectTo(listener_.get());
    Say(fd, text);
    shutdown(fd.get(), SHUT_WR);
    EXPECT_FALSE(ReadAll(fd).starts_with("HTTP/1.1 200")) << text;
  }
  EXPECT_TRUE(Serves());
  EXPECT_GT(counts_.malformed, 3u);
}

TEST_F(HttpServerTest, ClosesOnAHeaderWithoutEnd) {
  Serve();
  const UniqueFd fd = ConnectTo(listener_.get());
  Say(fd, "GET /echo HTTP/1.1\r\nX: " + std::string(size_t{1} << 20, 'a'));
  EXPECT_FALSE(ReadAll(fd).starts_with("HTTP/1.1 200"));
  const UniqueFd many = ConnectTo(listener_.get());
  std::string fields = "GET /echo HTTP/1.1\r\n";
  for (int i = 0; i < 10'000; ++i) fields += "a: b\r\n";
  Say(many, fields);
  EXPECT_FALSE(ReadAll(many).starts_with("HTTP/1.1 200"));
  EXPECT_TRUE(Serves());
}

TEST_F(HttpServerTest, DropsWhoIsTooSlow) {
  Serve(std::chrono::milliseconds(200));
  const UniqueFd silent = ConnectTo(listener_.get());
  const UniqueFd slow = ConnectTo(listener_.get());
  // A byte now and then moves no deadline.
  const auto begun = std::chrono::steady_clock::now();
  pollfd closed{slow.get(), POLLIN, 0};
  int bytes = 0;
  while (poll(&closed, 1, 20) == 0) {
    ASSERT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(kPatienceMs));
    Say(slow, bytes++ == 0 ? "GET /echo HTTP/1.1\r\n" : "a");
  }
  EXPECT_NE(ReadAll(silent), "late");
  // Nor does one who asks and never reads.
  const UniqueFd deaf = ConnectTo(listener_.get());
  Say(deaf, "GET /large HTTP/1.1\r\n\r\n");
  pollfd gone{deaf.get(), 0, 0};
  while (poll(&gone, 1, 20) == 0 && (gone.revents & (POLLHUP | POLLERR)) == 0 && counts_.late < 3) {
    ASSERT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(kPatienceMs));
  }
  EXPECT_TRUE(Serves());
  EXPECT_GE(counts_.late, 2u);
}

TEST_F(HttpServerTest, AThousandConnectionsKeepNobodyOut) {
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit more{std::min<rlim_t>(files.rlim_max, 4096), files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &more), 0);
  ASSERT_GE(more.rlim_cur, 1200u);
  Serve();  // with a deadline that helps nobody here
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(ConnectTo(listener_.get()));
    Say(idle.back(), "GET /echo HTTP/1.1\r\nX: ");
    if (i % 100 != 99) continue;
    EXPECT_TRUE(Serves()) << i;
  }
  EXPECT_TRUE(Serves());
  EXPECT_GE(counts_.busy, 1000 - HttpServer::kMostConnections);
  size_t open = 0;
  for (const UniqueFd& fd : idle) {
    char byte;
    open += recv(fd.get(), &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN ? 1 : 0;
  }
  EXPECT_LE(open, HttpServer::kMostConnections);
}

TEST_F(HttpServerTest, OutlivesAHandlerThatThrows) {
  Serve();
  EXPECT_EQ(Ask("GET /throws HTTP/1.1\r\n\r\n"), "");
  EXPECT_TRUE(Serves());
}

TEST_F(HttpServerTest, EndsWhileConnectionsAreOpen) {
  Serve();
  const UniqueFd fd = ConnectTo(listener_.get());
  Say(fd, "GET /echo");
  EXPECT_TRUE(Serves());
  server_.reset();
  EXPECT_EQ(ReadAll(fd), "");
}

TEST(HttpAddressTest, IsLoopbackOrAUnixSocket) {
  EXPECT_EQ(ParseHttpAddress("")->kind, HttpAddress::Kind::kNone);
  EXPECT_EQ(ParseHttpAddress("127.0.0.1:9465")->port, 9465);
  EXPECT_EQ(ParseHttpAddress("[::1]:0")->kind, HttpAddress::Kind::kIpv6);
  EXPECT_EQ(ParseHttpAddress("unix:/run/x.sock")->path, "/run/x.sock");
  for (const std::string_view text :
       {"0.0.0.0:9465", "[::]:9465", "10.0.0.1:80", "localhost:9465", ":9465", "9465", "127.0.0.1",
        "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1x", "unix:", "unix:relative",
        "::1:9465"}) {
    const auto address = ParseHttpAddress(text);
    ASSERT_FALSE(address.ok()) << text;
    EXPECT_EQ(address.status().reason(), "HTTP_LISTEN") << text;
  }
}

TEST(HttpAddressTest, ABusyPortSaysSo) {
  HttpAddress address;
  address.kind = HttpAddress::Kind::kIpv4;
  const UniqueFd first = ListenOnLoopback(address).value();
  const std::string bound = BoundAddress(first.get());
  address.port = ParseHttpAddress(bound)->port;
  EXPECT_EQ(ListenOnLoopback(address).status().reason(), "HTTP_IN_USE");
}

}  // namespace
}  // namespace kvstrata
