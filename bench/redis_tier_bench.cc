// SPDX-License-Identifier: Apache-2.0
// RedisValueTier beside bare sockets to the same servers: what checksums, names and deadlines cost.
//
//   redis_tier_bench HOST:PORT[,HOST:PORT...] [ROUNDS | probe]
// Puts and gets values of 64 KiB, 1 MiB and 4 MiB through the tier, and the same bytes with SET and
// GET by a blocking connection to each master, which writes (writev) all it has before it reads the
// answers; rounds of the two alternate. Prints a JSON object: medians of MB/s and of CPU seconds of
// this process per GB, ratios of speeds round by round and their medians, and milliseconds of
// probes of 512 and 65,536 keys, of which 4096 are there, beside those of bare EXISTS; and how many
// requests the large one makes. Between measurements it waits for replicas; what it put it takes
// away. With `probe` it does large probes alone: for each line that it reads some, whose
// milliseconds are a line that it writes. They go by connections that it has already, and are
// patient with servers that are far away; bench/remote_tier.py counts their round trips so.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
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
#include "server/tier/redis/client/redis_client.h"
#include "server/tier/redis/redis_value_tier.h"

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

// -- bare sockets

// What a client without checksums does: one blocking connection to a master.
class BareConnection {
 public:
  explicit BareConnection(const redis::RedisAddress& server)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), memory_(64 << 10) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server.port);
    KVS_CHECK(inet_pton(AF_INET, server.host.c_str(), &address.sin_addr) == 1);
    KVS_CHECK(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    const int on = 1;
    KVS_CHECK(setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
  }

  void Write(std::string_view command, std::span<std::byte> value = {}) {
    iovec parts[] = {{const_cast<char*>(command.data()), command.size()},
                     {value.data(), value.size()},
                     {const_cast<char*>("\r\n"), value.empty() ? 0U : 2U}};
    size_t first = 0;
    while (first < 3) {
      const ssize_t sent = writev(fd_.get(), parts + first, static_cast<int>(3 - first));
      KVS_CHECK(sent > 0);
      auto left = static_cast<size_t>(sent);
      for (; first < 3 && left >= parts[first].iov_len; ++first) left -= parts[first].iov_len;
      if (first == 3) break;
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + left;
      parts[first].iov_len -= left;
    }
  }
  std::string Line() {
    std::string line;
    while (!line.ends_with("\r\n")) {
      if (at_ == end_) Fill();
      line += static_cast<char>(memory_[at_++]);
    }
    line.resize(line.size() - 2);
    return line;
  }
  void Bulk(std::span<std::byte> into) {
    KVS_CHECK(Line() == "$" + std::to_string(into.size()));
    const size_t there = std::min(into.size(), end_ - at_);
    std::memcpy(into.data(), memory_.data() + at_, there);
    at_ += there;
    for (into = into.subspan(there); !into.empty();) {
      const ssize_t came = read(fd_.get(), into.data(), into.size());
      KVS_CHECK(came > 0);
      into = into.subspan(static_cast<size_t>(came));
    }
    KVS_CHECK(Line().empty());
  }

 private:
  void Fill() {
    const ssize_t came = read(fd_.get(), memory_.data(), memory_.size());
    KVS_CHECK(came > 0);
    at_ = 0;
    end_ = static_cast<size_t>(came);
  }

  const UniqueFd fd_;
  std::vector<std::byte> memory_;
  size_t at_ = 0, end_ = 0;
};

std::string Words(std::initializer_list<std::string_view> words) {
  std::string text = "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string_view word : words) {
    text += "$" + std::to_string(word.size()) + "\r\n" + std::string(word) + "\r\n";
  }
  return text;
}

class BareClient {
 public:
  explicit BareClient(const redis::SlotMap& map) : map_(map) {
    for (const redis::RedisShard& shard : map.shards) {
      masters_.push_back(std::make_unique<BareConnection>(shard.master));
      replicas_ += !shard.replicas.empty();
    }
  }

  void Put(const std::string& run, uint64_t bytes, uint64_t count, std::byte* memory) {
    const std::string length = std::to_string(bytes);
    OnEach(run, count, [&](BareConnection* server, const std::vector<uint64_t>& values) {
      for (const uint64_t i : values) {
        const std::string name = NameOf(run, i);
        server->Write("*3\r\n$3\r\nSET\r\n$" + std::to_string(name.size()) + "\r\n" + name +
                          "\r\n$" + length + "\r\n",
                      {memory + i * bytes, bytes});
      }
      for (size_t i = 0; i < values.size(); ++i) KVS_CHECK(server->Line() == "+OK");
    });
  }
  void Get(const std::string& run, uint64_t bytes, uint64_t count, std::byte* memory) {
    OnEach(run, count, [&](BareConnection* server, const std::vector<uint64_t>& values) {
      std::string commands;
      for (const uint64_t i : values) commands += Words({"GET", NameOf(run, i)});
      server->Write(commands);
      for (const uint64_t i : values) server->Bulk({memory + i * bytes, bytes});
    });
  }
  // EXISTS or UNLINK.
  void Each(const char* command, const std::string& run, uint64_t count) {
    OnEach(run, count, [&](BareConnection* server, const std::vector<uint64_t>& values) {
      std::string commands;
      for (const uint64_t i : values) commands += Words({command, NameOf(run, i)});
      server->Write(commands);
      for (size_t i = 0; i < values.size(); ++i) KVS_CHECK(server->Line().starts_with(":"));
    });
  }
  // Until replicas have what their masters have.
  void AwaitReplicas() {
    for (const auto& master : masters_) {
      master->Write(Words({"WAIT", replicas_ == 0 ? "0" : "1", "60000"}));
      KVS_CHECK(master->Line() >= (replicas_ == 0 ? ":0" : ":1"));
    }
  }

 private:
  static std::string NameOf(const std::string& run, uint64_t i) {
    return "bare:{" + run + "." + std::to_string(i) + "}";
  }
  template <typename F>
  void OnEach(const std::string& run, uint64_t count, const F& work) {
    std::vector<std::vector<uint64_t>> values(masters_.size());
    for (uint64_t i = 0; i < count; ++i) {
      values[map_.shard_of[redis::SlotOf(NameOf(run, i))]].push_back(i);
    }
    std::vector<std::thread> threads;
    for (size_t s = 0; s < masters_.size(); ++s) {
      threads.emplace_back([&, s] { work(masters_[s].get(), values[s]); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const redis::SlotMap map_;
  std::vector<std::unique_ptr<BareConnection>> masters_;
  size_t replicas_ = 0;
};

redis::SlotMap MapOf(const std::vector<std::string>& servers) {
  redis::RedisClientOptions options;
  for (const std::string& server : servers) {
    auto address = redis::ParseRedisAddress(server);
    KVS_CHECK(address.ok());
    options.servers.push_back(*address);
  }
  redis::RedisClient client(options);
  std::shared_ptr<const redis::SlotMap> map;
  while (client.Wait()) {
    client.Work();
    map = client.Topology();
    if (map != nullptr) client.Stop();
  }
  return *map;
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

constexpr int kProbeRounds = 5;
constexpr uint64_t kThere = 4096;  // how many of the keys are there
constexpr uint64_t kMany = 65536;

std::vector<double> ProbeMilliseconds(ValueTier* tier, const std::string& run, uint64_t keys) {
  std::vector<std::string> names;
  for (uint64_t i = 0; i < keys; ++i) names.push_back(KeyOf(run, i));
  std::vector<double> all;
  for (int round = 0; round < kProbeRounds; ++round) {
    std::vector<TierProbe> probes(names.begin(), names.end());
    const Cost cost = Measure([&] {
      std::promise<void> end;
      tier->Probe(probes, {Later(), {}, [&end] { end.set_value(); }});
      end.get_future().wait();
    });
    const auto found =
        std::ranges::count_if(probes, [](const TierProbe& p) { return !p.sizes.empty(); });
    KVS_CHECK(found == std::min<int64_t>(keys, kThere));
    all.push_back(cost.seconds * 1e3);
  }
  return all;
}

// What there is to run on.
struct Bench {
  ValueTier* tier;
  BareClient* bare;
  std::string run;
  std::shared_ptr<std::byte> memory;
};

void ForgetAll(const Bench& bench, const std::string& of, uint64_t count) {
  std::vector<std::string> keys;
  for (uint64_t i = 0; i < count; ++i) keys.push_back(KeyOf(of, i));
  (void)ForgetAndWait(bench.tier, keys, Later());
  bench.bare->Each("UNLINK", of, count);
}

// Since start, to all servers.
uint64_t RequestsOf(const RedisValueTier& tier) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // until it tells of now
  uint64_t requests = 0;
  for (const redis::RedisServerStats& server : tier.Servers()) requests += server.requests;
  return requests;
}

nlohmann::json Compare(const Bench& bench, uint64_t bytes, int rounds) {
  const uint64_t count = kRoundBytes / bytes;
  constexpr std::array kNames = {"put", "get", "bare_put", "bare_get"};
  std::array<std::vector<double>, 4> speeds, cpus;
  std::array<std::vector<double>, 2> ratios;
  for (int round = 0; round < rounds; ++round) {
    const std::string of = bench.run + std::to_string(bytes) + "." + std::to_string(round);
    const auto run = [&](size_t what) {
      std::byte* const memory = bench.memory.get();
      if (what == 0) Put(bench.tier, of, bytes, count, bench.memory);
      if (what == 1) Get(bench.tier, of, bytes, count, bench.memory);
      if (what == 2) bench.bare->Put(of, bytes, count, memory);
      if (what == 3) bench.bare->Get(of, bytes, count, memory);
    };
    std::array<Cost, 4> costs;
    for (const size_t i : {0, 1, 2, 3}) {
      const size_t what = round % 2 == 0 ? i : (i + 2) % 4;  // who is first takes turns
      costs[what] = Measure([&] { run(what); });
      bench.bare->AwaitReplicas();
    }
    ForgetAll(bench, of, count);
    for (size_t i = 0; i < 4; ++i) {
      speeds[i].push_back(static_cast<double>(kRoundBytes) / 1e6 / costs[i].seconds);
      cpus[i].push_back(costs[i].cpu / (static_cast<double>(kRoundBytes) / 1e9));
    }
    for (size_t i : {0, 1}) ratios[i].push_back(costs[i + 2].seconds / costs[i].seconds);
  }
  nlohmann::json row = {{"bytes", bytes}};
  for (size_t i = 0; i < 4; ++i) {
    row[std::string(kNames[i]) + "_mb_s"] = Median(speeds[i]);
    row[std::string(kNames[i]) + "_cpu_s_gb"] = Median(cpus[i]);
  }
  for (size_t i : {0, 1}) {
    row[std::string(kNames[i]) + "_ratio"] = Median(ratios[i]);
    row[std::string(kNames[i]) + "_ratios"] = ratios[i];
  }
  return row;
}

void CompareProbes(const Bench& bench, const RedisValueTier& tier, nlohmann::json* report) {
  for (const uint64_t keys : {uint64_t{512}, kMany}) {
    const std::string name = "probe_" + std::to_string(keys);
    (*report)[name + "_ms"] = Median(ProbeMilliseconds(bench.tier, bench.run, keys));
    std::vector<double> all;
    for (int round = 0; round < kProbeRounds; ++round) {
      all.push_back(Measure([&] { bench.bare->Each("EXISTS", bench.run, keys); }).seconds * 1e3);
    }
    (*report)["bare_" + name + "_ms"] = Median(all);
  }
  const uint64_t before = RequestsOf(tier);
  (void)ProbeMilliseconds(bench.tier, bench.run, kMany);
  (*report)["probe_65536_requests"] = static_cast<double>(RequestsOf(tier) - before) / kProbeRounds;
}

void ProbeWhenAsked(const Bench& bench) {
  (void)ProbeMilliseconds(bench.tier, bench.run, kMany);  // opens connections
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << nlohmann::json(ProbeMilliseconds(bench.tier, bench.run, kMany)).dump()
              << std::endl;
  }
}

RedisTierOptions OptionsOf(const std::string& servers) {
  RedisTierOptions options;
  for (size_t at = 0; at != std::string::npos;) {
    const size_t comma = servers.find(',', at);
    options.servers.push_back(servers.substr(at, comma - at));
    at = comma == std::string::npos ? comma : comma + 1;
  }
  return options;
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: redis_tier_bench HOST:PORT[,HOST:PORT...] [ROUNDS | probe]\n");
    return 2;
  }
  const bool probe_alone = argc > 2 && std::string_view(argv[2]) == "probe";
  RedisTierOptions options = OptionsOf(argv[1]);
  if (probe_alone) options.connect_timeout = options.stall_timeout = std::chrono::seconds(20);
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
  BareClient bare(MapOf(options.servers));
  const Bench bench = {tier, &bare, run, memory};
  nlohmann::json report;
  if (!probe_alone) {
    const int rounds = argc > 2 ? std::max(std::atoi(argv[2]), 1) : 9;
    for (const uint64_t bytes : {uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{4} << 20}) {
      report["values"].push_back(Compare(bench, bytes, rounds));
    }
  }
  Put(tier, run, 1024, kThere, memory);  // most of the keys are not there
  if (probe_alone) {
    ProbeWhenAsked(bench);
  } else {
    CompareProbes(bench, **opened, &report);
    std::cout << report.dump(2) << std::endl;
  }
  ForgetAll(bench, run, kThere);
  return 0;
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) { return kvstrata::Main(argc, argv); }
