// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_searches.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "server/telemetry/thread_top.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kSearch = "remote-search";

std::string_view NameOf(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

bool IsWorthIt(const TierSearch& search, double bytes_a_second) {
  if (bytes_a_second == 0 || search.prefill_rate == 0) return true;
  const double reading = static_cast<double>(search.bytes) / bytes_a_second;
  const double computing = search.tokens / search.prefill_rate;
  return reading <= computing / 2;
}

}  // namespace

TierSearches::TierSearches(const TierSearchesOptions& options, ValueTier* tier)
    : tier_(tier),
      known_{RecentKeys(options.present_ttl), RecentKeys(options.miss_ttl)},
      options_(options),
      read_rate_(options.read_rate),
      tenant_read_rates_(options.tenant_read_rates) {}

void TierSearches::Cancel() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  end_searches_.request_stop();
}

void TierSearches::Await() {
  std::unique_lock<std::mutex> lock(mu_.native());
  ended_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return searching_ == 0; });
}

void TierSearches::Configure(const TierSearchesOptions& options) {
  known_.present.Restart(options.present_ttl);
  known_.absent.Restart(options.miss_ttl);
  MutexLock lock(mu_);
  if (options.read_rate != options_.read_rate) read_rate_ = TokenBucket(options.read_rate);
  tenant_read_rates_.Set(options.tenant_read_rates);
  options_ = options;
}

uint32_t TierSearches::min_tokens() const {
  MutexLock lock(mu_);
  return options_.min_tokens;
}

TierSearchesCounters TierSearches::counters() const {
  MutexLock lock(mu_);
  TierSearchesCounters all = counters_;
  all.over_read_rates = tenant_read_rates_.refused();
  return all;
}

void TierSearches::NoteLoaded(std::span<const PageKey> keys, std::span<const LoadedValue> values) {
  uint64_t missed = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    (values[i].empty() ? known_.absent : known_.present).Add(keys[i]);
    missed += values[i].empty();
  }
  if (missed == 0) return;
  MutexLock lock(mu_);
  counters_.missed += missed;
}

std::chrono::microseconds TierSearches::TimeFor(uint32_t tokens) const {
  return std::min(options_.deadline + options_.deadline_per_1024 * tokens / 1024,
                  options_.deadline_most);
}

// With its artefact a prompt is held across pages that are missing, so that nothing is cut then.
bool TierSearches::CutKnownMisses(TierSearch* search) const {
  std::vector<TierSearch::Key>& keys = search->keys;
  if (search->artefact && !known_.absent.Contains(keys.front().key)) return true;
  if (search->artefact) keys.erase(keys.begin());
  search->artefact = false;
  const auto pages = static_cast<uint32_t>(std::ranges::count_if(keys, &TierSearch::Key::page));
  if (pages == 0) return false;
  const auto missed = std::ranges::find_if(
      keys, [this](const TierSearch::Key& k) { return k.page && known_.absent.Contains(k.key); });
  keys.erase(missed, keys.end());
  const auto left = static_cast<uint32_t>(std::ranges::count_if(keys, &TierSearch::Key::page));
  search->bytes = search->bytes / pages * left;
  search->tokens = search->tokens / pages * left;
  return left != 0 && search->tokens >= min_tokens();
}

bool TierSearches::Begin(TierSearch search, double bytes_a_second) {
  const bool unknown = CutKnownMisses(&search);
  const bool worth = unknown && IsWorthIt(search, bytes_a_second);
  const auto s = std::make_shared<Searching>();
  {
    MutexLock lock(mu_);
    const bool refused = stopping_ || searching_ >= kMostSearches;
    counters_.known_misses += !unknown;
    counters_.not_worth += unknown && !worth;
    counters_.refused_searches += worth && refused;
    if (!worth || refused) return false;
    const std::chrono::microseconds time = TimeFor(search.tokens);
    s->deadline = search.asked + time;
    s->probed_by = search.asked + time / 2;
    ++counters_.searches;
    counters_.searched += search.keys.size();
    ++searching_;
  }
  s->search = std::move(search);
  for (const TierSearch::Key& key : s->search.keys) {
    s->probes.push_back({NameOf(key.key), {}, NameOf(key.place)});
  }
  tier_->Probe(s->probes, {s->probed_by, end_searches_.get_token(), [this, s] { Found(s); }});
  return true;
}

bool TierSearches::MayRead(const std::string& tenant, uint64_t bytes) {
  const Clock::time_point now = Clock::now();
  MutexLock lock(mu_);
  return tenant_read_rates_.Take(tenant, bytes, now) && read_rate_.Take(bytes, now);
}

TierFinds TierSearches::FindsOf(const Searching& s) {
  TierFinds finds;
  finds.deadline = s.deadline;
  const bool late = Clock::now() >= s.probed_by;
  bool gap = false, over_rate = false;
  for (size_t i = 0; i < s.probes.size(); ++i) {
    const TierSearch::Key& key = s.search.keys[i];
    const std::span<const uint64_t> sizes = s.probes[i].sizes.all();
    if (sizes.empty()) {
      const bool first = key.page && !gap;
      // What could not be told in time is no miss.
      if (!late && (first || (s.search.artefact && i == 0))) known_.absent.Add(key.key);
      gap = gap || key.page;
      if (gap && !s.search.artefact) break;
      continue;
    }
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += size;
    over_rate = !MayRead(s.search.tenant, bytes);
    if (over_rate) break;
    finds.values[key.key] = {{sizes.begin(), sizes.end()}, key.place};
  }
  MutexLock lock(mu_);
  counters_.found += finds.values.size();
  counters_.late_searches += late;
  counters_.over_rate += over_rate;
  return finds;
}

// Without memory for what was found nothing was.
void TierSearches::Found(const std::shared_ptr<Searching>& s) {
  NoteTime(Timed::kRemoteSearch, Clock::now() - s->search.asked);
  TierFinds finds;
  if (!Survive(kSearch, [&] { finds = FindsOf(*s); })) finds = {};
  Survive(kSearch, [&] { s->search.done(std::move(finds)); });
  s->search.done = nullptr;
  MutexLock lock(mu_);
  --searching_;
  if (stopping_) ended_.notify_all();
}

}  // namespace kvstrata
