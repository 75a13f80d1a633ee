#include "client/cli/invocation.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

namespace kvstrata::cli {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Hint {
  std::string_view reason;
  std::string_view next;
};
constexpr std::array<Hint, 24> kHints = {{
    {"SEQUENCE_UNKNOWN", "list them: kvstrata seq ls"},
    {"SESSION_UNKNOWN", "list them: kvstrata session ls"},
    {"MODEL_UNKNOWN", "list them: kvstrata model ls"},
    {"PLAN_UNKNOWN", "list them: kvstrata plan ls"},
    {"VALUE_UNKNOWN", "list them: kvstrata value ls"},
    {"DISK_BREAKER", "see what the disk failed at: kvstrata tier show"},
    {"DRAIN_DEADLINE",
     "ask again: kvstrata tier drain --timeout 5m; or kvstrata tier drain --resume"},
    {"RESIZE_DEADLINE",
     "see whether it is done: kvstrata tier ls, kvstrata pool ls; wait longer: --timeout 5m"},
    {"WORK_DEADLINE",
     "see it: kvstrata work ls; ask again to wait for the same work: --timeout 5m"},
    {"RESIZE_PINNED", "list them: kvstrata pin ls"},
    {"SCRUB_RUNNING", "wait for it, or end it where it was begun"},
    {"PIN_UNKNOWN", "list them: kvstrata pin ls"},
    {"PIN_MISS", "see what is held: kvstrata lookup MODEL FILE"},
    {"PIN_LIMIT", "see what is pinned: kvstrata pin ls; end one: kvstrata pin rm PIN"},
    {"POOL_EXHAUSTED", "see who holds what: kvstrata session ls; drop the cache: kvstrata evict"},
    {"DEADLINE", "wait longer: --timeout 30s; is it alive? kvstrata health"},
    {"DEADLINE_EXCEEDED", "wait longer: --timeout 30s; is it alive? kvstrata health"},
    {"SOCKET_INVALID", "name the daemon's socket: --socket PATH or KVSTRATA_SOCKET"},
    {"RECALL_TIMEOUT",
     "wait longer: --timeout 5m; ask for less: --steps 2, --every 1; is it "
     "decoding? kvstrata seq ls"},
    {"RECALL_RUNNING",
     "one audit of a sequence at a time; look again with kvstrata audit --recall"},
    {"RECALL_RAW_GONE",
     "audit a sequence whose plan has keep_raw = \"host\"; replay a trace of it: "
     "kvstrata replay"},
    {"SEQUENCE_CLOSED", "list those that live: kvstrata seq ls"},
    {"SESSION_ENDED", "list those that live: kvstrata session ls"},
    {"TRACE_FOREIGN", "docs/traces.md says how one is written"},
}};

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
  for (const Hint& hint : kHints) {
    if (hint.reason == status.reason()) return std::string(hint.next);
  }
  if (status.code() == Code::kUnavailable) {
    return "start a daemon: kvstratad --socket " + options.socket +
           "; or name a running one's socket: --socket PATH, KVSTRATA_SOCKET";
  }
  if (status.code() == Code::kPermissionDenied) {
    return "run it as the daemon's own user or root: sudo kvstrata --socket " + options.socket +
           " ...";
  }
  return status.reason().starts_with("TRACE_") ? "docs/traces.md describes every field" : "";
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
