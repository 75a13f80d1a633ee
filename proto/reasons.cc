// SPDX-License-Identifier: Apache-2.0
#include "proto/reasons.h"

#include <algorithm>
#include <vector>

#include "proto/reason_rows.h"

namespace kvstrata {
namespace {

std::vector<Reason> Sorted() {
  std::vector<Reason> all;
  for (const auto rows : {DaemonReasons(), EngineReasons(), ProgramReasons()}) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  std::ranges::sort(all, {}, &Reason::name);
  return all;
}

}  // namespace

std::span<const Reason> AllReasons() {
  static const std::vector<Reason> all = Sorted();
  return all;
}

std::string_view NameOf(ReasonArea area) {
  static constexpr std::string_view kNames[] = {"start",  "connect", "sequence", "plan",
                                                "tensor", "memory",  "disk",     "remote",
                                                "work",   "admin",   "library",  "program"};
  return kNames[static_cast<size_t>(area)];
}

bool SaidByDaemon(ReasonArea area) {
  return area != ReasonArea::kLibrary && area != ReasonArea::kProgram;
}

std::optional<size_t> FindReason(std::string_view name) {
  const std::span<const Reason> all = AllReasons();
  const auto at = std::ranges::lower_bound(all, name, {}, &Reason::name);
  if (at == all.end() || at->name != name) return std::nullopt;
  return static_cast<size_t>(at - all.begin());
}

}  // namespace kvstrata
