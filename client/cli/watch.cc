// SPDX-License-Identifier: Apache-2.0
#include "client/cli/watch.h"

#include <unistd.h>

#include <ctime>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cli/terminal.h"

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

}  // namespace kvstrata::cli
