// SPDX-License-Identifier: Apache-2.0
// What busy workers cost a decode: step latency of one client on core 1 while the daemon's workers,
// on core 0, recompress other sequences without a pause, against the same steps with idle workers.
//
// A second client, on core 0 as well, opens packed sequences of 8K tokens one after the other; the
// measured client decodes `quest` over 8K tokens with one thread. Both phases alternate in rounds,
// so that a drift of the machine hits both. Every sample is one step (begin, append, attend, end).
// Usage: work_bench [--json-out FILE] [--commit HASH] [--date DATE]
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench/abi_calls.h"
#include "bench/results.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/model_desc.h"

namespace {

using kvstrata::bench::Must;
using kvstrata::bench::NowUs;
using kvstrata::bench::RunOn;
using kvstrata::bench::Timing;

constexpr int kQueryHeads = 32, kKvHeads = 8, kDim = 128, kPrompt = 8192, kChunk = 512;
constexpr int kRounds = 6, kStepsARound = 1000;

class Client {
 public:
  Client(const std::string& socket, const char* name, uint32_t seed) : rng_(seed) {
    kvs_attach_options options{};
    options.size = sizeof(options);
    options.client_name = name;
    options.threads = 1;
    options.timeout_ms = 60000;
    Must(kvs_attach(socket.c_str(), &options, &session_), "attach");
    const kvs_model_desc desc =
        kvstrata::testing::DescOf({1, kQueryHeads, kKvHeads, kDim, 16}, name, name);
    Must(kvs_model_register(session_, &desc, &model_), "register");
    for (uint16_t& x : noise_) x = static_cast<uint16_t>(0x3C00 + (rng_() & 0x83FF));
  }
  ~Client() { kvs_detach(session_); }

  kvs_sequence Prefill(const char* plan) {
    std::vector<int32_t> ids(kPrompt);
    for (int32_t& t : ids) t = static_cast<int32_t>(rng_() % 50000);
    kvs_sequence s = 0;
    Must(kvs_sequence_open(session_, model_, plan, ids.data(), ids.size(), &s, nullptr), "open");
    for (int at = 0; at < kPrompt; at += kChunk) {
      const kvs_step_member member{s, ids.data() + at, kChunk};
      kvs_step* step = nullptr;
      Must(kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr), "begin");
      const kvs_tensor rows = Tensor(kKvHeads, kChunk, static_cast<size_t>(rng_() % 4096));
      Must(kvs_append(step, 0, &rows, &rows), "append");
      Must(kvs_step_end(step, nullptr), "end");
    }
    Must(kvs_prefill_done(session_, s), "prefill_done");
    return s;
  }

  double Step(kvs_sequence s) {
    const int32_t token = 7;
    const kvs_step_member member{s, &token, 1};
    const kvs_tensor rows = Tensor(kKvHeads, 1, static_cast<size_t>(rng_() % 4096));
    const kvs_tensor q = Tensor(kQueryHeads, 1, static_cast<size_t>(rng_() % 4096));
    const kvs_tensor out{out_, KVS_F32, kQueryHeads, kDim, 1, 0, 0};
    kvs_step* step = nullptr;
    const double begin = NowUs();
    Must(kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr), "begin");
    Must(kvs_append(step, 0, &rows, &rows), "append");
    Must(kvs_attend(step, 0, &q, &out, nullptr), "attend");
    Must(kvs_step_end(step, nullptr), "end");
    return NowUs() - begin;
  }

  void Settle(kvs_sequence s) { Must(kvs_settle(session_, s), "settle"); }
  void Close(kvs_sequence s) { Must(kvs_sequence_close(session_, s), "close"); }

 private:
  kvs_tensor Tensor(int heads, int tokens, size_t from) const {
    return {noise_.data() + from, KVS_BF16, heads, kDim, tokens, 0, 0};
  }

  std::mt19937 rng_;
  std::vector<uint16_t> noise_ = std::vector<uint16_t>(size_t{kChunk} * kKvHeads * kDim + 8192);
  float out_[kQueryHeads * kDim] = {};
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
};

// Keeps the workers busy until it is killed.
[[noreturn]] void Load(const std::string& socket) {
  RunOn(0);
  Client client(socket, "load", 2);
  for (;;) {
    const kvs_sequence s =
        client.Prefill("mosaickv{max_loss = 1, strategy = \"search\", keep_raw = \"no\"}");
    client.Settle(s);
    client.Close(s);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && !std::strcmp(argv[1], "--load")) Load(argv[2]);
  kvstrata::testing::DaemonProcess daemon({"--set", "work.cpus=0"});
  RunOn(1);
  std::vector<double> idle, busy;
  pid_t load = -1;
  Client client(daemon.socket(), "decode", 1);
  const kvs_sequence s = client.Prefill("quest{budget = 2048}");
  for (int i = 0; i < kStepsARound; ++i) client.Step(s);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kStepsARound; ++i) idle.push_back(client.Step(s));
    load = fork();
    if (load == 0) {
      // A process of its own: the parent's session is refused here and never used.
      execl("/proc/self/exe", argv[0], "--load", daemon.socket().c_str(), nullptr);
      _exit(127);
    }
    usleep(300000);  // until the first sequence is with the workers
    for (int i = 0; i < kStepsARound; ++i) busy.push_back(client.Step(s));
    kill(load, SIGKILL);
    waitpid(load, nullptr, 0);
  }
  const Timing a = kvstrata::bench::TimingOf(idle), b = kvstrata::bench::TimingOf(busy);
  std::printf("decode step, workers idle: median %.0f us, p99 %.0f us\n", a.median, a.p99);
  std::printf("decode step, workers busy: median %.0f us, p99 %.0f us: %.2fx the idle p99\n",
              b.median, b.p99, b.p99 / a.p99);
  namespace bench = kvstrata::bench;
  const auto row = [](const char* id, const Timing& t) {
    bench::Json made = bench::RowOf(id, t, "us, p99");
    made["value"] = t.p99, made["p50"] = t.median;
    return made;
  };
  bench::Json rows = {row("decode/8K/quest/workers idle", a),
                      row("decode/8K/quest/workers busy", b)};
  rows[1]["baseline"] = {{"name", "workers idle"}, {"value", a.p99}};
  rows[1]["ratio"] = a.p99 / b.p99;
  rows[1]["must"] = 0.8;  // at most 1.25 times the idle p99
  bench::WriteResults(argc, argv, "work", bench::DeviceName(), "make bench", bench::Json::object(),
                      rows);
  return 0;
}
