// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_resolver.h"

#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "base/sync.h"

namespace kvstrata::redis {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kHolds{30};
constexpr std::chrono::seconds kFailureHolds{1};

Result<SocketAddress> LookUp(const RedisAddress& server, int flags) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(server.port);
  const int error = getaddrinfo(server.host.c_str(), port.c_str(), &wanted, &found);
  if (error != 0 || found == nullptr) {
    return Unavailable("REDIS_CONNECT", "no address of '" + server.host +
                                            "': " + (error != 0 ? gai_strerror(error) : "none"));
  }
  SocketAddress address;
  address.size = std::min<socklen_t>(found->ai_addrlen, sizeof(address.bytes));
  std::memcpy(&address.bytes, found->ai_addr, address.size);
  freeaddrinfo(found);
  return address;
}

}  // namespace

// The threads share it: a name server may answer long after the resolver's end.
struct RedisResolver::Names {
  struct Name {
    bool looking = false;
    Result<SocketAddress> address = Unavailable("REDIS_CONNECT", "not looked up yet");
    Clock::time_point until{};
  };
  std::function<void()> wake;
  Mutex mu;
  std::map<RedisAddress, Name> all KVS_GUARDED_BY(mu);
};

RedisResolver::RedisResolver(std::function<void()> wake) : names_(std::make_shared<Names>()) {
  names_->wake = std::move(wake);
}

std::optional<Result<SocketAddress>> RedisResolver::Find(const RedisAddress& server) {
  if (Result<SocketAddress> given = LookUp(server, AI_NUMERICHOST | AI_NUMERICSERV); given.ok()) {
    return given;
  }
  MutexLock lock(names_->mu);
  Names::Name& name = names_->all[server];
  if (name.until > Clock::now()) return name.address;
  if (name.looking) return std::nullopt;
  try {
    std::thread([names = names_, server] {
      Result<SocketAddress> address = LookUp(server, 0);
      {
        MutexLock its_lock(names->mu);
        Names::Name& its = names->all[server];
        its.looking = false;
        its.until = Clock::now() + (address.ok() ? kHolds : kFailureHolds);
        its.address = std::move(address);
      }
      names->wake();
    }).detach();
  } catch (const std::system_error& error) {
    return Unavailable("REDIS_CONNECT",
                       std::string("no thread to look up a name: ") + error.what());
  }
  name.looking = true;
  return std::nullopt;
}

}  // namespace kvstrata::redis
