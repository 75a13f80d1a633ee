// SPDX-License-Identifier: Apache-2.0
// Events: every line that the daemon's log can have, by its stable name, when it comes and with
// which fields. One table: `kvstrata explain`, completions and docs/operations.md, "The log", are
// made from it. tests/tree/check_events.py proves that it has what the code says.
//
// Static data and pure functions; any thread.
#pragma once

#include <span>
#include <string_view>

namespace kvstrata {

struct EventKind {
  std::string_view name;     // "pool_failed"
  std::string_view level;    // "info", or "info, warning" where it depends
  std::string_view meaning;  // when it comes
  std::string_view fields;   // "tier device reason why"; a field that says nothing is left out
};

// All, by name.
std::span<const EventKind> AllEvents();

}  // namespace kvstrata
