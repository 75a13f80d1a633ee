// SPDX-License-Identifier: Apache-2.0
#include "client/cli/event_text.h"

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <sstream>

#include "client/cli/list_fit.h"

namespace kvstrata::cli {
namespace {

// Numbers, true and false are told as such; what cannot be read as one stays text.
Json ValueOf(const v1::EventField& field) {
  if (field.text()) return field.value();
  Json value = Json::parse(field.value(), nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? Json(field.value()) : value;
}

}  // namespace

std::string TimeText(int64_t us) {
  const time_t seconds = us / 1000000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[64];
  const size_t n = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + n, sizeof(text) - n, ".%06dZ", static_cast<int>(us % 1000000));
  return text;
}

Json ToJson(const v1::Event& event) {
  Json fields = Json::object();
  for (const v1::EventField& field : event.fields()) fields[field.key()] = ValueOf(field);
  return {{"number", event.number()},
          {"time", TimeText(event.time_us())},
          {"level", event.level()},
          {"event", event.name()},
          {"fields", fields}};
}

std::string EventDetails(const Json& fields) {
  std::string text, zeros;
  for (const auto& [key, value] : fields.items()) {
    const std::string shown = value.is_string() ? value.get<std::string>() : value.dump();
    if (shown.empty()) continue;
    const bool quoted = shown.find_first_of(" =\"") != std::string::npos;  // as in the log
    std::string& list = shown == "0" ? zeros : text;
    list += (list.empty() ? "" : " ") + key + "=" + (quoted ? value.dump() : Printable(shown));
  }
  if (!text.empty()) return text;
  return zeros.empty() ? "-" : zeros;  // that there was none is all that is said
}

std::string FoldedEvent(const Json& event, size_t width) {
  constexpr size_t kFewest = 16;  // less is worse to read than lines that a terminal folds
  constexpr size_t kIndent = 4, kDay = 11, kToMillis = 12;  // "2026-11-21T", "12:00:00.000"
  const auto time = event["time"].get<std::string>().substr(kDay, kToMillis);
  std::string out = event["number"].dump() + "  " + time + "  " +
                    event["level"].get<std::string>() + "  " +
                    Printable(event["event"].get<std::string>());
  std::istringstream details(EventDetails(event["fields"]));
  size_t cells = width;  // so that the first word begins a line
  // A word that is longer than a line, as a path may be, is broken.
  const size_t room = width < kIndent + kFewest ? SIZE_MAX : width - kIndent;
  for (std::string word; details >> word;) {
    for (const std::string& part : Wrap(word, room)) {
      const size_t wanted = Width(part);
      const bool fits = cells + 1 + wanted <= width;
      out += fits ? " " : "\n" + std::string(kIndent, ' ');
      out += part;
      cells = (fits ? cells + 1 : kIndent) + wanted;
    }
  }
  return out;
}

}  // namespace kvstrata::cli
