// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/lying_proxy.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvstrata {
namespace {

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

LyingProxy::LyingProxy(uint16_t server_port, uint64_t seed)
    : server_port_(server_port),
      listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      random_(seed) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  KVS_CHECK(bind(listener_.get(), any, size) == 0 && listen(listener_.get(), 64) == 0);
  KVS_CHECK(getsockname(listener_.get(), any, &size) == 0);
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Serve(); });
}

LyingProxy::~LyingProxy() {
  over_ = true;
  thread_.join();
}

void LyingProxy::Serve() {
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
    }
    for (size_t i = pairs_.size(); i-- > 0;) {
      if (!on[i]) pairs_.erase(pairs_.begin() + static_cast<ptrdiff_t>(i));
    }
    if (polled[0].revents != 0) Accept();
  }
}

void LyingProxy::Accept() {
  Pair pair{UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
            UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), ""};
  const sockaddr_in address = Loopback(server_port_);
  if (connect(pair.server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
      0) {
    pairs_.push_back(std::move(pair));
  }
}

bool LyingProxy::Forward(Pair* pair, bool from_client) {
  char bytes[16384];
  const ssize_t came =
      recv(from_client ? pair->client.get() : pair->server.get(), bytes, sizeof(bytes), 0);
  if (came <= 0) return false;
  const std::string_view all(bytes, static_cast<size_t>(came));
  if (from_client) return SendAll(pair->server.get(), all);
  pair->held.append(all);
  return Answer(pair);
}

// Lines go on as they are, whole values are lied about.
bool LyingProxy::Answer(Pair* pair) {
  std::string& held = pair->held;
  for (;;) {
    const size_t line = held.find("\r\n");
    if (line == std::string::npos) return true;
    size_t whole = line + 2;
    const bool value = held[0] == '$' && held[1] != '-';
    if (value) whole += std::stoul(held.substr(1)) + 2;
    if (held.size() < whole) return true;
    std::string one = held.substr(0, whole);
    held.erase(0, whole);
    if (!(value && whole > 500 ? Lie(pair, std::move(one)) : SendAll(pair->client.get(), one))) {
      return false;
    }
  }
}

bool LyingProxy::Lie(Pair* pair, std::string value) {
  const std::string truth = value;
  const uint64_t what = random_() % 100;
  bool cut = false;
  if (what < 15) {
    value[8 + random_() % (value.size() - 10)] ^= static_cast<char>(1U << random_() % 8);
    ++flips_;
  } else if (what < 16) {
    value.resize(random_() % value.size());
    cut = true;
    ++cuts_;
  } else if (what < 35 && !earlier_.empty()) {
    value = earlier_[random_() % earlier_.size()];
    swaps_ += value != truth;
  }
  if (earlier_.size() < 200) {
    earlier_.push_back(truth);
  } else {
    earlier_[random_() % 200] = truth;
  }
  return SendAll(pair->client.get(), value) && !cut;
}

}  // namespace kvstrata
