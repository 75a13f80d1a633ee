// SPDX-License-Identifier: Apache-2.0
// Terminal: a screen of our own for a program that draws frames and takes keys: the alternate
// screen, no echo, no cursor. The terminal is as before whenever the program ends or is stopped:
// when this is destroyed, and by the signals that end or stop it (SIGINT, SIGTERM, SIGHUP, SIGQUIT,
// SIGTSTP, SIGABRT, SIGSEGV), after which the signal does what it does. SIGCONT draws again.
//
// One at a time in a process. Thread-safety: one thread; signals may come to any.
// Errors: FAILED_PRECONDITION TERMINAL_NONE where stdin or stdout is no terminal, or TERM says that
// it cannot.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvstrata::cli {

// Terminals' own words for what follows them, until kReset.
inline constexpr const char *kRed = "\x1b[31m", *kGreen = "\x1b[32m", *kYellow = "\x1b[33m",
                            *kBold = "\x1b[1m", *kDim = "\x1b[2m", *kUnderline = "\x1b[4m",
                            *kInverse = "\x1b[7m", *kReset = "\x1b[0m";

// A character, or one of these.
enum Key : int {
  kNoKey = 0,  // the time is over
  kRedraw,     // the size changed, or the program goes on after a stop
  kEnd,        // the terminal is gone
  kUp,
  kDown,
  kPageUp,
  kPageDown,
  kHome,
  kLast,
  kEscape = 27,
  kEnter = 10,
  kBackspace = 127,
};

struct ScreenSize {
  int columns = 80, rows = 24;
};
// For stdout; `otherwise` where it is no terminal or does not say.
ScreenSize SizeOfScreen(ScreenSize otherwise = {});

// The first `columns` cells of a line that may have colours; what is coloured ends so. Where the
// line was cut, and there are cells enough to say so, the last three are "...".
std::string ClipLine(const std::string& line, int columns);

class Terminal {
 public:
  static Result<std::unique_ptr<Terminal>> Open();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  // Shows these lines from the top, cut to the screen.
  void Draw(const std::vector<std::string>& lines);
  // The next key, within `wait`.
  int ReadKey(std::chrono::milliseconds wait);

 private:
  Terminal() = default;
  int Decode();

  std::string input_;  // bytes that were read and are no key yet
};

// ProgressLine: one line on a terminal's stderr, rewritten; nothing elsewhere.
class ProgressLine {
 public:
  void operator()(const char* phase, int32_t done, int32_t of) const {
    if (enabled_) std::cerr << "\r\x1b[K" << phase << " " << done << "/" << of << std::flush;
  }
  void Clear() const {
    if (enabled_) std::cerr << "\r\x1b[K" << std::flush;
  }

 private:
  const bool enabled_ = isatty(STDERR_FILENO) == 1;
};

}  // namespace kvstrata::cli
