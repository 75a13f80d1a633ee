#include "client/cli/cgroup_table.h"

namespace kvstrata::cli {
namespace {

constexpr Column kCgroups[] = {
    {"CGROUP LIMIT", "/limit_bytes", Bytes, true},
    {"CHARGED", "/charged_bytes", Bytes, true},
    {"RECLAIMABLE", "/reclaimable_bytes", Bytes, true},
    {"AVAILABLE", "/available_bytes", Bytes, true},
    {"FILE", "/file"},
};

}  // namespace

void PrintCgroups(const Style& style, const Json& document, std::ostream& out) {
  if (style.format != Format::kTable || !style.headers || document.at("cgroups").empty()) return;
  out << "\n";
  PrintList(style, document, "cgroups", kCgroups, out);
}

}  // namespace kvstrata::cli
