// TierPages' way in: loads by turns, and a scrub when none waits.
#include <algorithm>
#include <string_view>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"
#include "server/work/tier_pages.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

// Where others wait, so much less is read in a turn: 12 ms of a disk of 1.3 GB/s.
constexpr uint64_t kSharedBatches = 4;
constexpr uint32_t kPatience = 60;  // of requests that have deadlines of their own
constexpr size_t kProbes = 64;      // keys whose sizes are asked for together
constexpr const char* kLoads = "tier-load";
constexpr const char* kScrubs = "kvs-tier-scrub";

Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }

}  // namespace

bool TierPages::Load(TierLoad load) {
  const Deadline deadline = load.asked + options_.load_timeout;
  const auto loading = std::make_shared<Loading>(Loading{std::move(load), deadline});
  LoadingPtr turn;
  {
    MutexLock lock(mu_);
    if (stopping_ || loads_.size() >= kMaxLoads) {
      ++counters_.refused_loads;
      return false;
    }
    if (turns_ < options_.readers && Clock::now() >= deadline) {  // else its turn finds it so
      ++counters_.late_loads;
      return false;
    }
    loads_.push_back(loading);
    turn = BeginTurn();
    if (turn == nullptr) return true;
    ++serving_;
  }
  if (!Ask(turn)) return EndTurn(turn, false), true;
  Leave();
  return true;
}

TierPages::LoadingPtr TierPages::BeginTurn() {
  if (stopping_ || loads_.empty() || turns_ >= options_.readers) return nullptr;
  LoadingPtr next = std::move(loads_.front());
  loads_.pop_front();
  ++turns_;
  if (loads_.empty() && scrub_ != nullptr) scrubs_.notify_one();
  return next;
}

// Without memory the prefix ends there, as where a page is missing.
bool TierPages::Ask(const LoadingPtr& loading) {
  const std::span<const PageKey> keys = std::span(loading->load.keys).subspan(loading->read);
  if (keys.empty()) return false;
  if (Clock::now() >= loading->deadline) {
    Count(&TierPagesCounters::late_loads, 1);
    return false;
  }
  uint64_t bytes = options_.batch_bytes;
  {
    MutexLock lock(mu_);
    const bool alone = loads_.empty() && turns_ == 1;
    if (!alone) bytes /= kSharedBatches;
  }
  return Survive(kLoads, [&] {
    loading->gets = PlanReads(keys, bytes);
    tier_->Get(loading->gets,
               {loading->deadline, end_reads_.get_token(), [this, loading] { Came(loading); }});
  });
}

std::vector<TierGet> TierPages::PlanReads(std::span<const PageKey> keys, uint64_t most_bytes) {
  std::vector<TierGet> gets;
  std::vector<TierProbe> probes;
  uint64_t total = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i % kProbes == 0) {
      probes.clear();
      for (const PageKey& key : keys.subspan(i, std::min(kProbes, keys.size() - i))) {
        probes.push_back({{reinterpret_cast<const char*>(key.data()), key.size()}, {}});
      }
      tier_->Probe(probes, {{}, {}, [] {}});
    }
    // What left meanwhile is asked for all the same, and missed.
    static constexpr uint64_t kAny[] = {kValueAlignment};
    const TierProbe& probe = probes[i % kProbes];
    const std::span<const uint64_t> sizes = probe.sizes.empty() ? kAny : probe.sizes.all();
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += WholeBlocks(size);
    if (!gets.empty() && total + bytes > most_bytes) break;
    total += bytes;
    gets.push_back(NewTierGet(TierNameOf(keys[i]), sizes, &buffers_));
  }
  return gets;
}

void TierPages::Came(const LoadingPtr& loading) {
  {
    MutexLock lock(mu_);
    ++serving_;
  }
  bool more = false;
  Survive(kLoads, [&] { more = !stopping() && Take(loading.get()); });
  loading->gets.clear();
  EndTurn(loading, more);
}

bool TierPages::Take(Loading* loading) {
  std::vector<LoadedValue> values;
  uint64_t read = 0, late = 0;
  for (const TierGet& get : loading->gets) {
    values.emplace_back();
    if (get.status.ok()) values.back().assign(get.buffers.begin(), get.buffers.end());
    read += get.status.ok();
    late += get.status.code() == Code::kDeadlineExceeded;
    if (!get.status.ok()) read_log_.Warn("tier_read_failed", get.status);
  }
  Count(&TierPagesCounters::read, read);
  Count(&TierPagesCounters::late_loads, late != 0);
  const bool more = loading->load.take(loading->read, values);
  loading->read += loading->gets.size();
  return more && late == 0 && loading->read < loading->load.keys.size();
}

void TierPages::EndTurn(LoadingPtr loading, bool more) {
  for (;;) {
    LoadingPtr next;
    {
      MutexLock lock(mu_);
      --turns_;
      more = more && !stopping_;
      if (more) loads_.push_back(loading);
      next = BeginTurn();
    }
    const bool asked = next == nullptr || Ask(next);
    if (!more) Survive(kLoads, [&] { loading->load.done(); });
    if (asked) break;
    loading = std::move(next);
    more = false;
  }
  Leave();
}

void TierPages::Leave() {
  MutexLock lock(mu_);
  --serving_;
  if (stopping_) ended_.notify_all();
}

// --- scrubs --------------------------------------------------------------------------------------

Status TierPages::Scrub(TierScrub scrub) {
  {
    MutexLock lock(mu_);
    if (no_scrubs_ || stopping_) return Stopping();
    if (scrub_ != nullptr) {
      return {Code::kFailedPrecondition, "SCRUB_RUNNING", "another scrub of the disk runs"};
    }
    scrub_ = std::make_unique<ValueScrub>(std::move(scrub), store_, tier_, &buffers_, &read_log_);
  }
  scrubs_.notify_one();
  return OkStatus();
}

void TierPages::EndScrubs() {
  {
    MutexLock lock(mu_);
    no_scrubs_ = true;
  }
  scrubs_.notify_all();
}

bool TierPages::ScrubsEnd() const {
  MutexLock lock(mu_);
  return no_scrubs_ || stopping_;
}

ValueScrub* TierPages::NextScrub() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> ValueScrub* {
    for (;;) {
      const bool may = scrub_ != nullptr && loads_.empty();
      const bool due = may && Clock::now() >= scrub_->next_look();
      if (due || (scrub_ != nullptr && (no_scrubs_ || stopping_))) return scrub_.get();
      if (stopping_) return nullptr;
      if (may) {
        scrubs_.wait_until(lock, scrub_->next_look());
      } else {
        scrubs_.wait(lock);
      }
    }
  }();
}

void TierPages::RunScrubs() {
  WarmUpAllocator();
  Heartbeat beat(kScrubs, kPatience);
  while (ValueScrub* scrub = NextScrub()) {
    const Turning turning(&beat);
    std::optional<Status> end = Stopping();
    const auto go_on = [&] { end = scrub->GoOn(options_.load_timeout); };
    if (!ScrubsEnd() && !Survive(kScrubs, go_on)) {
      end = ResourceExhausted("MEMORY", "the daemon has no memory to scrub");
    }
    if (!end) continue;
    std::unique_ptr<ValueScrub> ended;
    {
      MutexLock lock(mu_);
      ended = std::move(scrub_);
    }
    Survive(kScrubs, [&] { ended->End(*end); });
  }
}

}  // namespace kvstrata
