// SPDX-License-Identifier: Apache-2.0
// RespReader: reads replies of a Redis or Valkey server (RESP2) out of a stream of bytes, in pieces
// of any size.
//
// A reply is small (a number, an error, a list) and becomes a RespReply, or it is a value, and its
// bytes go straight to where they belong: while one is read, Room() is the caller's memory. Nothing
// that a server says is believed: lines, lists, nesting and values have limits, and what exceeds
// one, or is no RESP, is an error after which the stream is of no use.
//
// Thread-safety: none. Cost: 16 KiB; a small reply is copied once, a value not at all but for what
// came along with its first line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata::redis {

struct RespReply {
  enum class Kind : uint8_t { kText, kError, kInteger, kBulk, kNone, kList };
  Kind kind = Kind::kNone;
  int64_t integer = 0;           // value of kInteger; bytes of a kBulk
  std::string text;              // text of kText, kError, and of a kBulk that had no BulkTarget
  std::vector<RespReply> items;  // items of kList
};

// Where the bytes of a value go: the first to `head`, the others to `buffers`.
struct BulkTarget {
  std::span<std::byte> head;
  std::vector<std::span<std::byte>> buffers;
  uint64_t bytes() const;  // bytes of all together
};

class RespReader {
 public:
  static constexpr size_t kMaxLine = 8192;
  static constexpr size_t kMaxItems = size_t{1} << 19;  // in one reply, lists in lists counted
  static constexpr size_t kMaxNesting = 8;
  static constexpr uint64_t kMaxText = uint64_t{64} << 20;  // bytes of one reply without a target
  static constexpr uint64_t kMaxBulk = uint64_t{64} << 20;  // bytes of a value

  enum class Step : uint8_t { kMore, kReply };

  RespReader();

  // What the next reply is read into, if it is a value. One of another size than the target fills
  // `head`, as far as it goes, and nothing else: its other bytes are dropped. Null: into its text.
  // REQUIRES: !reading(). Borrowed until that reply has come.
  void Expect(const BulkTarget* target) { target_ = target; }
  // Whether the first line of the next reply was read, and the rest of it was not.
  bool reading() const { return state_ != State::kLine || !lists_.empty(); }

  // Memory for the next bytes of the stream, at least one, never more than belong there.
  std::span<std::byte> Room();
  // That many bytes were written to Room().
  void Wrote(size_t bytes);
  // kReply: `*reply` has come. kMore: it needs more bytes. Not OK: UNAVAILABLE REDIS_PROTOCOL.
  Result<Step> Next(RespReply* reply);

 private:
  enum class State : uint8_t { kLine, kText, kValue, kValueEnd };
  struct List {
    RespReply reply;
    uint64_t left = 0;
  };

  // A line without its end; nothing: it has not come whole.
  Result<bool> TakeLine(std::string_view* line);
  // What a line says; kReply: it is whole.
  Result<Step> ReadLine(std::string_view line, RespReply* reply);
  Result<Step> BeginBulk(int64_t bytes, RespReply* reply);
  Result<Step> BeginList(int64_t items, RespReply* reply);
  Result<Step> TakeText(RespReply* reply);
  Result<Step> TakeValue(RespReply* reply);
  Result<bool> TakeEnd();
  // One reply more: of the innermost list, or the whole one.
  Step Add(RespReply one, RespReply* reply);
  // Where the value's byte `at_` goes; empty: it is dropped.
  std::span<std::byte> PlaceOfValue() const;
  size_t held() const { return end_ - begin_; }

  const std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;  // what is in it
  const BulkTarget* target_ = nullptr;
  State state_ = State::kLine;
  uint64_t bytes_ = 0, at_ = 0;          // length of the bulk that is read; how much of it is there
  std::string text_;                     // its text
  std::vector<List> lists_;              // outermost first
  uint64_t items_ = 0, text_bytes_ = 0;  // those of the reply that is read
};

// Whether an error begins with this word.
bool ErrorIs(const RespReply& reply, std::string_view word);

}  // namespace kvstrata::redis
