// SPDX-License-Identifier: Apache-2.0
// RedisResolver: addresses of servers that are given by name, without waiting for a name server.
//
// A name is looked up in a thread of its own, one at a time for each name, whose answer holds for
// half a minute. Thread-safety: Find from one thread. Cost: none for addresses.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/status.h"
#include "server/tier/redis/client/redis_slots.h"
#include "server/tier/redis/client/redis_socket.h"

namespace kvstrata::redis {

class RedisResolver {
 public:
  // `wake` is called when a name was looked up, from any thread, also after this object's end.
  explicit RedisResolver(std::function<void()> wake);

  // Nothing: it is being looked up. Not OK: UNAVAILABLE REDIS_CONNECT.
  std::optional<Result<SocketAddress>> Find(const RedisAddress& server);

 private:
  struct Names;
  const std::shared_ptr<Names> names_;
};

}  // namespace kvstrata::redis
