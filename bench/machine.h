// SPDX-License-Identifier: Apache-2.0
// What a result file says of the machine, and the timing that benchmarks of calls share.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace kvstrata::bench {

inline std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// "2-core CPU (Intel(R) Xeon(R) Processor @ 2.50GHz, AVX-512)": the `device` of a result file.
inline std::string DeviceName() {
#if defined(__x86_64__)
  const char* isa = __builtin_cpu_supports("avx512f") ? ", AVX-512"
                    : __builtin_cpu_supports("avx2")  ? ", AVX2"
                                                      : "";
#else
  const char* isa = "";
#endif
  return std::to_string(std::thread::hardware_concurrency()) + "-core CPU (" + CpuName() + isa +
         ")";
}

// CPU time of the calling thread, without what it waits for. A call takes some 0.2 us.
inline double ThreadUs() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

inline double NowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Timing {
  double median = 0, mean = 0, p10 = 0, p90 = 0, p99 = 0;
  size_t n = 0;
};

// REQUIRES: samples is not empty.
inline Timing TimingOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  double sum = 0;
  for (double x : samples) sum += x;
  const auto at = [&](double q) {
    return samples[static_cast<size_t>(q * static_cast<double>(samples.size() - 1))];
  };
  return {at(0.5),       sum / static_cast<double>(samples.size()), at(0.1), at(0.9), at(0.99),
          samples.size()};
}

}  // namespace kvstrata::bench
