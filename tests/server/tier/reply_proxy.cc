// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/reply_proxy.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr size_t kLeastValue = 500;  // shorter ones are no tier's

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

bool SendAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

}  // namespace

ReplyProxy::ReplyProxy(uint16_t server_port)
    : server_port_(server_port), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  KVS_CHECK(bind(listener_.get(), any, size) == 0 && listen(listener_.get(), 64) == 0);
  KVS_CHECK(getsockname(listener_.get(), any, &size) == 0);
  port_ = ntohs(address.sin_port);
}

void ReplyProxy::Start() {
  thread_ = std::thread([this] { Serve(); });
}

void ReplyProxy::Stop() {
  over_ = true;
  thread_.join();
}

void ReplyProxy::Serve() {
  while (!over_) {
    std::vector<pollfd> polled = {{listener_.get(), POLLIN, 0}};
    for (const Pair& pair : pairs_) {
      polled.push_back({pair.client.get(), POLLIN, 0});
      polled.push_back({pair.server.get(), POLLIN, 0});
    }
    poll(polled.data(), polled.size(), 50);
    std::vector<bool> on(pairs_.size(), true);
    for (size_t i = 0; i < pairs_.size(); ++i) {
      if (polled[1 + 2 * i].revents != 0) on[i] = Forward(&pairs_[i], true);
      if (on[i] && polled[2 + 2 * i].revents != 0) on[i] = Forward(&pairs_[i], false);
      if (on[i]) on[i] = Answer(&pairs_[i]);
    }
    for (size_t i = pairs_.size(); i-- > 0;) {
      if (!on[i]) pairs_.erase(pairs_.begin() + static_cast<ptrdiff_t>(i));
    }
    if (polled[0].revents != 0) Accept();
  }
}

void ReplyProxy::Accept() {
  Pair pair{UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
            UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), ""};
  const sockaddr_in address = Loopback(server_port_);
  if (connect(pair.server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
      0) {
    pairs_.push_back(std::move(pair));
  }
}

bool ReplyProxy::Forward(Pair* pair, bool from_client) {
  char bytes[16384];
  const ssize_t came =
      recv(from_client ? pair->client.get() : pair->server.get(), bytes, sizeof(bytes), 0);
  if (came <= 0) return false;
  const std::string_view all(bytes, static_cast<size_t>(came));
  if (from_client) return SendAll(pair->server.get(), all);
  pair->held.append(all);
  return true;
}

// Lines go on as they are.
bool ReplyProxy::Answer(Pair* pair) {
  std::string& held = pair->held;
  for (;;) {
    const size_t line = held.find("\r\n");
    if (line == std::string::npos) return true;
    size_t whole = line + 2;
    const bool value = held[0] == '$' && held[1] != '-';
    if (value) whole += std::stoul(held.substr(1)) + 2;
    if (held.size() < whole) return true;
    bool cut = false;
    std::optional<std::string> one = held.substr(0, whole);
    if (value && whole > kLeastValue) one = OnValue(*one, &cut);
    if (!one) return true;
    held.erase(0, whole);
    if (!SendAll(pair->client.get(), *one) || cut) return false;
  }
}

}  // namespace kvstrata
