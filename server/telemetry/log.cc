// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>

#include "server/telemetry/event_ring.h"

namespace kvstrata {
namespace {

// Marks a payload that is JSON members already.
constexpr char kJsonMembers = '\x1e';

LogFormat g_format = LogFormat::kText;
// The level of what the ring keeps: an operator finds incidents there whatever the log leaves out.
std::atomic<LogLevel> g_kept{LogLevel::kInfo};

constexpr spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Quotes a value that would not read back as one word.
std::string TextValue(std::string_view value) {
  const bool plain = !value.empty() && std::ranges::none_of(value, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte <= 0x20 || byte == 0x7F || c == '"' || c == '\\' || c == '=';
  });
  return plain ? std::string(value) : JsonString(value);
}

class JsonPayload : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string_view payload(message.payload.data(), message.payload.size());
    const bool members = !payload.empty() && payload.front() == kJsonMembers;
    const std::string text =
        members ? std::string(payload.substr(1)) : "\"msg\":" + JsonString(payload);
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return spdlog::details::make_unique<JsonPayload>();
  }
};

}  // namespace

bool ParseLogLevel(std::string_view text, LogLevel* out) {
  constexpr std::array<std::string_view, 5> names = {"trace", "debug", "info", "warn", "error"};
  if (text == "warning") text = "warn";
  const auto at = std::ranges::find(names, text);
  if (at == names.end()) return false;
  *out = static_cast<LogLevel>(at - names.begin());
  return true;
}

void InitLog(LogLevel level, LogFormat format) {
  g_format = format;
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  formatter->add_flag<JsonPayload>('*');
  formatter->set_pattern(format == LogFormat::kJson
                             ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%fZ","level":"%l",%*})"
                             : "%Y-%m-%dT%H:%M:%S.%fZ %l %v");
  auto logger = std::make_shared<spdlog::logger>("kvstratad",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  SetLogLevel(level);
}

void SetLogLevel(LogLevel level) {
  g_kept = std::min(level, LogLevel::kInfo);
  spdlog::default_logger_raw()->set_level(ToSpdlog(level));
}

void LogEvent(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  if (level >= g_kept.load(std::memory_order_relaxed)) RecentEvents().Add(level, event, fields);
  spdlog::logger* logger = spdlog::default_logger_raw();
  if (!logger->should_log(ToSpdlog(level))) return;
  const std::string line = FormatEvent(g_format, event, fields);
  logger->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

bool LogLimiter::Allow(int64_t now_s, uint64_t* suppressed) {
  if (now_s != second_) {
    second_ = now_s;
    written_ = 0;
  }
  if (written_ == burst_) {
    ++suppressed_;
    return false;
  }
  ++written_;
  *suppressed = std::exchange(suppressed_, 0);
  return true;
}

bool LogLimiter::Allow(uint64_t* suppressed) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return Allow(std::chrono::duration_cast<std::chrono::seconds>(now).count(), suppressed);
}

std::string FormatEvent(LogFormat format, std::string_view event,
                        std::initializer_list<LogField> fields) {
  const bool json = format == LogFormat::kJson;
  std::string out(json ? 1 : 0, kJsonMembers);
  const auto member = [&out, json](std::string_view key, std::string_view value, bool quoted) {
    if (out.size() > 1) out += json ? ',' : ' ';
    out += json ? JsonString(key) : std::string(key);
    out += json ? ':' : '=';
    out += !json ? TextValue(value) : quoted ? JsonString(value) : std::string(value);
  };
  member("event", event, true);
  for (const LogField& field : fields) member(field.key, field.value, field.quoted);
  return out;
}

}  // namespace kvstrata
