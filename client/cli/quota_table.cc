// SPDX-License-Identifier: Apache-2.0
#include "client/cli/quota_table.h"

#include <array>
#include <string>

namespace kvstrata::cli {
namespace {

constexpr Column kCgroups[] = {
    {"CGROUP-LIMIT", "/limit_bytes", Bytes, true},
    {"CHARGED", "/charged_bytes", Bytes, true, 1},
    {"RECLAIMABLE", "/reclaimable_bytes", Bytes, true},
    {"AVAILABLE", "/available_bytes", Bytes, true, 2},
    {"FILE", "/file", nullptr, false, 3, 16},
};

struct LimitColumn {
  const char* name;  // in UserNumbers
  std::string (*format)(const Json& value);
};

std::string Count(const Json& value) { return value.dump(); }

constexpr std::array<LimitColumn, 8> kLimits = {{
    {"sessions", Count},
    {"attaches_per_second", Count},
    {"connections", Count},
    {"models", Count},
    {"sequences", Count},
    {"device_bytes", Bytes},
    {"host_bytes", Bytes},
    {"queued_work", Count},
}};

uint64_t NumberOf(const Json& row, const char* numbers, const char* limit) {
  return row.contains(numbers) ? row.at(numbers).value(limit, uint64_t{0}) : 0;
}

// "3 / 512"; without a limit "3", of the defaults "512".
template <size_t kLimit>
std::string HeldOf(const Json& row) {
  const LimitColumn& column = kLimits[kLimit];
  const uint64_t most = NumberOf(row, "limits", column.name);
  const std::string limit = most == 0 ? "-" : column.format(most);
  if (!row.contains("used")) return limit;
  return column.format(NumberOf(row, "used", column.name)) + " / " + limit;
}

constexpr Column kQuotas[] = {
    {"USER", "/user"},
    {"SESSIONS", "", HeldOf<0>, true, 4},
    {"ATTACHES/S", "", HeldOf<1>, true},
    {"CONNECTIONS", "", HeldOf<2>, true},
    {"MODELS", "", HeldOf<3>, true, 1},
    {"SEQUENCES", "", HeldOf<4>, true, 3},
    {"DEVICE", "", HeldOf<5>, true, 5},
    {"HOST", "", HeldOf<6>, true, 2},
    {"QUEUED", "", HeldOf<7>, true},
    {"REFUSED", "/refused", nullptr, true, 6},
    {"CLUSTER-TENANT", "/cluster_tenant", OrDash, false, 2},
};
// For programs each number has a column.
constexpr Column kNumbers[] = {
    {"USER", "/user"},
    {"SESSIONS", "/used/sessions"},
    {"SESSIONS-LIMIT", "/limits/sessions"},
    {"ATTACHES/S", "/used/attaches_per_second"},
    {"ATTACHES/S-LIMIT", "/limits/attaches_per_second"},
    {"CONNECTIONS", "/used/connections"},
    {"CONNECTIONS-LIMIT", "/limits/connections"},
    {"MODELS", "/used/models"},
    {"MODELS-LIMIT", "/limits/models"},
    {"SEQUENCES", "/used/sequences"},
    {"SEQUENCES-LIMIT", "/limits/sequences"},
    {"DEVICE", "/used/device_bytes"},
    {"DEVICE-LIMIT", "/limits/device_bytes"},
    {"HOST", "/used/host_bytes"},
    {"HOST-LIMIT", "/limits/host_bytes"},
    {"QUEUED", "/used/queued_work"},
    {"QUEUED-LIMIT", "/limits/queued_work"},
    {"REFUSED", "/refused"},
    {"CLUSTER-TENANT", "/cluster_tenant", OrDash},
};

// "sessions 500 of 512, models 256 of 256"
std::string NearLimits(const Json& row) {
  std::string text;
  for (const LimitColumn& column : kLimits) {
    const uint64_t most = NumberOf(row, "limits", column.name);
    const uint64_t used = NumberOf(row, "used", column.name);
    if (most == 0 || used < most - most / 5) continue;
    text += (text.empty() ? "" : ", ") + std::string(column.name) + " " + column.format(used) +
            " of " + column.format(most);
  }
  return text.empty() ? "-" : text;
}

constexpr Column kAtLimits[] = {
    {"USER", "/user"},
    {"REFUSED", "/refused", nullptr, true},
    {"NEAR-ITS-LIMITS", "", NearLimits, false, 1, 24},
};

}  // namespace

void PrintCgroups(const Style& style, const Json& document, std::ostream& out) {
  if (!style.headers || document.at("cgroups").empty()) return;
  PrintBelow(style, document, "cgroups", kCgroups, out);
}

void PrintQuotas(const Style& style, const Json& document, std::ostream& out) {
  if (style.IsDocument()) return PrintDocument(style.format, document, out);
  Json rows = {{"users", Json::array()}};
  if (document.contains("defaults")) {
    rows["users"].push_back({{"user", "default"}, {"limits", document.at("defaults")}});
  }
  for (const Json& user : document.at("users")) rows["users"].push_back(user);
  PrintList(style, rows, "users", style.IsTable() ? std::span<const Column>(kQuotas) : kNumbers,
            out);
}

void PrintUsersAtLimits(const Style& style, const Json& document, std::ostream& out) {
  if (!style.headers) return;
  Json rows = {{"users", Json::array()}};
  for (const Json& user : document.at("users")) {
    const bool refused = user.value("refused", uint64_t{0}) != 0;
    if (refused || NearLimits(user) != "-") rows["users"].push_back(user);
  }
  if (rows["users"].empty()) return;
  PrintBelow(style, rows, "users", kAtLimits, out);
}

}  // namespace kvstrata::cli
