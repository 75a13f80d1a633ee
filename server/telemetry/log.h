// SPDX-License-Identifier: Apache-2.0
// The daemon's log: one event a line on stderr, as key=value text or as JSON.
//
//     LogEvent(LogLevel::kInfo, "attached", {{"session", 7}, {"client", name}});
//     2026-11-21T12:00:00.000123Z info event=attached session=7 client=numpy
//     {"ts":"2026-11-21T12:00:00.000123Z","level":"info","event":"attached","session":7,...}
//
// The last ones are kept too (event_ring.h).
//
// Event names and keys are stable. Never put prompt text or token ids here. Lines that other code
// writes through spdlog come out as {"msg": ...} in JSON.
// Thread-safety: any thread after InitLog. Cost: formatting and one write; nothing below the level.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace kvstrata {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarn, kError };
enum class LogFormat : uint8_t { kText, kJson };

// "trace", "debug", "info", "warn" or "warning", "error"; false: another.
bool ParseLogLevel(std::string_view text, LogLevel* out);

// Call once, before threads start. Until then everything from `info` up is text.
void InitLog(LogLevel level, LogFormat format);

// From now on. Any thread, after InitLog.
void SetLogLevel(LogLevel level);

struct LogField {
  LogField(std::string_view k, std::string_view v) : key(k), value(v), quoted(true) {}
  LogField(std::string_view k, const char* v) : LogField(k, std::string_view(v)) {}
  LogField(std::string_view k, const std::string& v) : LogField(k, std::string_view(v)) {}
  LogField(std::string_view k, bool v) : key(k), value(v ? "true" : "false") {}
  template <std::integral T>
  LogField(std::string_view k, T v) : key(k), value(std::to_string(v)) {}

  std::string_view key;
  std::string value;
  bool quoted = false;  // a string in JSON
};

void LogEvent(LogLevel level, std::string_view event, std::initializer_list<LogField> fields);

// Lets `burst` lines a second of one kind through and counts the rest, for lines that a peer can
// provoke. Thread-safety: one thread. Clock: seconds that only grow.
class LogLimiter {
 public:
  explicit LogLimiter(uint32_t burst) : burst_(burst) {}
  // Whether to write now; `*suppressed` is how many were not since the last line.
  bool Allow(int64_t now_s, uint64_t* suppressed);
  bool Allow(uint64_t* suppressed);  // by the steady clock

 private:
  const uint32_t burst_;
  int64_t second_ = -1;
  uint32_t written_ = 0;
  uint64_t suppressed_ = 0;
};

// The text of one event, without time and level: what LogEvent writes in `format`.
std::string FormatEvent(LogFormat format, std::string_view event,
                        std::initializer_list<LogField> fields);

}  // namespace kvstrata
