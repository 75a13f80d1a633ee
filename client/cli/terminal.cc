// SPDX-License-Identifier: Apache-2.0
#include "client/cli/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string_view>

namespace kvstrata::cli {
namespace {

constexpr std::string_view kEnterScreen = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J";
constexpr std::string_view kLeaveScreen = "\x1b[0m\x1b[?25h\x1b[?1049l";
constexpr std::array kEnds = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGABRT, SIGSEGV};

// What signal handlers need: one terminal a process.
termios before, raw;
volatile sig_atomic_t is_ours = 0;
int wake[2] = {-1, -1};

void Say(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    text.remove_prefix(static_cast<size_t>(n));
  }
}

// Async-signal-safe.
void Take() {
  is_ours = 1;
  tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
  Say(kEnterScreen);
}
void GiveBack() {
  if (is_ours == 0) return;
  is_ours = 0;
  Say(kLeaveScreen);
  tcsetattr(STDIN_FILENO, TCSADRAIN, &before);
}

void Handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigaction(signal, &action, nullptr);
}

// The signal's own effect, which is that of a process without us.
void Default(int signal) {
  Handle(signal, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  raise(signal);
}

void Wake() {
  const char byte = 0;
  (void)!write(wake[1], &byte, 1);
}

void OnEnd(int signal) {
  GiveBack();
  Default(signal);
}
void OnResize(int) { Wake(); }
void OnStop(int) {
  const int error = errno;
  GiveBack();
  Default(SIGTSTP);  // returns when the program goes on
  Handle(SIGTSTP, OnStop);
  Take();
  Wake();
  errno = error;
}

bool Readable(int timeout_ms) {
  pollfd ready[] = {{STDIN_FILENO, POLLIN, 0}, {wake[0], POLLIN, 0}};
  return poll(ready, 2, timeout_ms) > 0;
}

struct Sequence {
  std::string_view bytes;
  Key key;
};
constexpr Sequence kSequences[] = {
    {"\x1b[A", kUp},      {"\x1bOA", kUp},        {"\x1b[B", kDown}, {"\x1bOB", kDown},
    {"\x1b[5~", kPageUp}, {"\x1b[6~", kPageDown}, {"\x1b[H", kHome}, {"\x1bOH", kHome},
    {"\x1b[1~", kHome},   {"\x1b[F", kLast},      {"\x1bOF", kLast}, {"\x1b[4~", kLast},
};

}  // namespace

ScreenSize SizeOfScreen(ScreenSize otherwise) {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
    return otherwise;
  }
  return {size.ws_col, size.ws_row};
}

namespace {

// The end of the escape sequence or of the character that begins at `i`.
size_t EndOfNext(const std::string& line, size_t i) {
  if (line[i] == '\x1b') return std::min(line.find('m', i), line.size() - 1) + 1;
  do {
    ++i;
  } while (i < line.size() && (static_cast<unsigned char>(line[i]) & 0xC0) == 0x80);
  return i;
}

int WidthOf(const std::string& line) {
  int cells = 0;
  for (size_t i = 0; i < line.size(); i = EndOfNext(line, i)) cells += line[i] == '\x1b' ? 0 : 1;
  return cells;
}

}  // namespace

std::string ClipLine(const std::string& line, int columns) {
  constexpr std::string_view kDots = "...";
  constexpr int kFewestWithDots = 8;
  const bool dots = columns >= kFewestWithDots && WidthOf(line) > columns;
  const int kept = dots ? columns - static_cast<int>(kDots.size()) : columns;
  std::string out;
  bool coloured = false;
  int cells = 0;
  for (size_t i = 0; i < line.size();) {
    const size_t end = EndOfNext(line, i);
    if (line[i] == '\x1b') coloured = line.compare(i, end - i, "\x1b[0m") != 0;
    if (line[i] != '\x1b' && cells++ == kept) break;
    out.append(line, i, end - i);
    i = end;
  }
  if (dots) out += kDots;
  return coloured ? out + "\x1b[0m" : out;
}

Result<std::unique_ptr<Terminal>> Terminal::Open() {
  const char* term = std::getenv("TERM");
  const bool dumb = term == nullptr || std::strcmp(term, "dumb") == 0 || *term == 0;
  if (dumb || isatty(STDIN_FILENO) != 1 || isatty(STDOUT_FILENO) != 1 ||
      tcgetattr(STDIN_FILENO, &before) != 0) {
    return FailedPrecondition("TERMINAL_NONE",
                              "stdin and stdout are no terminal that can be drawn on");
  }
  raw = before;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  raw.c_cc[VMIN] = 0;
  raw.c_cc[VTIME] = 0;
  if (pipe2(wake, O_CLOEXEC | O_NONBLOCK) != 0) {
    return ResourceExhausted("TERMINAL_NONE", std::string("pipe: ") + std::strerror(errno));
  }
  for (const int signal : kEnds) Handle(signal, OnEnd);
  Handle(SIGTSTP, OnStop);
  Handle(SIGWINCH, OnResize);
  std::cout.flush();
  Take();
  return std::unique_ptr<Terminal>(new Terminal);
}

Terminal::~Terminal() {
  GiveBack();
  for (const int signal : kEnds) Handle(signal, SIG_DFL);
  Handle(SIGTSTP, SIG_DFL);
  Handle(SIGWINCH, SIG_DFL);
  close(wake[0]);
  close(wake[1]);
}

void Terminal::Draw(const std::vector<std::string>& lines) {
  const ScreenSize size = SizeOfScreen();
  std::string frame = "\x1b[H";
  const size_t shown = std::min(lines.size(), static_cast<size_t>(size.rows));
  for (size_t i = 0; i < shown; ++i) {
    frame += ClipLine(lines[i], size.columns) + "\x1b[K";
    if (i + 1 < static_cast<size_t>(size.rows)) frame += "\r\n";
  }
  if (shown < static_cast<size_t>(size.rows)) frame += "\x1b[J";
  Say(frame);
}

int Terminal::Decode() {
  for (const Sequence& known : kSequences) {
    if (!input_.starts_with(known.bytes)) continue;
    input_.erase(0, known.bytes.size());
    return known.key;
  }
  const auto first = static_cast<unsigned char>(input_[0]);
  if (first == kEscape && input_.size() > 1 && (input_[1] == '[' || input_[1] == 'O')) {
    input_.clear();  // the rest of a key that means nothing here
    return kNoKey;
  }
  input_.erase(0, 1);
  if (first == '\r') return kEnter;
  return first == '\b' ? static_cast<int>(kBackspace) : first;
}

int Terminal::ReadKey(std::chrono::milliseconds wait) {
  if (!input_.empty()) return Decode();
  const auto end = std::chrono::steady_clock::now() + wait;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    const bool ready = Readable(std::max<int>(0, static_cast<int>(left.count())));
    std::array<char, 64> bytes;
    if (read(wake[0], bytes.data(), bytes.size()) > 0) return kRedraw;
    if (!ready && left.count() <= 0) return kNoKey;
    if (!ready) continue;  // a signal
    const ssize_t n = read(STDIN_FILENO, bytes.data(), bytes.size());
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return kEnd;
    if (n < 0) continue;
    input_.assign(bytes.data(), static_cast<size_t>(n));
    return Decode();
  }
}

}  // namespace kvstrata::cli
