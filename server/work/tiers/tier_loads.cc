// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_loads.h"

#include <algorithm>
#include <utility>

#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

// Where others wait, so much less is read in a round: 12 ms of a disk of 1.3 GB/s.
constexpr uint64_t kSharedBatches = 4;
constexpr size_t kProbes = 64;  // keys whose sizes are asked for together
constexpr const char* kLoads = "tier-load";
constexpr double kNewest = 0.25;               // the last batch's part of the rate
constexpr std::chrono::minutes kRateHolds{1};  // a tier that was slow is tried again

// The sizes of keys from the first on; none: it has left.
std::vector<TierProbe> KnownOf(ValueTier* tier, std::span<const PageKey> keys) {
  std::vector<TierProbe> probes;
  for (const PageKey& key : keys.first(std::min(kProbes, keys.size()))) {
    probes.push_back({{reinterpret_cast<const char*>(key.data()), key.size()}, {}, {}});
  }
  tier->Probe(probes, {{}, {}, [] {}});
  return probes;
}

}  // namespace

TierLoads::TierLoads(const TierLoadsOptions& options, ValueTier* tier, TierBuffers* buffers,
                     std::function<void()> idle)
    : options_(options),
      load_timeout_(options.load_timeout),
      tier_(tier),
      buffers_(buffers),
      idle_(std::move(idle)) {}

bool TierLoads::Add(TierLoad load) {
  const Deadline deadline =
      load.longer +
      (load.finds != nullptr ? load.finds->deadline : load.asked + load_timeout_.load());
  const auto loading = std::make_shared<Loading>(Loading{std::move(load), deadline});
  LoadingPtr round;
  {
    MutexLock lock(mu_);
    if (cancelled_ || waiting_.size() >= kMostWaiting) {
      ++counters_.refused_loads;
      return false;
    }
    if (rounds_ < options_.readers && Clock::now() >= deadline) {  // else its round finds it so
      ++counters_.late_loads;
      return false;
    }
    waiting_.push_back(loading);
    round = BeginRound();
    if (round == nullptr) return true;
    ++serving_;
  }
  if (!Ask(round)) return EndRound(round, false), true;
  Leave();
  return true;
}

bool TierLoads::idle() const {
  MutexLock lock(mu_);
  return waiting_.empty();
}

void TierLoads::Cancel() {
  {
    MutexLock lock(mu_);
    cancelled_ = true;
  }
  end_reads_.request_stop();
}

void TierLoads::Await() {
  std::deque<LoadingPtr> waiting;
  {
    std::unique_lock<std::mutex> lock(mu_.native());
    ended_.wait(lock,
                [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return rounds_ == 0 && serving_ == 0; });
    [&]() KVS_NO_THREAD_SAFETY_ANALYSIS { std::swap(waiting, waiting_); }();
  }
  for (const LoadingPtr& loading : waiting) loading->load.done();
}

bool TierLoads::cancelled() const {
  MutexLock lock(mu_);
  return cancelled_;
}

double TierLoads::bytes_per_second() const {
  return Clock::now() - measured_.load() < kRateHolds ? rate_.load() : 0;
}

TierLoadsCounters TierLoads::counters() const {
  MutexLock lock(mu_);
  return counters_;
}

void TierLoads::Count(uint64_t TierLoadsCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

TierLoads::LoadingPtr TierLoads::BeginRound() {
  if (cancelled_ || waiting_.empty() || rounds_ >= options_.readers) return nullptr;
  LoadingPtr next = std::move(waiting_.front());
  waiting_.pop_front();
  ++rounds_;
  return next;
}

// Without memory the prefix ends there, as where a page is missing.
bool TierLoads::Ask(const LoadingPtr& loading) {
  if (idle()) idle_();
  if (loading->read == loading->load.keys.size()) return false;
  if (Clock::now() >= loading->deadline) {
    Count(&TierLoadsCounters::late_loads, 1);
    return false;
  }
  uint64_t bytes = options_.batch_bytes;
  {
    MutexLock lock(mu_);
    const bool alone = waiting_.empty() && rounds_ == 1;
    if (!alone) bytes /= kSharedBatches;
  }
  return Survive(kLoads, [&] {
    loading->gets = PlanReads(*loading, bytes);
    loading->asked = Clock::now();
    tier_->Get(loading->gets,
               {loading->deadline, end_reads_.get_token(), [this, loading] { Came(loading); }});
  });
}

std::vector<TierGet> TierLoads::PlanReads(const Loading& loading, uint64_t most_bytes) {
  const std::span<const PageKey> keys = std::span(loading.load.keys).subspan(loading.read);
  const TierFinds* const finds = loading.load.finds.get();
  std::vector<TierGet> gets;
  std::vector<TierProbe> probes;
  uint64_t total = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    // What left meanwhile is asked for all the same, and missed.
    static constexpr uint64_t kAny[] = {kValueAlignment};
    std::span<const uint64_t> sizes = kAny;
    std::string place;
    if (finds != nullptr) {
      const TierFinds::Value& found = finds->values.at(keys[i]);
      sizes = found.sizes;
      place = TierNameOf(found.place);
    } else {
      if (i % kProbes == 0) probes = KnownOf(tier_, keys.subspan(i));
      const TierProbe& probe = probes[i % kProbes];
      if (!probe.sizes.empty()) sizes = probe.sizes.all();
    }
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += WholeBlocks(size);
    if (!gets.empty() && total + bytes > most_bytes) break;
    total += bytes;
    gets.push_back(NewTierGet(TierNameOf(keys[i]), sizes, buffers_));
    gets.back().place = std::move(place);
  }
  return gets;
}

void TierLoads::Came(const LoadingPtr& loading) {
  {
    MutexLock lock(mu_);
    ++serving_;
  }
  bool more = false;
  Survive(kLoads, [&] { more = !cancelled() && Take(loading.get()); });
  loading->gets.clear();
  EndRound(loading, more);
}

bool TierLoads::Take(Loading* loading) {
  std::vector<LoadedValue> values;
  uint64_t read = 0, late = 0, bytes = 0;
  for (const TierGet& get : loading->gets) {
    values.emplace_back();
    if (get.status.ok()) {
      values.back().assign(get.buffers.begin(), get.buffers.end());
      for (const auto& buffer : get.buffers) bytes += buffer.size();
    }
    read += get.status.ok();
    late += get.status.code() == Code::kDeadlineExceeded;
  }
  if (read != loading->gets.size()) TellFailures(*loading);
  const Clock::duration took = Clock::now() - loading->asked;
  NoteTime(options_.timed, took);
  NoteBytes(options_.path, bytes);
  if (read != 0 && took.count() > 0) {
    const double rate = static_cast<double>(bytes) / std::chrono::duration<double>(took).count();
    const double before = bytes_per_second();
    rate_ = before == 0 ? rate : before + kNewest * (rate - before);
    measured_ = Clock::now();
  }
  Count(&TierLoadsCounters::read, read);
  Count(&TierLoadsCounters::late_loads, late != 0);
  const bool more = loading->load.take(loading->read, values);
  loading->read += loading->gets.size();
  return more && late == 0 && loading->read < loading->load.keys.size();
}

void TierLoads::TellFailures(const Loading& loading) {
  const auto failed = [](const TierGet& get) { return !get.status.ok(); };
  const auto first = std::ranges::find_if(loading.gets, failed);
  uint64_t suppressed = 0;
  if (!log_.Allow(&suppressed)) return;
  const auto had =
      std::chrono::duration_cast<std::chrono::microseconds>(loading.deadline - loading.load.asked);
  LogEvent(LogLevel::kWarn, "tier_read_failed",
           {{"tier", options_.path == BytePath::kRemoteToMemory ? "remote" : "disk"},
            {"values", std::ranges::count_if(loading.gets, failed)},
            {"deadline_us", had.count()},
            {"reason", first->status.reason()},
            {"why", first->status.message()},
            {"suppressed", suppressed}});
}

void TierLoads::EndRound(LoadingPtr loading, bool more) {
  for (;;) {
    LoadingPtr next;
    {
      MutexLock lock(mu_);
      --rounds_;
      more = more && !cancelled_;
      if (more) waiting_.push_back(loading);
      next = BeginRound();
    }
    const bool asked = next == nullptr || Ask(next);
    if (!more) Survive(kLoads, [&] { loading->load.done(); });
    if (asked) break;
    loading = std::move(next);
    more = false;
  }
  Leave();
}

void TierLoads::Leave() {
  MutexLock lock(mu_);
  --serving_;
  if (cancelled_) ended_.notify_all();
}

}  // namespace kvstrata
