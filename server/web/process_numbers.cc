// SPDX-License-Identifier: Apache-2.0
#include "server/web/process_numbers.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace kvstrata {
namespace {

double SecondsOf(const timeval& t) {
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
}

// Field `n` of /proc/self/stat, from 3 on: the second one is a name, with anything in it.
uint64_t StatField(int n) {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= n; ++i) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

uint64_t BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string key; file >> key;) {
    uint64_t seconds = 0;
    if (key == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

}  // namespace

ProcessNumbers ReadProcessNumbers() {
  ProcessNumbers numbers;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  numbers.cpu_seconds = SecondsOf(usage.ru_utime) + SecondsOf(usage.ru_stime);
  constexpr int kStarted = 22, kResidentPages = 24;
  // Neither changes.
  static const double started =
      static_cast<double>(BootTime()) +
      static_cast<double>(StatField(kStarted)) / static_cast<double>(sysconf(_SC_CLK_TCK));
  numbers.started = started;
  numbers.resident_bytes = StatField(kResidentPages) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::error_code error;
  for (auto fd = std::filesystem::directory_iterator("/proc/self/fd", error);
       !error && fd != std::filesystem::directory_iterator(); fd.increment(error)) {
    ++numbers.open_descriptors;
  }
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) numbers.most_descriptors = files.rlim_cur;
  return numbers;
}

}  // namespace kvstrata
