// SPDX-License-Identifier: Apache-2.0
#include "client/cli/cgroup_table.h"

namespace kvstrata::cli {
namespace {

constexpr Column kCgroups[] = {
    {"CGROUP-LIMIT", "/limit_bytes", Bytes, true},
    {"CHARGED", "/charged_bytes", Bytes, true, 1},
    {"RECLAIMABLE", "/reclaimable_bytes", Bytes, true},
    {"AVAILABLE", "/available_bytes", Bytes, true, 2},
    {"FILE", "/file", nullptr, false, 3, 16},
};

}  // namespace

void PrintCgroups(const Style& style, const Json& document, std::ostream& out) {
  if (!style.IsTable() || !style.headers || document.at("cgroups").empty()) return;
  out << "\n";
  PrintList(style, document, "cgroups", kCgroups, out);
}

}  // namespace kvstrata::cli
