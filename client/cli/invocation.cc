#include "client/cli/invocation.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int ExitCodeOf(const Status& status) {
  if (status.ok()) return kOk;
  if (status.reason() == "SOCKET_INVALID") return kNotConnected;
  if (status.reason() == "PLAN_UNKNOWN") return kNotFound;
  if (status.reason() == "DISK_BREAKER") return kFailed;  // the daemon is there
  if (status.reason().starts_with("TRACE_") && status.code() != Code::kNotFound) return kFailed;
  switch (status.code()) {
    case Code::kInvalidArgument:
      return kUsage;
    case Code::kUnavailable:
      return kNotConnected;
    case Code::kPermissionDenied:
    case Code::kUnauthenticated:
      return kDenied;
    case Code::kNotFound:
      return kNotFound;
    case Code::kDeadlineExceeded:
      return kTimeout;
    default:
      return kFailed;
  }
}

std::string NextStep(const Status& status, const Options& options) {
  if (const auto at = FindReason(status.reason()); at && !AllReasons()[*at].next.empty()) {
    return std::string(AllReasons()[*at].next);
  }
  constexpr const char* kPackaged = "/run/kvstrata/kvstratad.sock";
  if (status.code() == Code::kUnavailable && options.socket != kPackaged &&
      access(kPackaged, F_OK) == 0) {
    return std::string("there is a daemon's socket at ") + kPackaged +
           ": export KVSTRATA_SOCKET=" + kPackaged;
  }
  if (status.code() == Code::kUnavailable) {
    return "start a daemon: kvstratad --socket " + options.socket +
           "; or name a running one's socket: --socket PATH, KVSTRATA_SOCKET";
  }
  if (status.code() == Code::kPermissionDenied) {
    return "run it as the daemon's own user or root: sudo kvstrata --socket " + options.socket +
           " ...";
  }
  return "";
}

void PrintError(const Status& status, const Options& options, std::ostream& out) {
  const std::string next = NextStep(status, options);
  if (options.style.format == Format::kJson) {
    const Json error = {{"error",
                         {{"code", CodeName(status.code())},
                          {"reason", status.reason()},
                          {"message", status.message()},
                          {"next", next}}}};
    return PrintDocument(Format::kJson, error, out);
  }
  out << "kvstrata: " << status.reason() << ": " << Printable(status.message()) << "\n";
  if (!next.empty()) out << "next: " << next << "\n";
}

Result<std::chrono::milliseconds> ParseDuration(const std::string& text,
                                                std::chrono::hours longest) {
  const Status bad = InvalidArgument(
      "DURATION_INVALID", "duration '" + text + "': allowed are 1ms .. " +
                              std::to_string(longest.count()) + "h, such as 500ms, 5s or 2m");
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return bad;
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  if (unit == "s" || unit.empty()) {
    number *= 1000;
  } else if (unit == "m") {
    number *= 60 * 1000;
  } else if (unit == "h") {
    number *= 3600 * 1000;
  } else if (unit == "d") {
    number *= 24 * 3600 * 1000;
  } else if (unit != "ms") {
    return bad;
  }
  const std::chrono::duration<double, std::milli> most = longest;
  if (!(number >= 1 && number <= most.count())) return bad;
  return std::chrono::milliseconds(static_cast<int64_t>(number));
}

std::string DefaultSocket() {
  if (const std::string named = Environment("KVSTRATA_SOCKET"); !named.empty()) return named;
  if (const std::string run = Environment("XDG_RUNTIME_DIR"); !run.empty()) {
    return run + "/kvstrata/kvstratad.sock";
  }
  if (geteuid() == 0) return "/run/kvstrata/kvstratad.sock";
  return "/tmp/kvstrata-" + std::to_string(geteuid()) + "/kvstratad.sock";
}

bool ColourWanted() {
  return Environment("NO_COLOR").empty() && Environment("TERM") != "dumb" &&
         isatty(STDOUT_FILENO) == 1;
}

}  // namespace kvstrata::cli
