// SPDX-License-Identifier: Apache-2.0
// Events of the daemon as documents and as text. Pure functions.
#pragma once

#include <cstddef>
#include <string>

#include "client/cli/printer.h"
#include "kvstrata/v1/admin.pb.h"

namespace kvstrata::cli {

// For microseconds since 1970: "2026-11-21T12:00:00.000123Z".
std::string TimeText(int64_t us);
// {"number", "time", "level", "event", "fields": {...}}
Json ToJson(const v1::Event& event);
// Those of `fields` that say something, as the log has them: key=value.
std::string EventDetails(const Json& fields);
// An event for a terminal: a line with number, time of day, level and name, and below it the
// details, folded at spaces so that no line has more than `width` cells where a word allows it.
std::string FoldedEvent(const Json& event, size_t width);

}  // namespace kvstrata::cli
