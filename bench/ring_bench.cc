// SPDX-License-Identifier: Apache-2.0
// The ring, attaching and opening, through kvs_* on a running daemon with default pools (4 GiB
// each):
//   ring/ping         request and reply (kvs_ping), nobody sleeping
//   ring/ping/idle    the same after 1 ms of silence: the daemon sleeps and has to be woken
//   attach/4GiB       kvs_attach
//   open/8K/...       kvs_sequence_open of 8192 tokens, found nowhere or held; less the hashing of
//                     the same token ids, measured right after on the same core (open/8K/hashing)
//   step/begin, step/end   at 8K tokens, without the layers' ops
// Usage: ring_bench [--json-out FILE] [--commit HASH] [--date DATE]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bench/abi_calls.h"
#include "bench/results.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/store.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/model_desc.h"

namespace {

using kvstrata::bench::Must;
using kvstrata::bench::RunOn;
using kvstrata::bench::Timing;

constexpr unsigned kDaemonCore = 0, kOwnCore = 1;
constexpr int kPrompt = 8192, kKvHeads = 2, kQueryHeads = 4, kDim = 64;

// `body` returns the microseconds that count.
Timing Measure(int warm_up, int n, const std::function<double()>& body) {
  for (int i = 0; i < warm_up; ++i) body();
  std::vector<double> us;
  for (int i = 0; i < n; ++i) us.push_back(body());
  return kvstrata::bench::TimingOf(std::move(us));
}

double Timed(const std::function<void()>& body) {
  const double begin = kvstrata::bench::NowUs();
  body();
  return kvstrata::bench::NowUs() - begin;
}

class RingBench {
 public:
  explicit RingBench(std::string socket) : socket_(std::move(socket)) {
    Must(kvs_attach(socket_.c_str(), nullptr, &session_), "attach");
    const kvs_model_desc desc =
        kvstrata::testing::DescOf({1, kQueryHeads, kKvHeads, kDim, 16}, "ring-bench", "ring-bench");
    Must(kvs_model_register(session_, &desc, &model_), "register");
  }
  RingBench(const RingBench&) = delete;
  RingBench& operator=(const RingBench&) = delete;
  ~RingBench() { kvs_detach(session_); }

  Timing Ping() {
    return Measure(1000, 20000, [&] { return Timed([&] { Must(kvs_ping(session_), "ping"); }); });
  }
  Timing IdlePing() {
    return Measure(10, 300, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the silence that is measured
      return Timed([&] { Must(kvs_ping(session_), "ping"); });
    });
  }
  Timing Attach() {
    return Measure(2, 50, [&] {
      kvs_session* other = nullptr;
      const double us =
          Timed([&] { Must(kvs_attach(socket_.c_str(), nullptr, &other), "attach"); });
      kvs_detach(other);
      return us;
    });
  }
  // Opening what no other sequence has.
  Timing OpenNew() {
    return Measure(20, 300, [&] { return Open(NewPrompt(), 0); });
  }
  // Opening what is held but for its last page.
  Timing OpenHeld() {
    const std::vector<int32_t> prompt = NewPrompt();
    const kvs_sequence s = Prefill(prompt);
    const Timing t = Measure(20, 300, [&] { return Open(prompt, kPrompt - 16); });
    Must(kvs_sequence_close(session_, s), "close");
    return t;
  }
  Timing Hashing() {
    return Measure(20, 300, [&] { return Hash(NewPrompt()); });
  }
  void Steps(Timing* begin_us, Timing* end_us) {
    const kvs_sequence s = Prefill(NewPrompt());
    std::vector<double> begins, ends;
    for (int i = 0; i < 2000; ++i) {
      const int32_t token = i;
      kvs_step* step = nullptr;
      begins.push_back(Timed([&] { step = Begin(s, &token, 1); }));
      Append(step, 1);
      ends.push_back(Timed([&] { Must(kvs_step_end(step, nullptr), "end"); }));
    }
    Must(kvs_sequence_close(session_, s), "close");
    *begin_us = kvstrata::bench::TimingOf(std::move(begins));
    *end_us = kvstrata::bench::TimingOf(std::move(ends));
  }

 private:
  std::vector<int32_t> NewPrompt() {
    std::vector<int32_t> prompt(kPrompt);
    for (int32_t& t : prompt) t = static_cast<int32_t>(rng_() % 50000);
    return prompt;
  }
  // Microseconds for the keys of a prompt's pages, on the daemon's core: cores differ by a factor
  // of two from moment to moment on a shared host.
  double Hash(const std::vector<int32_t>& prompt) {
    size_t keys = 0;
    const std::span<const int32_t> whole(prompt.data(), kPrompt - 16);
    RunOn(kDaemonCore);
    const double us = Timed([&] { keys = chain_.Pages({}, whole).size(); });
    RunOn(kOwnCore);
    if (keys != whole.size() / 16) std::abort();
    return us;
  }
  // Time of one opening, less what hashing the same prompt takes at the same moment.
  double Open(const std::vector<int32_t>& prompt, uint32_t want_held) {
    kvs_sequence s = 0;
    uint32_t held = 0;
    const double us = Timed([&] {
      Must(kvs_sequence_open(session_, model_, "full", prompt.data(), prompt.size(), &s, &held),
           "open");
    });
    if (held != want_held) {
      std::fprintf(stderr, "open: %u tokens are held, not %u\n", held, want_held);
      std::exit(1);
    }
    Must(kvs_sequence_close(session_, s), "close");
    return us - Hash(prompt);
  }
  static kvstrata::KeyChain Chain() {
    kvstrata::ModelDesc desc;
    desc.name = desc.digest = "ring-bench";
    desc.geometry = {1, kQueryHeads, kKvHeads, kDim, 16, kvstrata::DType::kBF16};
    return {"uid:0", desc};
  }
  kvs_step* Begin(kvs_sequence s, const int32_t* ids, uint32_t n) {
    const kvs_step_member member{s, ids, n};
    kvs_step* step = nullptr;
    Must(kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr), "begin");
    return step;
  }
  void Append(kvs_step* step, int n) {
    rows_.resize(static_cast<size_t>(n) * kKvHeads * kDim, 0x3F80);
    const kvs_tensor t{rows_.data(), KVS_BF16, kKvHeads, kDim, n, 0, 0};
    Must(kvs_append(step, 0, &t, &t), "append");
  }
  kvs_sequence Prefill(const std::vector<int32_t>& prompt) {
    kvs_sequence s = 0;
    Must(kvs_sequence_open(session_, model_, "full", prompt.data(), prompt.size(), &s, nullptr),
         "open");
    kvs_step* step = Begin(s, prompt.data(), kPrompt);
    Append(step, kPrompt);
    Must(kvs_step_end(step, nullptr), "end");
    Must(kvs_settle(session_, s), "settle");
    return s;
  }

  const std::string socket_;
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
  const kvstrata::KeyChain chain_ = Chain();
  std::mt19937 rng_{20261121};
  std::vector<uint16_t> rows_;
};

kvstrata::bench::Json Row(const char* id, const char* unit, double scale, const Timing& t,
                          double must) {
  std::printf("%-24s %10.3f %s  (p10 %.3f, p90 %.3f, n %zu)%s\n", id, t.median * scale, unit,
              t.p10 * scale, t.p90 * scale, t.n,
              must == 0                  ? ""
              : t.median * scale <= must ? "  met"
                                         : "  MISSED");
  kvstrata::bench::Json row = kvstrata::bench::RowOf(id, t, unit, scale);
  if (must != 0) {
    row["must"] = must;
    row["better"] = "smaller";
  }
  return row;
}

}  // namespace

int main(int argc, char** argv) {
  RunOn(kDaemonCore);
  kvstrata::testing::DaemonProcess daemon;
  RunOn(kOwnCore);
  kvstrata::bench::Json rows = kvstrata::bench::Json::array();
  {
    RingBench bench(daemon.socket());
    rows.push_back(Row("ring/ping", "us", 1, bench.Ping(), 2));
    rows.push_back(Row("ring/ping/idle", "us", 1, bench.IdlePing(), 0));
    rows.push_back(Row("attach/4GiB", "ms", 1e-3, bench.Attach(), 50));
    rows.push_back(Row("open/8K/hashing", "us", 1, bench.Hashing(), 0));
    rows.push_back(Row("open/8K/new", "us", 1, bench.OpenNew(), 100));
    rows.push_back(Row("open/8K/held", "us", 1, bench.OpenHeld(), 100));
    Timing begin{}, end{};
    bench.Steps(&begin, &end);
    rows.push_back(Row("step/begin", "us", 1, begin, 0));
    rows.push_back(Row("step/end", "us", 1, end, 0));
  }
  namespace bench = kvstrata::bench;
  bench::WriteResults(argc, argv, "ring", bench::DeviceName(), "make bench",
                      {{"cpu", bench::CpuName()}, {"notes", "daemon and client on a core each"}},
                      rows);
  return 0;
}
