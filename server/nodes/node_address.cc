// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/node_address.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/unique_fd.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata {
namespace {

std::string Named(const std::string& address) { return "remote.announce = '" + address + "': "; }

Status CannotListen(const std::string& address, int error) {
  const std::string text = Named(address) + std::strerror(error);
  if (error == EADDRINUSE) {
    return {Code::kAlreadyExists, "REMOTE_ANNOUNCE_IN_USE",
            text + "; choose another port, or stop who listens there (ss -ltnp)"};
  }
  if (error == EACCES || error == EPERM) {
    return {Code::kPermissionDenied, "REMOTE_ANNOUNCE", text + "; choose a port above 1023"};
  }
  return InvalidArgument("REMOTE_ANNOUNCE",
                         text + "; name an address of this machine (ip -brief address)");
}

}  // namespace

Status CheckCanListen(const std::string& address) {
  KVS_ASSIGN_OR_RETURN(const redis::RedisAddress at, redis::ParseRedisAddress(address));
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int unknown =
      getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &wanted, &found);
  if (unknown != 0) {
    return InvalidArgument("REMOTE_ANNOUNCE", Named(address) + gai_strerror(unknown) +
                                                  "; name an address of this machine (ip -brief "
                                                  "address)");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const UniqueFd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // Connections that the last daemon closed keep its port for a minute else.
    const int on = 1;
    if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd.get(), each->ai_addr, each->ai_addrlen) != 0 || listen(fd.get(), 1) != 0) {
      return CannotListen(address, errno);
    }
  }
  return OkStatus();
}

}  // namespace kvstrata
