// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_scrubs.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "kernels/codec/extent.h"
#include "server/store/prompts/artefact_ledger.h"
#include "server/telemetry/thread_top.h"
#include "server/tier/blocking_calls.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBatchBytes = uint64_t{4} << 20;  // but for its first value
constexpr uint64_t kBatchesPerSecond = 8;            // where the rate is limited
constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::seconds kForgetTimeout{10};

constexpr const char* kThread = "kvs-tier-scrub";
constexpr uint32_t kScrubPatience = 60;  // for requests that have deadlines of their own

Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }

}  // namespace

Result<bool> ValueScrub::Plan(std::vector<TierGet>* gets, std::chrono::microseconds timeout) {
  const uint64_t rate = scrub_.bytes_per_second;
  const uint64_t most = rate == 0 ? kBatchBytes : std::min(kBatchBytes, rate / kBatchesPerSecond);
  for (uint64_t bytes = 0;;) {
    while (ahead_.empty() && walk_.cursor != kWalkEnd) {
      KVS_RETURN_IF_ERROR(WalkOn(tier_, &walk_, Clock::now() + timeout));
      std::ranges::move(walk_.values, std::back_inserter(ahead_));
    }
    if (ahead_.empty()) return false;
    const TierValue& value = ahead_.front();
    for (const uint64_t size : value.sizes) bytes += WholeBlocks(size);
    if (!gets->empty() && bytes > most) return true;
    gets->push_back(NewTierGet(value.key, value.sizes, buffers_));
    gets->back().inspects = true;
    ahead_.pop_front();
  }
}

void ValueScrub::NoteExtents(const TierGet& get) {
  if (get.buffers.size() != 1 || get.key.size() != sizeof(PageKey)) return;
  const std::span<const std::byte> bytes = get.buffers.front();
  ExtentHeader header{};
  if (bytes.size() >= sizeof(header)) std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic == kExtentMagic && header.version == kExtentVersion) {
    parts_.insert(get.key);
    return;
  }
  const std::optional<ArtefactRecord> record = ParseRecord(bytes);
  if (!record) return;
  PageKey artefact{};
  std::ranges::copy(get.key, artefact.begin());
  for (size_t i = 0; i < record->extents.size(); ++i) {
    named_.insert(TierNameOf(ExtentKey(artefact, i, record->extents[i])));
  }
}

void ValueScrub::EraseOrphans() {
  for (const ValueInfo& value : store_->values().ArtefactValues()) named_.insert(value.key);
  std::vector<std::string> orphans;
  std::ranges::copy_if(parts_, std::back_inserter(orphans),
                       [this](const std::string& key) { return !named_.contains(key); });
  // A record that was written behind the scrub's back loses extents here: it is built again then.
  const Status erased = ForgetAndWait(tier_, orphans, Clock::now() + kForgetTimeout);
  if (!erased.ok()) return log_->Warn("tier_forget_failed", erased);
  so_far_.orphans = orphans.size();
}

std::optional<Status> ValueScrub::Batch(std::chrono::microseconds timeout) {
  std::vector<TierGet> gets;
  const auto began = Clock::now();
  const Result<bool> more = Plan(&gets, timeout);
  if (!more.ok()) return more.status();
  GetAndWait(tier_, gets, began + timeout);
  uint64_t bytes = 0;
  for (const TierGet& get : gets) {
    if (get.status.code() == Code::kUnavailable) return get.status;
    const bool lost = get.status.code() == Code::kDataLoss;
    so_far_.late += get.status.code() == Code::kDeadlineExceeded;
    so_far_.corrupt += lost;
    if (lost) log_->Warn("tier_scrub_corrupt", get.status);
    if (!get.status.ok() && !lost) continue;  // erased or replaced meanwhile, or late
    ++so_far_.values;
    for (const auto& buffer : get.buffers) bytes += buffer.size();
    if (!lost) NoteExtents(get);
  }
  so_far_.bytes += bytes;
  if (!*more) {
    EraseOrphans();
    return OkStatus();
  }
  const uint64_t rate = scrub_.bytes_per_second;
  if (rate == 0) return std::nullopt;
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / static_cast<double>(rate));
  next_batch_ = began + std::chrono::duration_cast<Clock::duration>(takes);
  return std::nullopt;
}

std::optional<Status> ValueScrub::GoOn(std::chrono::microseconds timeout) {
  std::optional<Status> ended;
  if (Clock::now() >= next_batch_) ended = Batch(timeout);
  const bool wanted = scrub_.progress(so_far_);
  if (ended) return ended;
  if (!wanted) return Status(Code::kAborted, "SCRUB_CANCELLED", "who asked for it went away");
  next_look_ = std::min(next_batch_, Clock::now() + kLook);
  return std::nullopt;
}

TierScrubs::TierScrubs(Store* store, ValueTier* tier, TierBuffers* buffers,
                       std::function<bool()> may, std::chrono::microseconds timeout)
    : store_(store),
      tier_(tier),
      buffers_(buffers),
      may_(std::move(may)),
      timeout_(timeout),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), kThread);
}

TierScrubs::~TierScrubs() { Stop(); }

Status TierScrubs::Begin(TierScrub scrub) {
  {
    MutexLock lock(mu_);
    if (refuses_) return Stopping();
    if (scrub_ != nullptr) {
      return {Code::kFailedPrecondition, "SCRUB_RUNNING", "another scrub of the disk runs"};
    }
    scrub_ = std::make_unique<ValueScrub>(std::move(scrub), store_, tier_, buffers_, &log_);
  }
  changed_.notify_one();
  return OkStatus();
}

void TierScrubs::Refuse() {
  {
    MutexLock lock(mu_);
    refuses_ = true;
  }
  changed_.notify_all();
}

void TierScrubs::Stop() {
  {
    MutexLock lock(mu_);
    refuses_ = stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// The lock: whoever looks sees what changed, or hears this.
void TierScrubs::Wake() {
  MutexLock lock(mu_);
  if (scrub_ != nullptr) changed_.notify_one();
}

bool TierScrubs::refuses() const {
  MutexLock lock(mu_);
  return refuses_;
}

ValueScrub* TierScrubs::Next() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> ValueScrub* {
    for (;;) {
      const bool may = scrub_ != nullptr && may_();
      const bool due = may && std::chrono::steady_clock::now() >= scrub_->next_look();
      if (due || (scrub_ != nullptr && refuses_)) return scrub_.get();
      if (stopping_) return nullptr;
      if (may) {
        changed_.wait_until(lock, scrub_->next_look());
      } else {
        changed_.wait(lock);
      }
    }
  }();
}

void TierScrubs::Run() {
  WarmUpAllocator();
  Heartbeat beat(kThread, kScrubPatience);
  while (ValueScrub* scrub = Next()) {
    const LoopIteration iteration(&beat);
    std::optional<Status> end = Stopping();
    if (!refuses() && !Survive(kThread, [&] { end = scrub->GoOn(timeout_); })) {
      end = ResourceExhausted("MEMORY", "the daemon has no memory to scrub");
    }
    if (!end) continue;
    std::unique_ptr<ValueScrub> ended;
    {
      MutexLock lock(mu_);
      ended = std::move(scrub_);
    }
    Survive(kThread, [&] { ended->End(*end); });
  }
}

}  // namespace kvstrata
