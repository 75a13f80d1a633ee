// DiskPages' way in: loads by turns, and a scrub when none waits.
#include <algorithm>
#include <string>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"
#include "server/work/disk_pages.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

// Where others wait, so much less is read in a turn: 12 ms of a disk of 1.3 GB/s.
constexpr uint64_t kSharedBatches = 4;
constexpr uint32_t kPatience = 60;  // of requests that have deadlines of their own

Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }

}  // namespace

bool DiskPages::Load(TierLoad load) {
  {
    MutexLock lock(mu_);
    if (stopping_ || requests_.size() >= kMaxLoads) {
      ++counters_.refused_loads;
      return false;
    }
    const Deadline deadline = load.asked + options_.load_timeout;
    requests_.push_back({std::move(load), deadline});
  }
  asked_.notify_one();
  return true;
}

DiskPages::Task DiskPages::NextTask() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> Task {
    for (;;) {
      if (!requests_.empty()) {
        Task task;
        task.load = std::move(requests_.front());
        requests_.pop_front();
        const bool alone = requests_.empty() && reading_ == 0;
        task.bytes = alone ? options_.batch_bytes : options_.batch_bytes / kSharedBatches;
        ++reading_;
        return task;
      }
      const bool scrubs = scrub_ != nullptr && !scrubbing_;
      const bool due = scrubs && Clock::now() >= scrub_->next_look();
      if (scrubs && (due || no_scrubs_ || stopping_)) {
        scrubbing_ = true;
        return {std::nullopt, 0, scrub_.get()};
      }
      if (stopping_) return {};
      if (scrubs) {
        asked_.wait_until(lock, scrub_->next_look());
      } else {
        asked_.wait(lock);
      }
    }
  }();
}

void DiskPages::Read() {
  WarmUpAllocator();
  Heartbeat beat("kvs-disk-read", kPatience);
  for (;;) {
    Task task = NextTask();
    if (!task.load && task.scrub == nullptr) return;
    const Turning turning(&beat);
    if (task.load) {
      ReadLoad(&*task.load, task.bytes);
    } else {
      Survive("kvs-disk-read", [&] { GoOnScrubbing(task.scrub); });
    }
  }
}

// Without memory the prefix ends there, as where a page is missing.
void DiskPages::ReadLoad(Request* load, uint64_t bytes) {
  bool more = false, back = false;
  Survive("kvs-disk-read", [&] { more = !stopping() && ReadBatch(load, bytes); });
  Survive("kvs-disk-read", [&] { back = TakeBack(load, more); });
  if (!back) Survive("kvs-disk-read", [&] { load->load.done(); });
}

bool DiskPages::TakeBack(Request* request, bool more) {
  {
    MutexLock lock(mu_);
    --reading_;
    if (!more || stopping_) return false;
    requests_.push_back(std::move(*request));
  }
  asked_.notify_one();
  return true;
}

std::vector<TierGet> DiskPages::PlanReads(std::span<const PageKey> keys, uint64_t most_bytes) {
  std::vector<TierGet> gets;
  uint64_t total = 0;
  for (const PageKey& key : keys) {
    std::vector<uint64_t> sizes = disk_->Sizes(TierNameOf(key));
    // What left meanwhile is asked for all the same, and missed.
    if (sizes.empty()) sizes.push_back(kValueAlignment);
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += WholeBlocks(size);
    if (!gets.empty() && total + bytes > most_bytes) break;
    total += bytes;
    gets.push_back(NewTierGet(TierNameOf(key), sizes, &buffers_));
  }
  return gets;
}

bool DiskPages::ReadBatch(Request* request, uint64_t most_bytes) {
  const std::span<const PageKey> keys = std::span(request->load.keys).subspan(request->read);
  if (keys.empty()) return false;
  if (Clock::now() >= request->deadline) {
    Count(&DiskPagesCounters::late_loads, 1);
    return false;
  }
  std::vector<TierGet> gets = PlanReads(keys, most_bytes);
  disk_->Get(gets, request->deadline);
  std::vector<LoadedValue> values;
  uint64_t read = 0, late = 0;
  for (const TierGet& get : gets) {
    values.emplace_back();
    if (get.status.ok()) values.back().assign(get.buffers.begin(), get.buffers.end());
    read += get.status.ok();
    late += get.status.code() == Code::kDeadlineExceeded;
    if (!get.status.ok()) read_log_.Warn("disk_read_failed", get.status);
  }
  Count(&DiskPagesCounters::read, read);
  Count(&DiskPagesCounters::late_loads, late != 0);
  const bool more = request->load.take(request->read, values);
  request->read += gets.size();
  return more && gets.size() < keys.size();
}

// --- scrubs --------------------------------------------------------------------------------------

Status DiskPages::Scrub(TierScrub scrub) {
  {
    MutexLock lock(mu_);
    if (no_scrubs_ || stopping_) return Stopping();
    if (scrub_ != nullptr) {
      return {Code::kFailedPrecondition, "SCRUB_RUNNING", "another scrub of the disk runs"};
    }
    scrub_ = std::make_unique<DiskScrub>(std::move(scrub), store_, disk_, &buffers_, &read_log_);
  }
  asked_.notify_one();
  return OkStatus();
}

void DiskPages::EndScrubs() {
  {
    MutexLock lock(mu_);
    no_scrubs_ = true;
  }
  asked_.notify_all();
}

bool DiskPages::ScrubsEnd() const {
  MutexLock lock(mu_);
  return no_scrubs_ || stopping_;
}

void DiskPages::GoOnScrubbing(DiskScrub* scrub) {
  std::optional<Status> end = Stopping();
  const auto go_on = [&] { end = scrub->GoOn(options_.load_timeout); };
  if (!ScrubsEnd() && !Survive("kvs-disk-read", go_on)) {
    end = ResourceExhausted("MEMORY", "the daemon has no memory to scrub");
  }
  std::unique_ptr<DiskScrub> ended;
  {
    MutexLock lock(mu_);
    scrubbing_ = false;
    if (end) ended = std::move(scrub_);
  }
  if (end) ended->End(*end);
}

}  // namespace kvstrata
