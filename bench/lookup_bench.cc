// SPDX-License-Identifier: Apache-2.0
// Look-ups of prefixes by their keys, hashing apart, in a store with a million pages in its index:
// held in memory from the first page to the last, held to the middle, and not at all; then, hashing
// included, of a prompt of a million tokens, raw and for plans. With --disk
// FOLDER also what lies on disk alone: `--disk-entries` pages (8 KiB each) are written there.
// Usage: lookup_bench [--disk FOLDER] [--disk-entries N] [--entries N]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "server/store/store.h"
#include "server/tier/disk/disk_value_tier.h"
#include "server/work/tiers/tier_chain.h"

namespace kvstrata {
namespace {

constexpr int32_t kPageTokens = 16, kPromptTokens = 1 << 16;
constexpr uint64_t kPageBytes = 4096;

template <typename T>
T Must(Result<T> result, const char* what) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "%s: %s\n", what, result.status().ToString().c_str());
  std::exit(1);
}
void Must(const Status& status, const char* what) {
  Must(Result<int>(status.ok() ? Result<int>(0) : status), what);
}

ModelDesc Model() {
  ModelDesc desc;
  desc.name = desc.digest = "lookup-bench";
  desc.geometry = {1, 2, 1, 64, kPageTokens, DType::kBF16};
  return desc;
}

std::vector<int32_t> Prompt(uint32_t seed, size_t n = kPromptTokens) {
  std::mt19937 rng(seed);
  std::vector<int32_t> tokens(n);
  for (int32_t& t : tokens) t = static_cast<int32_t>(rng() % 50000);
  return tokens;
}

class Bench {
 public:
  explicit Bench(uint64_t pages) {
    StoreOptions options;
    options.device_bytes = (pages + pages / 8) * kPageBytes + (uint64_t{1} << 30);
    options.host_bytes = uint64_t{16} << 20;
    store_ = Must(Store::Create(options), "store");
    PeerIdentity peer;
    peer.tenant = "uid:0";
    session_ = Must(store_->sessions().OpenSession(peer, Transport::kLinked, "bench",
                                                   [](const ArenaGrant&) {}),
                    "session")
                   .session;
    model_ = Must(store_->models().RegisterModel(session_, Model()), "model");
  }

  // Prompts into the index, no row of them ever written.
  void Fill(uint64_t pages, uint32_t first_seed) {
    const uint64_t prompts = (pages * kPageTokens + kPromptTokens - 1) / kPromptTokens;
    for (uint64_t i = 0; i < prompts; ++i) {
      const std::vector<int32_t> tokens = Prompt(first_seed + static_cast<uint32_t>(i));
      const OpenedSequence s =
          Must(store_->openings().OpenSequence(session_, model_, "full", tokens), "open");
      Must(store_->steps().Commit(session_, s.sequence, 0, tokens, 0), "commit");
      Must(store_->sequences().CloseSequence(session_, s.sequence), "close");
    }
    prompts_ = prompts;
  }

  // Microseconds of looking up `tokens` of prompts of seeds [first, first + n), by their keys.
  void Measure(const char* what, size_t tokens, uint32_t first, uint32_t n, uint32_t held) {
    std::vector<double> us;
    const KeyChain chain("uid:0", Model());
    for (uint32_t i = 0; i < 2000; ++i) {
      // A prompt that was not looked at lately: its entries are in no cache.
      const uint32_t seed = first + i * 7919u % n;
      const std::vector<int32_t> prompt = Prompt(seed);
      const std::vector<PageKey> keys = chain.Pages({}, std::span(prompt).first(tokens));
      const double begin = bench::NowUs();
      const PrefixHit hit = Must(store_->lookups().Lookup(session_, model_, keys), "lookup");
      us.push_back(bench::NowUs() - begin);
      if (hit.held_tokens() != held) {
        std::fprintf(stderr, "%s: %u tokens are held, not %u\n", what, hit.held_tokens(), held);
        std::exit(1);
      }
    }
    const bench::Timing t = bench::TimingOf(std::move(us));
    std::printf("%-24s %6zu tokens %8.1f us  (p10 %.1f, p90 %.1f, p99 %.1f, n %zu)\n", what, tokens,
                t.median, t.p10, t.p90, t.p99, t.n);
  }

  // The same of one long prompt by its tokens, for opens of `plan`; "": raw pages.
  void MeasurePrompt(std::string_view plan) {
    constexpr size_t kTokens = size_t{1} << 20;
    const std::vector<int32_t> prompt = Prompt(0, kTokens);
    const std::string opens(plan.empty() ? "full" : plan);
    const OpenedSequence s =
        Must(store_->openings().OpenSequence(session_, model_, opens, prompt), "open");
    const bool index = IndexOf(s.plan, s.geometry).kind != IndexLayout::Kind::kNone;
    const std::span<const int32_t> rest = std::span(prompt).subspan(s.held_tokens);
    Must(store_->steps().Commit(session_, s.sequence, s.held_tokens, rest, index ? kTokens : 0),
         "commit");
    Must(store_->sequences().CloseSequence(session_, s.sequence), "close");
    std::vector<double> us;
    uint32_t held = 0;
    for (int i = 0; i < 40; ++i) {
      const double begin = bench::NowUs();
      held = Must(store_->lookups().Lookup(session_, model_, prompt, {std::string(plan), ""}),
                  "lookup")
                 .held_tokens();
      us.push_back(bench::NowUs() - begin);
    }
    const bench::Timing t = bench::TimingOf(std::move(us));
    std::printf(
        "prompt/%-17s %6zu tokens %8.1f us  (p10 %.1f, p90 %.1f; %.3f us a page, %u held)\n",
        plan.empty() ? "raw" : opens.c_str(), kTokens, t.median, t.p10, t.p90,
        t.median / (kTokens / kPageTokens), held);
  }

  Store* store() { return store_.get(); }
  uint32_t prompts() const { return static_cast<uint32_t>(prompts_); }

 private:
  std::unique_ptr<Store> store_;
  uint64_t session_ = 0, model_ = 0, prompts_ = 0;
};

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) {
  using namespace kvstrata;
  std::string disk;
  uint64_t entries = 1 << 20, disk_entries = 1 << 16;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--disk")) disk = argv[i + 1];
    if (!std::strcmp(argv[i], "--disk-entries"))
      disk_entries = std::strtoull(argv[i + 1], nullptr, 10);
    if (!std::strcmp(argv[i], "--entries")) entries = std::strtoull(argv[i + 1], nullptr, 10);
  }
  {
    Bench bench(entries);
    bench.Fill(entries, 1);
    std::printf("%lu pages in the index\n", bench.store()->inspection().Counters().prefix_pages);
    for (const size_t tokens : {1024, 4096, 8192, 32768}) {
      bench.Measure("memory/held", tokens, 1, bench.prompts(), static_cast<uint32_t>(tokens));
    }
    bench.Measure("memory/missed", 8192, 1 << 20, 1 << 20, 0);
    for (const char* plan : {"", "sentencekv", "quest"}) bench.MeasurePrompt(plan);
  }
  if (disk.empty()) return 0;
  DiskTierOptions options;
  options.directory = disk;
  options.segment_bytes = uint64_t{64} << 20;
  options.budget_bytes = disk_entries * 2 * kPageBytes * 5 / 4 + 4 * options.segment_bytes;
  const auto tier = Must(
      DiskTier::Open(options, std::chrono::steady_clock::now() + std::chrono::minutes(1)), "disk");
  Bench bench(disk_entries);
  TierRowOptions pages_options;
  pages_options.writer.queue = 1 << 22;
  DiskValueTier values({}, tier.get());
  TierRow pages(pages_options, bench.store(), &values, values.Hooks());
  TierChain tiers(bench.store());
  tiers.Add(&pages);
  bench.Fill(disk_entries, 1);
  while (pages.counters().waiting != 0) std::this_thread::yield();
  bench.store()->eviction().Evict(false);
  std::printf("%lu entries on disk\n", tier->Stats().entries);
  for (const size_t tokens : {1024, 8192}) {
    bench.Measure("disk/held", tokens, 1, bench.prompts(), static_cast<uint32_t>(tokens));
  }
  return 0;
}
