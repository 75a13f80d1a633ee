// SPDX-License-Identifier: Apache-2.0
// RedisRequest: commands as a Redis server reads them (RESP), and RedisExchange: one that was sent,
// or will be, and what was answered. Thread-safety: values. Cost: names and numbers are copied, the
// bytes of a value are not.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/tier/redis/client/resp_reader.h"

namespace kvstrata::redis {

class RedisRequest {
 public:
  RedisRequest() = default;
  explicit RedisRequest(std::initializer_list<std::string_view> command) { Add(command); }
  // SET of a value that is these bytes one after the other; `ttl` 0: it stays. The bytes are the
  // caller's.
  static RedisRequest Set(std::string_view name, std::vector<std::span<const std::byte>> value,
                          std::chrono::milliseconds ttl);

  // One command more. REQUIRES: not a Set.
  void Add(std::span<const std::string_view> command);
  void Add(std::initializer_list<std::string_view> command) {
    Add(std::span(command.begin(), command.size()));
  }
  // One command more, before the others.
  void PutBefore(std::initializer_list<std::string_view> command);
  size_t commands() const { return commands_; }
  uint64_t bytes() const;  // on the wire
  // Appends what is left from byte `at` on, at most until `most` parts are in `parts`.
  void AppendParts(uint64_t at, size_t most, std::vector<iovec>* parts) const;

 private:
  std::string head_;  // everything before the value
  std::vector<std::span<const std::byte>> value_;
  std::string tail_;
  size_t commands_ = 0;
};

// Ownership: `target` and the request's value are memory of whoever waits, `owner`; the connection
// touches neither once that is null.
struct RedisExchange {
  std::shared_ptr<const RedisRequest> request;
  BulkTarget target;
  bool to_target = false;          // its one reply goes there
  std::vector<RespReply> replies;  // a reply a command
  void* owner = nullptr;
};

}  // namespace kvstrata::redis
