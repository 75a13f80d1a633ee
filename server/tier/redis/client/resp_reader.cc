// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/resp_reader.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace kvstrata::redis {
namespace {

constexpr size_t kBuffer = 16384;
static_assert(RespReader::kMaxLine + 2 < kBuffer);

Status Broken(const std::string& what) {
  return Unavailable("REDIS_PROTOCOL", "the server's reply is no RESP: " + what);
}

Result<int64_t> NumberOf(std::string_view line) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  if (error != std::errc() || end != line.data() + line.size()) return Broken("no number");
  return number;
}

}  // namespace

uint64_t BulkTarget::bytes() const {
  uint64_t sum = head.size();
  for (const auto& buffer : buffers) sum += buffer.size();
  return sum;
}

bool ErrorIs(const RespReply& reply, std::string_view word) {
  return reply.kind == RespReply::Kind::kError && reply.text.starts_with(word) &&
         (reply.text.size() == word.size() || reply.text[word.size()] == ' ');
}

RespReader::RespReader() : buffer_(std::make_unique<std::byte[]>(kBuffer)) {}

std::span<std::byte> RespReader::PlaceOfValue() const {
  if (at_ < target_->head.size()) {
    return target_->head.subspan(at_, std::min(target_->head.size() - at_, bytes_ - at_));
  }
  if (bytes_ != target_->bytes()) return {};
  uint64_t skip = at_ - target_->head.size();
  for (const std::span<std::byte>& buffer : target_->buffers) {
    if (skip < buffer.size()) return buffer.subspan(skip);
    skip -= buffer.size();
  }
  return {};
}

std::span<std::byte> RespReader::Room() {
  if (state_ == State::kValue && held() == 0) {
    if (const std::span<std::byte> place = PlaceOfValue(); !place.empty()) return place;
  }
  if (begin_ != 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, held());
    end_ -= std::exchange(begin_, 0);
  }
  return std::span(buffer_.get(), kBuffer).subspan(end_);
}

void RespReader::Wrote(size_t bytes) {
  const bool direct = state_ == State::kValue && held() == 0 && !PlaceOfValue().empty();
  (direct ? at_ : end_) += bytes;
}

Result<bool> RespReader::TakeLine(std::string_view* line) {
  const std::string_view all(reinterpret_cast<const char*>(buffer_.get() + begin_), held());
  const size_t end = all.substr(0, kMaxLine + 2).find("\r\n");
  if (end == std::string_view::npos) {
    if (all.size() >= kMaxLine + 2) return Broken("a line is too long");
    return false;
  }
  *line = all.substr(0, end);
  begin_ += end + 2;
  return true;
}

Result<bool> RespReader::TakeEnd() {
  if (held() < 2) return false;
  if (std::memcmp(buffer_.get() + begin_, "\r\n", 2) != 0) return Broken("a value has no end");
  begin_ += 2;
  return true;
}

Result<RespReader::Step> RespReader::Next(RespReply* reply) {
  for (;;) {
    Result<Step> step = Step::kMore;
    if (state_ == State::kLine) {
      std::string_view line;
      KVS_ASSIGN_OR_RETURN(const bool whole, TakeLine(&line));
      if (!whole) return Step::kMore;
      step = ReadLine(line, reply);
    } else {
      step = state_ == State::kText ? TakeText(reply) : TakeValue(reply);
      if (step.ok() && *step == Step::kMore && state_ != State::kLine) return Step::kMore;
    }
    if (!step.ok()) return step;
    if (*step != Step::kReply) continue;
    items_ = text_bytes_ = 0;
    return Step::kReply;
  }
}

Result<RespReader::Step> RespReader::ReadLine(std::string_view line, RespReply* reply) {
  using Kind = RespReply::Kind;
  if (line.empty()) return Broken("an empty line");
  const std::string_view rest = line.substr(1);
  switch (line[0]) {
    case '+':
    case '-':
      text_bytes_ += rest.size();
      if (text_bytes_ > kMaxText) return Broken("too much text in one reply");
      return Add({line[0] == '+' ? Kind::kText : Kind::kError, 0, std::string(rest), {}}, reply);
    case ':': {
      KVS_ASSIGN_OR_RETURN(const int64_t number, NumberOf(rest));
      return Add({Kind::kInteger, number, "", {}}, reply);
    }
    case '$': {
      KVS_ASSIGN_OR_RETURN(const int64_t bytes, NumberOf(rest));
      return BeginBulk(bytes, reply);
    }
    case '*': {
      KVS_ASSIGN_OR_RETURN(const int64_t items, NumberOf(rest));
      return BeginList(items, reply);
    }
    default:
      return Broken("an unknown kind of reply");
  }
}

Result<RespReader::Step> RespReader::BeginBulk(int64_t bytes, RespReply* reply) {
  if (bytes == -1) return Add({}, reply);
  const bool direct = target_ != nullptr && lists_.empty();
  const uint64_t most = direct ? kMaxBulk : kMaxText - text_bytes_;
  if (bytes < 0 || static_cast<uint64_t>(bytes) > most) return Broken("a value of a wrong size");
  bytes_ = static_cast<uint64_t>(bytes);
  at_ = 0;
  text_.clear();
  if (!direct) text_bytes_ += bytes_;
  state_ = direct ? State::kValue : State::kText;
  return Step::kMore;
}

Result<RespReader::Step> RespReader::BeginList(int64_t items, RespReply* reply) {
  if (items == -1) return Add({}, reply);
  if (items < 0 || static_cast<uint64_t>(items) > kMaxItems - items_) {
    return Broken("a list of a wrong size");
  }
  RespReply list{RespReply::Kind::kList, 0, "", {}};
  if (items == 0) return Add(std::move(list), reply);
  if (lists_.size() == kMaxNesting) return Broken("lists in lists in lists");
  items_ += static_cast<uint64_t>(items);
  lists_.push_back({std::move(list), static_cast<uint64_t>(items)});  // grows as its items come
  return Step::kMore;
}

RespReader::Step RespReader::Add(RespReply one, RespReply* reply) {
  for (;;) {
    if (lists_.empty()) {
      *reply = std::move(one);
      return Step::kReply;
    }
    List& list = lists_.back();
    list.reply.items.push_back(std::move(one));
    if (--list.left != 0) return Step::kMore;
    one = std::move(list.reply);
    lists_.pop_back();
  }
}

Result<RespReader::Step> RespReader::TakeText(RespReply* reply) {
  const size_t take = std::min<uint64_t>(held(), bytes_ - at_);
  text_.append(reinterpret_cast<const char*>(buffer_.get() + begin_), take);
  begin_ += take;
  at_ += take;
  if (at_ < bytes_) return Step::kMore;
  KVS_ASSIGN_OR_RETURN(const bool ended, TakeEnd());
  if (!ended) return Step::kMore;
  state_ = State::kLine;
  return Add({RespReply::Kind::kBulk, static_cast<int64_t>(bytes_), std::move(text_), {}}, reply);
}

Result<RespReader::Step> RespReader::TakeValue(RespReply* reply) {
  while (state_ == State::kValue && at_ < bytes_ && held() != 0) {
    const std::span<std::byte> place = PlaceOfValue();
    size_t take = std::min<uint64_t>(held(), bytes_ - at_);
    if (!place.empty()) {
      take = std::min(take, place.size());
      std::memcpy(place.data(), buffer_.get() + begin_, take);
    }
    begin_ += take;
    at_ += take;
  }
  if (at_ < bytes_) return Step::kMore;
  state_ = State::kValueEnd;
  KVS_ASSIGN_OR_RETURN(const bool ended, TakeEnd());
  if (!ended) return Step::kMore;
  state_ = State::kLine;
  return Add({RespReply::Kind::kBulk, static_cast<int64_t>(bytes_), "", {}}, reply);
}

}  // namespace kvstrata::redis
