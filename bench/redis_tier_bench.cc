// SPDX-License-Identifier: Apache-2.0
// RedisValueTier beside a bare socket: what checksums, names, RESP and the server cost.
//
//   redis_tier_bench HOST:PORT[,HOST:PORT...] [ROUNDS]
// Puts and gets values of 64 KiB, 1 MiB and 4 MiB through the tier, and the same bytes through
// plain connections to a server of this process that reads and answers, as many as the tier has;
// rounds of the two alternate. Prints a JSON object: medians of MB/s, their ratios, CPU seconds of
// this process per GB (of the bare one: client and server), and milliseconds of probes of 512 and
// 65,536 keys, of which 4096 are there. The servers' contents of earlier runs are not used again.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/unique_fd.h"
#include "server/tier/blocking_calls.h"
#include "server/work/redis_value_tier.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kRoundBytes = uint64_t{64} << 20;

Deadline Later() { return Clock::now() + std::chrono::minutes(1); }

double CpuSeconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

// What a round took, a byte.
struct Cost {
  double seconds = 0, cpu = 0;
};
template <typename F>
Cost Measure(const F& run) {
  const double cpu = CpuSeconds();
  const auto begin = Clock::now();
  run();
  return {std::chrono::duration<double>(Clock::now() - begin).count(), CpuSeconds() - cpu};
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// -- a bare socket

void Exactly(int fd, std::byte* bytes, uint64_t n, bool write) {
  while (n != 0) {
    const ssize_t moved = write ? send(fd, bytes, n, MSG_NOSIGNAL) : recv(fd, bytes, n, 0);
    KVS_CHECK(moved > 0);
    bytes += moved;
    n -= static_cast<uint64_t>(moved);
  }
}

// `count` values one after the other over a connection: sent and acknowledged with a byte, or asked
// for with a byte.
void Bare(uint64_t value_bytes, uint64_t count, bool put, std::byte* memory) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  KVS_CHECK(bind(listener.get(), any, size) == 0 && listen(listener.get(), 1) == 0);
  KVS_CHECK(getsockname(listener.get(), any, &size) == 0);
  std::thread server([&] {
    const UniqueFd client(accept(listener.get(), nullptr, nullptr));
    std::vector<std::byte> bytes(value_bytes);
    std::byte ack{};
    for (uint64_t i = 0; i < count; ++i) {
      Exactly(client.get(), put ? bytes.data() : &ack, put ? value_bytes : 1, false);
      Exactly(client.get(), put ? &ack : bytes.data(), put ? 1 : value_bytes, true);
    }
  });
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  KVS_CHECK(connect(fd.get(), any, size) == 0);
  std::byte ack{};
  for (uint64_t i = 0; i < count; ++i) {
    std::byte* const value = memory + i * value_bytes;
    Exactly(fd.get(), put ? value : &ack, put ? value_bytes : 1, true);
    Exactly(fd.get(), put ? &ack : value, put ? 1 : value_bytes, false);
  }
  server.join();
}

// -- the tier

std::string KeyOf(const std::string& run, uint64_t i) { return run + " " + std::to_string(i); }

template <typename Requests>
void CheckAll(const Requests& requests) {
  for (const auto& request : requests) {
    if (request.status.ok()) continue;
    std::fprintf(stderr, "redis_tier_bench: %s\n", request.status.ToString().c_str());
    std::exit(1);
  }
}

void Put(ValueTier* tier, const std::string& run, uint64_t bytes, uint64_t count,
         const std::shared_ptr<std::byte>& memory) {
  std::vector<TierPut> puts;
  for (uint64_t i = 0; i < count; ++i) {
    puts.push_back({KeyOf(run, i), {{memory.get() + i * bytes, bytes}}, memory, {}});
  }
  PutAndWait(tier, puts, Later());
  CheckAll(puts);
}

void Get(ValueTier* tier, const std::string& run, uint64_t bytes, uint64_t count,
         const std::shared_ptr<std::byte>& memory) {
  std::vector<TierGet> gets;
  for (uint64_t i = 0; i < count; ++i) {
    gets.push_back({KeyOf(run, i), {{memory.get() + i * bytes, bytes}}, memory, {}});
  }
  GetAndWait(tier, gets, Later());
  CheckAll(gets);
}

double ProbeMilliseconds(ValueTier* tier, const std::string& run, uint64_t keys) {
  std::vector<std::string> names;
  for (uint64_t i = 0; i < keys; ++i) names.push_back(KeyOf(run, i));
  std::vector<double> all;
  for (int round = 0; round < 5; ++round) {
    std::vector<TierProbe> probes(names.begin(), names.end());
    const Cost cost = Measure([&] {
      std::promise<void> end;
      tier->Probe(probes, {Later(), {}, [&end] { end.set_value(); }});
      end.get_future().wait();
    });
    all.push_back(cost.seconds * 1e3);
  }
  return Median(all);
}

nlohmann::json Compare(ValueTier* tier, const std::string& run, uint64_t bytes, int rounds,
                       const std::shared_ptr<std::byte>& memory) {
  const uint64_t count = kRoundBytes / bytes;
  std::vector<double> speeds[4], cpus[4];  // tier put, get; bare put, get
  for (int round = 0; round < rounds; ++round) {
    const std::string of = run + std::to_string(bytes) + "." + std::to_string(round);
    const Cost costs[] = {Measure([&] { Put(tier, of, bytes, count, memory); }),
                          Measure([&] { Get(tier, of, bytes, count, memory); }),
                          Measure([&] { Bare(bytes, count, true, memory.get()); }),
                          Measure([&] { Bare(bytes, count, false, memory.get()); })};
    std::vector<std::string> keys;
    for (uint64_t i = 0; i < count; ++i) keys.push_back(KeyOf(of, i));
    (void)ForgetAndWait(tier, keys, Later());
    for (size_t i = 0; i < 4; ++i) {
      speeds[i].push_back(static_cast<double>(kRoundBytes) / 1e6 / costs[i].seconds);
      cpus[i].push_back(costs[i].cpu / (static_cast<double>(kRoundBytes) / 1e9));
    }
  }
  nlohmann::json row = {{"bytes", bytes}};
  const char* const names[] = {"put", "get", "bare_put", "bare_get"};
  for (size_t i = 0; i < 4; ++i) {
    row[std::string(names[i]) + "_mb_s"] = Median(speeds[i]);
    row[std::string(names[i]) + "_cpu_s_gb"] = Median(cpus[i]);
  }
  row["put_ratio"] = Median(speeds[0]) / Median(speeds[2]);
  row["get_ratio"] = Median(speeds[1]) / Median(speeds[3]);
  return row;
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: redis_tier_bench HOST:PORT[,HOST:PORT...] [ROUNDS]\n");
    return 2;
  }
  RedisTierOptions options;
  std::string servers = argv[1];
  for (size_t at = 0; at != std::string::npos;) {
    const size_t comma = servers.find(',', at);
    options.servers.push_back(servers.substr(at, comma - at));
    at = comma == std::string::npos ? comma : comma + 1;
  }
  const int rounds = argc > 2 ? std::max(std::atoi(argv[2]), 1) : 9;
  const auto secret = remote::RemoteSecret::Of("a-secret-for-benchmarks-of-more-than-32-bytes");
  KVS_CHECK(secret.ok());
  auto opened = RedisValueTier::Open(options, remote::RemoteFormat(*secret, "bench"));
  KVS_CHECK(opened.ok());
  ValueTier* const tier = opened->get();
  std::mt19937_64 random(std::random_device{}());
  const std::string run = std::to_string(random());
  const std::shared_ptr<std::byte> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, kRoundBytes)), std::free);
  for (uint64_t at = 0; at < kRoundBytes; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(memory.get() + at, &word, sizeof(word));
  }
  nlohmann::json report;
  for (const uint64_t bytes : {uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{4} << 20}) {
    report["values"].push_back(Compare(tier, run, bytes, rounds, memory));
  }
  Put(tier, run, 1024, 4096, memory);  // most of the 65,536 keys are not there
  report["probe_512_ms"] = ProbeMilliseconds(tier, run, 512);
  report["probe_65536_ms"] = ProbeMilliseconds(tier, run, 65536);
  std::cout << report.dump(2) << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) { return kvstrata::Main(argc, argv); }
