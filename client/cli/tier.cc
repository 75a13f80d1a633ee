// tier ls|show: what is below memory.
#include <iostream>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

std::string Errors(const Json& row) {
  const auto count = [&row](const char* key) { return row.value(key, uint64_t{0}); };
  return std::to_string(count("corrupt") + count("io_errors") + count("deadlines"));
}

constexpr Column kList[] = {
    {"PATH", "/path"},
    {"QUEUE", "/queue"},
    {"CAPACITY", "/capacity_bytes", Bytes, true},
    {"USED", "/used_bytes", Bytes, true},
    {"ENTRIES", "/entries", nullptr, true},
    {"WAITING", "/waiting", nullptr, true},
    {"WRITTEN", "/written", nullptr, true},
    {"READ", "/read", nullptr, true},
    {"DROPPED", "/dropped", nullptr, true},
    {"ERRORS", "", Errors, true},
    {"DEGRADED", "/degraded", OrDash},
};

Result<int> List(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()));
  const Json document = {{"tiers", ToJson(answer).at("disks")}};
  PrintList(options.style, document, "tiers", kList, std::cout);
  return kOk;
}

constexpr Column kRecord[] = {
    {"PATH", "/path"},
    {"QUEUE", "/queue"},
    {"O_DIRECT", "/direct", YesNo},
    {"DEGRADED", "/degraded", OrDash},
    {"BREAKER OPEN", "/breaker_open", YesNo},
    {"STOPPED SEGMENTS", "/stopped_segments"},
    {"CAPACITY", "/capacity_bytes", Bytes},
    {"USED", "/used_bytes", Bytes},
    {"ENTRIES", "/entries"},
    {"WAITING", "/waiting"},
    {"WRITTEN", "/written"},
    {"ALREADY GONE", "/gone"},
    {"DROPPED, QUEUE FULL", "/dropped"},
    {"FAILED", "/failed"},
    {"EVICTED", "/evicted"},
    {"READ", "/read"},
    {"LATE LOADS", "/late_loads"},
    {"REFUSED LOADS", "/refused_loads"},
    {"CORRUPT", "/corrupt"},
    {"I/O ERRORS", "/io_errors"},
    {"DEADLINES", "/deadlines"},
};

Result<int> Show(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()));
  if (answer.disks().empty()) {
    return NotFound("TIER_UNKNOWN", "the daemon has no disk tier: disk.path is not set");
  }
  PrintRecord(options.style, ToJson(answer.disks(0)), kRecord, std::cout);
  return kOk;
}

}  // namespace

void AddTier(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("tier", "Tiers: the disk below memory");
  noun->require_subcommand(1);
  Runs(noun->add_subcommand("ls", "What the disk tier holds, what it failed at, and why"),
       invocation, [&invocation] { return List(invocation.options); });
  Runs(noun->add_subcommand("show", "All of the disk tier's state and counters"), invocation,
       [&invocation] { return Show(invocation.options); });
}

}  // namespace kvstrata::cli
