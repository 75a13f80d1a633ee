// SPDX-License-Identifier: Apache-2.0
#include "client/cli/invocation.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

#include "base/quantities.h"
#include "client/cli/terminal.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kEvery{2000};
constexpr std::chrono::seconds kPatience{60};

std::string TimeNow() {
  const time_t now = time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

// What show() writes to std::cout.
Result<int> Captured(const std::function<Result<int>()>& show, std::string* text) {
  std::ostringstream frame;
  std::streambuf* const out = std::cout.rdbuf(frame.rdbuf());
  Result<int> code = kFailed;
  try {
    code = show();
  } catch (...) {
    std::cout.rdbuf(out);
    throw;
  }
  std::cout.rdbuf(out);
  *text = frame.str();
  return code;
}

void Append(const Style& style, const std::string& frame) {
  if (style.IsTable()) {
    std::cout << TimeNow() << "\n" << frame << "\n";
  } else if (style.format == Format::kYaml) {
    std::cout << "---\ntime: \"" << TimeNow() << "\"\n" << frame;
  } else if (style.format == Format::kJson) {
    Json line = {{"time", TimeNow()}};
    line.update(Json::parse(frame));
    std::cout << line.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  } else {
    std::cout << frame << "\n";
  }
  std::cout.flush();
}

Result<int> AppendFrames(const Options& options, milliseconds every,
                         const std::function<Result<int>()>& show) {
  for (;;) {
    std::string frame;
    KVS_ASSIGN_OR_RETURN(const int code, Captured(show, &frame));
    Append(options.style, frame);
    if (!std::cout) return code;  // whoever read it went
    std::this_thread::sleep_for(every);
  }
}

// Shows the last frame, and why it is no newer one.
void DrawFrame(const std::string& frame, const Status& status, Terminal* terminal) {
  std::vector<std::string> lines{TimeNow() + "  q quit"};
  if (!status.ok()) {
    lines.back() += "  AWAY (" + std::string(status.reason()) + "), asked again";
  }
  std::istringstream in(frame);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  terminal->Draw(lines);
}

Result<int> RedrawFrames(milliseconds every, const std::function<Result<int>()>& show,
                         Terminal* terminal) {
  std::string frame;  // the last one that there was
  auto heard = steady_clock::now();
  for (bool first = true;; first = false) {
    std::string next;
    const Result<int> code = Captured(show, &next);
    if (code.ok()) {
      frame = std::move(next);
      heard = steady_clock::now();
    } else if (first || code.status().code() != Code::kUnavailable ||
               steady_clock::now() - heard > kPatience) {
      return code.status();
    }
    const auto end = steady_clock::now() + every;
    for (auto left = every; left.count() > 0;
         left = std::chrono::ceil<milliseconds>(end - steady_clock::now())) {
      DrawFrame(frame, code.status(), terminal);
      const int key = terminal->ReadKey(left);
      if (key == 'q' || key == kEnd) return kOk;
    }
  }
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Result<int> Watch(const Options& options, milliseconds every,
                  const std::function<Result<int>()>& show) {
  if (isatty(STDOUT_FILENO) != 1 || !options.style.IsTable()) {
    return AppendFrames(options, every, show);
  }
  const auto terminal = Terminal::Open();
  if (!terminal.ok()) return AppendFrames(options, every, show);
  return RedrawFrames(every, show, terminal.value().get());
}

CLI::Option* AddDuration(CLI::App* verb, const std::string& name, milliseconds* duration,
                         const std::string& description, std::chrono::hours longest) {
  const std::string shown = name.substr(name.find("--"));
  const auto set = [duration, shown, longest](const std::string& text) {
    const auto parsed = ParseDuration(text, longest);
    if (!parsed.ok()) throw CLI::ValidationError(shown, parsed.status().message());
    *duration = *parsed;
  };
  return verb->add_option_function<std::string>(name, set, description)->type_name("DURATION");
}

std::shared_ptr<milliseconds> AddWatchOption(CLI::App* verb) {
  auto every = std::make_shared<milliseconds>(0);
  verb->add_option_function<std::vector<std::string>>(
          "-w,--watch",
          [every](const std::vector<std::string>& given) {
            *every = kEvery;
            if (given.empty() || given[0].empty()) return;
            const auto duration = ParseDuration(given[0]);
            if (!duration.ok()) {
              throw CLI::ValidationError("--watch", duration.status().message());
            }
            *every = *duration;
          },
          "Again and again, every so often (default: 2s); behind the other arguments")
      ->type_name("DURATION")
      ->expected(0, 1);
  return every;
}

std::string PathOf(const CLI::App& verb) {
  const CLI::App* noun = verb.get_parent();
  const bool nested = noun != nullptr && noun->get_parent() != nullptr;
  return (nested ? PathOf(*noun) + " " : "") + verb.get_name();
}

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

namespace {

// The next step for reasons that a start has, too, where another configuration helps.
std::string_view NextOfResize(std::string_view reason) {
  constexpr std::pair<std::string_view, std::string_view> kNext[] = {
      {"POOL_BEYOND_CGROUP",
       "kvstrata tier resize with a smaller SIZE, or first shrink the other pools (kvstrata pool "
       "ls), or raise memory.max"},
      {"POOL_BEYOND_MACHINE",
       "kvstrata tier resize with a smaller SIZE, or first shrink the other pools (kvstrata pool "
       "ls)"},
      {"POOL_SIZE", "kvstrata tier resize with a larger SIZE; kvstrata pool ls has ARENA-SIZE"},
      {"DISK_SPACE", "kvstrata tier resize with a smaller SIZE, or free space (df -h)"},
      {"DISK_BUDGET", "kvstrata tier resize with a SIZE that the message allows"},
      {"RESIZE_PINNED", "kvstrata pin ls, then kvstrata pin rm PIN; or ask for a larger SIZE"},
  };
  const auto* const at =
      std::ranges::find(kNext, reason, [](const auto& row) { return row.first; });
  return at == std::end(kNext) ? "" : at->second;
}

// "REASON: text" of each. A reload has several mistakes, a line each, in which the daemon has
// escaped line feeds (Joined, server/config/config.h).
std::vector<std::string> MistakesOf(const Status& status, const Options& options) {
  std::string text = std::string(status.reason()) + ": " + std::string(status.message());
  std::vector<std::string> mistakes;
  for (size_t end = 0; options.verb == "config reload" && (end = text.find('\n')) != text.npos;) {
    mistakes.push_back(text.substr(0, end));
    text.erase(0, end + 1);
  }
  mistakes.push_back(std::move(text));
  return mistakes;
}

}  // namespace

std::string NextStep(const Status& status, const Options& options) {
  // Servers keep a prompt when the daemon ends, which knows no model after its start.
  if (options.verb.starts_with("tier p") && status.reason() == "MODEL_UNKNOWN") {
    return "a daemon knows a model once an engine has registered it since its start: attach the "
           "engine, see kvstrata model ls, and repeat; or ask another node that has the model";
  }
  if (options.verb.starts_with("tier p") && status.reason() == "LOOKUP_WHAT") {
    return "kvstrata tier probe MODEL FILE; without both it asks the servers for a sign of life";
  }
  if (options.verb == "tier resize" && !NextOfResize(status.reason()).empty()) {
    return std::string(NextOfResize(status.reason()));
  }
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
  for (const std::string& mistake : MistakesOf(status, options)) {
    out << "kvstrata: " << Printable(mistake) << "\n";
  }
  if (!next.empty()) out << "next: " << next << "\n";
}

Result<std::chrono::milliseconds> ParseDuration(const std::string& text,
                                                std::chrono::hours longest) {
  using std::chrono::milliseconds;
  std::chrono::microseconds time{};
  if (!kvstrata::ParseDuration(text, &time) || time < milliseconds(1) || time > longest) {
    return InvalidArgument("DURATION_INVALID", "duration '" + text +
                                                   "'; allowed: " + std::string(kDurationForm) +
                                                   ", 1ms to " + std::to_string(longest.count()) +
                                                   "h, such as 500ms or 1.5s");
  }
  return std::chrono::duration_cast<milliseconds>(time);
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

std::vector<CLI::App*> VerbsOf(const CLI::App& app) {
  std::vector<CLI::App*> verbs;
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
    // By name: only that gives what may be changed.
    if (!verb->get_group().empty()) verbs.push_back(app.get_subcommand(verb->get_name()));
  }
  return verbs;
}

void EachVerb(const CLI::App& app, const std::function<void(CLI::App&, const std::string&)>& f,
              const std::string& path) {
  for (CLI::App* verb : VerbsOf(app)) {
    const std::string name = path.empty() ? verb->get_name() : path + " " + verb->get_name();
    f(*verb, name);
    EachVerb(*verb, f, name);
  }
}

}  // namespace kvstrata::cli
