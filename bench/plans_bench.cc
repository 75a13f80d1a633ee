// SPDX-License-Identifier: Apache-2.0
// Whole decode steps (begin, append, attend, end) through kvs_* on a running daemon, plan by plan:
// one layer of Llama-3.1-8B's shape (32 query heads, 8 KV heads x 128, bf16), 32K tokens.
//
// Inputs rotate over kPrompts prompts of 134 MB each, more than any last-level cache; every plan
// runs over the same shared pages. CHESS re-selects every 320 tokens and is measured over 320
// steps, so its share of selections is in the figure. TokenSelect misses its cache when each step's
// query is another one, and hits when it is the same. Plans are measured in rotation, kRounds
// times: a ratio is the median of the rounds', each against plan `full` of that round, because a
// shared machine changes its speed from minute to minute. Usage: plans_bench [--json-out FILE]
// [--commit HASH] [--date DATE] [--tokens N] [--only LABEL,LABEL] [--suite NAME]
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/abi_calls.h"
#include "bench/results.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/model_desc.h"

namespace {

constexpr int kQueryHeads = 32, kKvHeads = 8, kDim = 128, kPrompts = 4, kChunk = 512;
constexpr int kRounds = 5;
constexpr uint32_t kWatched = 64;  // last tokens of a prompt whose queries are attended

using kvstrata::bench::Must;
using kvstrata::bench::NowUs;
using kvstrata::bench::Timing;

// bf16 bits of normal deviates: a pool of random values read at random places, because drawing
// gigabytes of them would take longer than the benchmark.
class Noise {
 public:
  explicit Noise(uint32_t seed) : rng_(seed), pool_(size_t{1} << 20) {
    std::normal_distribution<float> normal;
    for (uint16_t& x : pool_) x = Bits(normal(rng_));
  }
  void Fill(std::vector<uint16_t>& out) {
    for (size_t done = 0; done < out.size();) {
      const size_t from = rng_() % (pool_.size() - 4096);
      const size_t n = std::min<size_t>(4096, out.size() - done);
      std::memcpy(out.data() + done, pool_.data() + from, n * 2);
      done += n;
    }
  }
  // A decode step's queries [kQueryHeads][kDim]: those of a KV head are alike, and logits deviate
  // by 6. Then `strata` reads 4 % of the tokens finely and 62 % of the strips, 13.7 % of the bytes:
  // about what it reads of a trained model's.
  void FillQueries(std::vector<uint16_t>& out) {
    std::vector<uint16_t> shared(kKvHeads * kDim);
    Fill(shared);
    Fill(out);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t kv_head = i / kDim * kKvHeads / kQueryHeads;
      out[i] = Bits(5.7f * Float(shared[kv_head * kDim + i % kDim]) + 1.9f * Float(out[i]));
    }
  }

 private:
  static uint16_t Bits(float f) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16); }
  static float Float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

  std::mt19937 rng_;
  std::vector<uint16_t> pool_;
};

kvs_tensor Tensor(const void* data, int heads, int tokens, int dtype = KVS_BF16) {
  return {data, dtype, heads, kDim, tokens, 0, 0};
}

struct Run {
  kvs_session* session;
  kvs_model model;
  Noise noise{1};
  std::vector<std::vector<int32_t>> prompts;

  // A sequence of `plan` over prompt p, its tokens filled in as far as no prefix is held.
  kvs_sequence Open(const char* plan, int p) {
    kvs_sequence s = 0;
    uint32_t held = 0;
    Must(kvs_sequence_open(session, model, plan, prompts[p].data(), prompts[p].size(), &s, &held),
         "open");
    std::vector<uint16_t> k(size_t{kChunk} * kKvHeads * kDim), v(k.size());
    const auto tokens = static_cast<uint32_t>(prompts[p].size());
    while (held < tokens) {
      // The last tokens apart: plans with an observation window watch their queries.
      const uint32_t end = held < tokens - kWatched ? tokens - kWatched : tokens;
      const uint32_t n = std::min<uint32_t>(kChunk, end - held);
      noise.Fill(k);
      noise.Fill(v);
      kvs_step_member member{s, prompts[p].data() + held, n};
      kvs_step* step = nullptr;
      Must(kvs_step_begin(session, &member, 1, nullptr, &step, nullptr), "begin");
      const kvs_tensor tk = Tensor(k.data(), kKvHeads, n), tv = Tensor(v.data(), kKvHeads, n);
      Must(kvs_append(step, 0, &tk, &tv), "append");
      if (end == tokens) Watch(step, n);
      Must(kvs_step_end(step, nullptr), "end");
      held += n;
    }
    std::vector<float> surprisal(tokens);
    std::vector<uint8_t> boundary(tokens);
    for (uint32_t t = 0; t < tokens; ++t) {
      surprisal[t] = -1.2f * std::log((prompts[p][t] + 1) / 50001.0f);
      boundary[t] = prompts[p][t] % 18 == 0;
    }
    Must(kvs_report(session, s, 0, tokens, surprisal.data(), nullptr, boundary.data()), "report");
    Must(kvs_prefill_done(session, s), "prefill_done");
    Must(kvs_settle(session, s), "settle");
    return s;
  }

  // Attends the queries of the prompt's last tokens.
  void Watch(kvs_step* step, uint32_t n) {
    std::vector<uint16_t> q(size_t{n} * kQueryHeads * kDim);
    std::vector<float> out(q.size());
    noise.Fill(q);
    const kvs_tensor tq = Tensor(q.data(), kQueryHeads, static_cast<int>(n));
    const kvs_tensor to = Tensor(out.data(), kQueryHeads, static_cast<int>(n), KVS_F32);
    Must(kvs_attend(step, 0, &tq, &to, nullptr), "attend");
  }

  // Microseconds of one decode step that asks `q` [kQueryHeads][kDim].
  double Step(kvs_sequence s, const std::vector<uint16_t>& q) {
    static std::vector<uint16_t> k(kKvHeads * kDim), v(k.size());
    static std::vector<float> out(kQueryHeads * kDim);
    noise.Fill(k);
    noise.Fill(v);
    const int32_t token = 7;
    const kvs_step_member member{s, &token, 1};
    const kvs_tensor tk = Tensor(k.data(), kKvHeads, 1), tv = Tensor(v.data(), kKvHeads, 1);
    const kvs_tensor tq = Tensor(q.data(), kQueryHeads, 1);
    const kvs_tensor to = Tensor(out.data(), kQueryHeads, 1, KVS_F32);
    kvs_step* step = nullptr;
    const double begin = NowUs();
    Must(kvs_step_begin(session, &member, 1, nullptr, &step, nullptr), "begin");
    Must(kvs_append(step, 0, &tk, &tv), "append");
    Must(kvs_attend(step, 0, &tq, &to, nullptr), "attend");
    Must(kvs_step_end(step, nullptr), "end");
    return NowUs() - begin;
  }
};

struct Row {
  const char *id, *plan, *label;
  int steps;
  double must;
  bool same_query = false;
  bool amortised = false;  // a mean: a median would leave the re-selections out
};
const Row kRows[] = {
    {"full/32K/b1", "full", "full", 60, 0},
    {"quest/2048/32K/b1", "quest{budget = 2048}", "quest", 400, 6},
    {"bits/2048/32K/b1", "bits{budget = 2048}", "bits", 200, 0},
    // Budgets at which answers lose about as little (docs/accuracy.md): 29 and 5 % of the tokens.
    {"quest/29pct/32K/b1", "quest{budget = 9504}", "quest_29pct", 200, 0},
    {"bits/5pct/32K/b1", "bits{budget = 1570}", "bits_5pct", 200, 0},
    {"bits/10pct/32K/b1", "bits{budget = 3276}", "bits_10pct", 200, 0},
    {"strata/32K/b1", "strata", "strata", 200, 2.5},
    {"chess/1pct/32K/b1/amortised", "chess{trigger = \"every\", every = 10}", "chess",
     320 * kPrompts, 20, false, true},
    {"tokenselect/miss/32K/b1", "tokenselect", "tokenselect", 100, 1.25},
    {"tokenselect/hit/32K/b1", "tokenselect", "tokenselect", 400, 8, true},
    {"sentencekv/1024/32K/b1", "sentencekv{tau = 1024}", "sentencekv", 400, 12},
    {"mosaickv/10pct/32K/b1", "mosaickv{max_loss = 1}", "mosaickv", 200, 8},
};

// A row's sequences, one a prompt, and what its steps took.
class PlanRounds {
 public:
  PlanRounds(Run& run, const Row& row) : run_(run), row_(row), q_(kQueryHeads * kDim) {
    for (int p = 0; p < kPrompts; ++p) sequences_.push_back(run_.Open(row.plan, p));
    run_.noise.FillQueries(q_);
    for (const kvs_sequence s : sequences_) run_.Step(s, q_);
  }
  ~PlanRounds() {
    for (const kvs_sequence s : sequences_) Must(kvs_sequence_close(run_.session, s), "close");
  }
  void Take() {
    std::vector<double> us;
    for (int i = 0; i < row_.steps / kRounds; ++i) {
      if (!row_.same_query) run_.noise.FillQueries(q_);
      us.push_back(run_.Step(sequences_[i % kPrompts], q_));
    }
    rounds_.push_back(ValueOf(kvstrata::bench::TimingOf(us)));
    all_.insert(all_.end(), us.begin(), us.end());
  }

  const Row& row() const { return row_; }
  double ValueOf(const Timing& t) const { return row_.amortised ? t.mean : t.median; }
  Timing timing() const { return kvstrata::bench::TimingOf(all_); }
  // Against `full`, by rounds; an amortised row's rounds are not alike.
  double RatioOf(const PlanRounds& full) const {
    std::vector<double> ratios;
    const double mean = timing().mean;
    for (int i = 0; i < kRounds; ++i) {
      ratios.push_back(full.rounds_[i] / (row_.amortised ? mean : rounds_[i]));
    }
    return kvstrata::bench::TimingOf(ratios).median;
  }

 private:
  Run& run_;
  const Row& row_;
  std::vector<uint16_t> q_;
  std::vector<kvs_sequence> sequences_;
  std::vector<double> rounds_, all_;
};

kvstrata::bench::Json JsonOf(const PlanRounds& rounds, const PlanRounds& full, int tokens) {
  const Timing t = rounds.timing();
  const Row& row = rounds.row();
  const double value = rounds.ValueOf(t), ratio = rounds.RatioOf(full);
  std::printf("%-30s %9.1f us   %6.2fx full\n", row.id, value, ratio);
  kvstrata::bench::Json r = kvstrata::bench::RowOf(row.id, t);
  r["value"] = value, r["plan"] = row.label, r["tokens"] = tokens, r["batch"] = 1;
  if (row.must > 0) {
    r["baseline"] = {{"name", "plan full"}, {"value", full.timing().median}};
    r["ratio"] = ratio;
    r["must"] = row.must;
  }
  return r;
}

}  // namespace

int main(int argc, char** argv) {
  namespace bench = kvstrata::bench;
  const std::string only = bench::Option(argc, argv, "--only"),
                    length = bench::Option(argc, argv, "--tokens"),
                    suite = bench::Option(argc, argv, "--suite");
  const int tokens = length.empty() ? 32768 : std::stoi(length);
  kvstrata::testing::DaemonProcess daemon;
  Run run{};
  Must(kvs_attach(daemon.socket().c_str(), nullptr, &run.session), "attach");
  const kvs_model_desc desc =
      kvstrata::testing::DescOf({1, kQueryHeads, kKvHeads, kDim, 16}, "plans-bench", "plans-bench");
  Must(kvs_model_register(run.session, &desc, &run.model), "register");
  std::mt19937 rng(2);
  for (int p = 0; p < kPrompts; ++p) {
    run.prompts.emplace_back(tokens);
    for (int32_t& t : run.prompts.back()) t = static_cast<int32_t>(rng() % 50000);
  }
  bench::Json out_rows = bench::Json::array();
  {
    std::vector<std::unique_ptr<PlanRounds>> all;
    for (const Row& row : kRows) {
      const bool named = ("," + only + ",").find("," + std::string(row.label) + ",") < only.npos;
      if (!only.empty() && &row != kRows && !named) continue;
      all.push_back(std::make_unique<PlanRounds>(run, row));
    }
    for (int i = 0; i < kRounds; ++i) {
      for (const auto& rounds : all) rounds->Take();
    }
    for (const auto& rounds : all) out_rows.push_back(JsonOf(*rounds, *all.front(), tokens));
  }
  kvs_detach(run.session);
  bench::WriteResults(argc, argv, suite.empty() ? "plans" : suite, bench::DeviceName(),
                      "make bench", bench::Json::object(), out_rows);
  return 0;
}
