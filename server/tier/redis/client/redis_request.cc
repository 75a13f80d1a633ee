// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_request.h"

#include <utility>

#include "base/check.h"

namespace kvstrata::redis {
namespace {

void AppendText(std::string_view text, std::string* to) {
  to->append("$").append(std::to_string(text.size())).append("\r\n");
  to->append(text).append("\r\n");
}

}  // namespace

RedisRequest RedisRequest::Set(std::string_view name, std::vector<std::span<const std::byte>> value,
                               std::chrono::milliseconds ttl) {
  RedisRequest set;
  uint64_t bytes = 0;
  for (const auto& part : value) bytes += part.size();
  set.head_ = ttl.count() > 0 ? "*5\r\n" : "*3\r\n";
  AppendText("SET", &set.head_);
  AppendText(name, &set.head_);
  set.head_.append("$").append(std::to_string(bytes)).append("\r\n");
  set.value_ = std::move(value);
  set.tail_ = "\r\n";
  if (ttl.count() > 0) {
    AppendText("PX", &set.tail_);
    AppendText(std::to_string(ttl.count()), &set.tail_);
  }
  set.commands_ = 1;
  return set;
}

void RedisRequest::Add(std::span<const std::string_view> command) {
  KVS_CHECK(value_.empty());
  head_.append("*").append(std::to_string(command.size())).append("\r\n");
  for (const std::string_view word : command) AppendText(word, &head_);
  ++commands_;
}

void RedisRequest::PutBefore(std::initializer_list<std::string_view> command) {
  RedisRequest before(command);
  head_ = before.head_ + head_;
  ++commands_;
}

uint64_t RedisRequest::bytes() const {
  uint64_t sum = head_.size() + tail_.size();
  for (const auto& part : value_) sum += part.size();
  return sum;
}

void RedisRequest::AppendParts(uint64_t at, size_t most, std::vector<iovec>* parts) const {
  const auto add = [&](const void* data, size_t bytes) {
    if (at >= bytes) {
      at -= bytes;
      return;
    }
    if (parts->size() >= most) return;
    parts->push_back({const_cast<char*>(static_cast<const char*>(data)) + at, bytes - at});
    at = 0;
  };
  add(head_.data(), head_.size());
  for (const auto& part : value_) add(part.data(), part.size());
  add(tail_.data(), tail_.size());
}

}  // namespace kvstrata::redis
