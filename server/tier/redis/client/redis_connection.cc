// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_connection.h"

#include <algorithm>
#include <utility>

namespace kvstrata::redis {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 20;  // bytes of a Move, each way
constexpr size_t kMostParts = 64;                   // parts of a write

// What must be answered with OK before anything else is sent.
std::unique_ptr<RedisExchange> Greeting(const RedisLogin& login, bool reads) {
  RedisRequest request;
  if (!login.password.empty() && !login.user.empty()) {
    request.Add({"AUTH", login.user, login.password});
  } else if (!login.password.empty()) {
    request.Add({"AUTH", login.password});
  }
  if (reads) request.Add({"READONLY"});
  if (request.commands() == 0) return nullptr;
  auto greeting = std::make_unique<RedisExchange>();
  greeting->request = std::make_shared<const RedisRequest>(std::move(request));
  return greeting;
}

// What has no cluster refuses READONLY, which does not matter.
Status CheckGreeting(const RedisExchange& greeting) {
  for (const RespReply& reply : greeting.replies) {
    if (reply.kind != RespReply::Kind::kError || ErrorIs(reply, "ERR")) continue;
    return Unavailable("REDIS_LOGIN", "the server refuses user or password: " + reply.text);
  }
  return OkStatus();
}

}  // namespace

RedisConnection::RedisConnection(RedisSocket socket, const RedisLogin& login, bool reads, Time now)
    : socket_(std::move(socket)), progress_(now), heard_(now) {
  if (std::unique_ptr<RedisExchange> greeting = Greeting(login, reads)) {
    exchanges_.push_back(std::move(greeting));
  }
}

bool RedisConnection::wants_write() const {
  return socket_.wants_write() || (ready_ && written_exchanges_ < exchanges_.size());
}

void RedisConnection::Send(std::unique_ptr<RedisExchange> exchange, Time now) {
  KVS_CHECK(ready_);
  if (exchanges_.empty()) progress_ = now;
  exchanges_.push_back(std::move(exchange));
  if (exchanges_.size() == 1) ExpectNext();
}

Status RedisConnection::Move(Time now, Exchanges* ended) {
  KVS_ASSIGN_OR_RETURN(const bool open, socket_.Open());
  if (!open) return OkStatus();
  if (!ready_ && exchanges_.empty()) ready_ = true;
  const Status read = Read(now, ended);
  if (!read.ok()) return read;
  return Write(now);
}

Status RedisConnection::Write(Time now) {
  uint64_t most = kMostBytes;
  while (written_exchanges_ < exchanges_.size() && most > 0) {
    parts_.clear();
    uint64_t at = written_;
    for (size_t i = written_exchanges_; i < exchanges_.size() && parts_.size() < kMostParts; ++i) {
      exchanges_[i]->request->AppendParts(at, kMostParts, &parts_);
      at = 0;
    }
    KVS_ASSIGN_OR_RETURN(const size_t sent, socket_.Write(parts_));
    if (sent == 0) return OkStatus();
    progress_ = now;
    traffic_.sent += sent;
    most -= std::min<uint64_t>(most, sent);
    written_ += sent;
    while (written_exchanges_ < exchanges_.size() &&
           written_ >= exchanges_[written_exchanges_]->request->bytes()) {
      written_ -= exchanges_[written_exchanges_++]->request->bytes();
    }
  }
  return OkStatus();
}

Status RedisConnection::Read(Time now, Exchanges* ended) {
  // What TLS holds decrypted, the descriptor tells nothing of.
  for (uint64_t sum = 0; sum < kMostBytes || socket_.pending();) {
    KVS_ASSIGN_OR_RETURN(const size_t came, socket_.Read(reader_.Room()));
    if (came == 0) return OkStatus();
    progress_ = heard_ = now;
    traffic_.received += came;
    sum += came;
    reader_.Wrote(came);
    for (;;) {
      RespReply reply;
      KVS_ASSIGN_OR_RETURN(const RespReader::Step step, reader_.Next(&reply));
      if (step == RespReader::Step::kMore) break;
      KVS_RETURN_IF_ERROR(Take(std::move(reply), ended));
    }
  }
  return OkStatus();
}

Status RedisConnection::Take(RespReply reply, Exchanges* ended) {
  // A reply to what was not even sent whole would be a forged one.
  if (written_exchanges_ == 0) {
    const bool refusal = reply.kind == RespReply::Kind::kError;
    return Unavailable("REDIS_PROTOCOL", "a reply that nothing asked for" +
                                             (refusal ? ": " + reply.text : std::string()));
  }
  RedisExchange& first = *exchanges_.front();
  first.replies.push_back(std::move(reply));
  if (first.replies.size() < first.request->commands()) return OkStatus();
  std::unique_ptr<RedisExchange> whole = std::move(exchanges_.front());
  exchanges_.pop_front();
  --written_exchanges_;
  ExpectNext();
  if (ready_) {
    ended->push_back(std::move(whole));
    return OkStatus();
  }
  ready_ = true;
  return CheckGreeting(*whole);
}

void RedisConnection::ExpectNext() {
  const bool direct = !exchanges_.empty() && exchanges_.front()->to_target;
  reader_.Expect(direct ? &exchanges_.front()->target : nullptr);
}

bool RedisConnection::LetGo(const void* owner) {
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    RedisExchange& exchange = *exchanges_[i];
    if (exchange.owner != owner) continue;
    const bool used = i >= written_exchanges_ || (i == 0 && reader_.reading());
    if (used) return false;
    exchange.owner = nullptr;
    exchange.target = {};
    return true;
  }
  return false;
}

RedisConnection::Exchanges RedisConnection::TakeUnanswered() {
  Exchanges all;
  for (std::unique_ptr<RedisExchange>& exchange : exchanges_) {
    if (exchange->owner != nullptr) all.push_back(std::move(exchange));
  }
  exchanges_.clear();
  return all;
}

}  // namespace kvstrata::redis
