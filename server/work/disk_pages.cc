#include "server/work/disk_pages.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/work/pin_records.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kAlignment = 4096;               // what O_DIRECT and the tier want
constexpr uint64_t kPutBytes = uint64_t{16} << 20;  // of one batch, but for its first value
constexpr uint64_t kGetBytes = uint64_t{64} << 20;
constexpr size_t kPutValues = 256;
constexpr std::chrono::seconds kPutTimeout{10};
constexpr std::chrono::seconds kCheckpointTimeout{60};

std::string NameOfKey(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

// Of all that a pin keeps, its own record too.
std::vector<std::string> NamesOf(const PrefixPin& pin) {
  std::vector<std::string> names = {PinRecordName(pin.id)};
  for (const PageKey& key : pin.pages) names.push_back(NameOfKey(key));
  for (const PageKey& key : pin.index_blocks) names.push_back(NameOfKey(key));
  return names;
}

std::shared_ptr<std::byte> Aligned(uint64_t bytes) {
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes));
  KVS_CHECK(data != nullptr);
  return {data, [](std::byte* p) { std::free(p); }};
}

uint64_t WholeBlocks(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t Seconds(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::seconds>(at.time_since_epoch()).count();
}

void LogStatus(LogLimiter* limiter, std::string_view event, const Status& status) {
  uint64_t suppressed = 0;
  if (!limiter->Allow(Seconds(Clock::now()), &suppressed)) return;
  LogEvent(LogLevel::kWarn, event,
           {{"reason", status.reason()}, {"why", status.message()}, {"suppressed", suppressed}});
}

}  // namespace

DiskPages::DiskPages(const DiskPagesOptions& options, Store* store, DiskTier* disk)
    : options_(options), store_(store), disk_(disk) {
  writer_ = std::thread([this] { Write(); });
  reader_ = std::thread([this] { Read(); });
  pthread_setname_np(writer_.native_handle(), "kvs-disk-write");
  pthread_setname_np(reader_.native_handle(), "kvs-disk-read");
  store_->SetPageTier(this);
}

DiskPages::~DiskPages() {
  Stop(Clock::now());
  store_->SetPageTier(nullptr);
}

void DiskPages::Stop(Deadline deadline) {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    stopping_ = true;
    stop_deadline_ = deadline;
  }
  offered_.notify_all();
  asked_.notify_all();
  reader_.join();
  writer_.join();
}

bool DiskPages::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

DiskPagesCounters DiskPages::counters() const {
  MutexLock lock(mu_);
  return counters_;
}

size_t DiskPages::waiting() const {
  MutexLock lock(mu_);
  return offers_.size() + writing_;
}

void DiskPages::Count(uint64_t DiskPagesCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

// --- writing -------------------------------------------------------------------------------------

void DiskPages::Offer(const PageKey& key) {
  {
    MutexLock lock(mu_);
    if (stopping_ || offers_.size() >= options_.queue) {
      ++counters_.dropped;
      return;
    }
    offers_.push_back(key);
  }
  offered_.notify_one();
}

std::optional<std::vector<PageKey>> DiskPages::NextOffers() {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    writing_ = 0;
    return stopping_ || !offers_.empty();
  };
  if (unsaved_ && options_.checkpoint_interval.count() != 0) {
    offered_.wait_until(lock, checkpoint_at_, ready);
  } else {
    offered_.wait(lock, ready);
  }
  return [this]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::optional<std::vector<PageKey>> {
    if (stopping_ && (offers_.empty() || Clock::now() >= stop_deadline_)) return std::nullopt;
    const auto end = offers_.begin() + static_cast<ptrdiff_t>(std::min(offers_.size(), kPutValues));
    std::vector<PageKey> keys(offers_.begin(), end);
    offers_.erase(offers_.begin(), end);
    writing_ = keys.size();
    return keys;
  }();
}

void DiskPages::Write() {
  for (auto keys = NextOffers(); keys; keys = NextOffers()) {
    Batch batch;
    for (const PageKey& key : *keys) WriteOffered(key, &batch);
    PutAll(&batch);
    CheckpointIfDue();
  }
}

void DiskPages::WriteOffered(const PageKey& key, Batch* batch) {
  const std::vector<SealedValue> values = store_->Sealed(key);
  if (values.empty() && !Holds(key)) Count(&DiskPagesCounters::gone, 1);
  if (values.empty()) return;
  for (size_t i = 0; i + 1 < values.size(); ++i) Add(key, i, values[i], batch);
  if (values.size() > 1) {
    PutAll(batch);
    const auto there = [this](const SealedValue& value) { return Holds(value.key); };
    if (!std::all_of(values.begin(), values.end() - 1, there)) return;
  }
  Add(key, values.size() - 1, values.back(), batch);
}

void DiskPages::Add(const PageKey& offered, size_t i, const SealedValue& value, Batch* batch) {
  if (!value.changed && Holds(value.key)) return store_->NoteStored({&value.key, 1});
  DiskPut put{NameOfKey(value.key), {}, nullptr, {}};
  const auto same = [&put](const DiskPut& other) { return other.key == put.key; };
  uint64_t total = 0;
  for (const uint64_t bytes : value.sizes) total += WholeBlocks(bytes);
  const bool full = !batch->puts.empty() && batch->bytes + total > kPutBytes;
  if (full || std::any_of(batch->puts.begin(), batch->puts.end(), same)) PutAll(batch);
  const std::shared_ptr<std::byte> memory = Aligned(total);
  std::vector<std::span<std::byte>> to;
  uint64_t at = 0;
  for (const uint64_t bytes : value.sizes) {
    to.emplace_back(memory.get() + at, bytes);
    at += WholeBlocks(bytes);
  }
  if (!store_->CopySealed(offered, i, to)) return Count(&DiskPagesCounters::gone, 1);
  put.buffers.assign(to.begin(), to.end());
  put.keep = memory;
  if (value.changed) batch->changed.push_back(put.key);
  batch->puts.push_back(std::move(put));
  batch->bytes += total;
}

void DiskPages::PutAll(Batch* batch) {
  std::vector<DiskPut> puts = std::move(batch->puts);
  const std::vector<std::string> changed = std::move(batch->changed);
  *batch = {};
  if (puts.empty()) return;
  const Deadline deadline = Clock::now() + kPutTimeout;
  // What cannot be erased stays as it was put: no later value takes its place.
  if (const Status erased = disk_->Erase(changed, deadline); !erased.ok()) {
    LogStatus(&write_log_, "disk_erase_failed", erased);
  }
  disk_->Put(puts, deadline);
  uint64_t written = 0;
  std::vector<PageKey> stored;
  for (DiskPut& put : puts) {
    if (put.status.reason() == "DISK_FULL") PutInPlaceOfOthers(&put, deadline);
    written += put.status.ok();
    if (put.status.ok()) std::ranges::copy(put.key, stored.emplace_back().begin());
    if (!put.status.ok()) LogStatus(&write_log_, "disk_write_failed", put.status);
  }
  store_->NoteStored(stored);
  if (written != 0 && !std::exchange(unsaved_, true)) {
    checkpoint_at_ = Clock::now() + options_.checkpoint_interval;
  }
  Count(&DiskPagesCounters::written, written);
  Count(&DiskPagesCounters::failed, puts.size() - written);
}

void DiskPages::CheckpointIfDue() {
  if (!unsaved_ || options_.checkpoint_interval.count() == 0) return;
  if (Clock::now() < checkpoint_at_) return;
  unsaved_ = false;
  const Status status = disk_->Checkpoint(Clock::now() + kCheckpointTimeout);
  if (!status.ok()) return LogStatus(&write_log_, "disk_checkpoint_failed", status);
  Count(&DiskPagesCounters::checkpoints, 1);
}

void DiskPages::PutInPlaceOfOthers(DiskPut* put, Deadline deadline) {
  std::vector<uint64_t> sizes;
  for (const auto& buffer : put->buffers) sizes.push_back(buffer.size());
  const std::vector<std::string> victims = disk_->Victims(sizes);
  if (const Status erased = disk_->Erase(victims, deadline); !erased.ok()) {
    put->status = erased;
    return;
  }
  Count(&DiskPagesCounters::evicted, victims.size());
  disk_->Put({put, 1}, deadline);
}

// --- pins ----------------------------------------------------------------------------------------

Status DiskPages::Pin(const PrefixPin& pin) {
  disk_->Pin(NamesOf(pin));
  const Deadline deadline = Clock::now() + kPutTimeout;
  DiskPut record = EncodePin(pin);
  disk_->Put({&record, 1}, deadline);
  if (record.status.reason() == "DISK_FULL") PutInPlaceOfOthers(&record, deadline);
  KVS_RETURN_IF_ERROR(record.status);
  return disk_->Flush(deadline);
}

Status DiskPages::Unpin(const PrefixPin& pin, bool forget) {
  disk_->Unpin(NamesOf(pin));
  return forget ? ErasePin(disk_, pin.id, Clock::now() + kPutTimeout) : OkStatus();
}

// --- reading -------------------------------------------------------------------------------------

bool DiskPages::Holds(const PageKey& key) const {
  return disk_->Contains({reinterpret_cast<const char*>(key.data()), key.size()});
}

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

void DiskPages::Read() {
  for (;;) {
    Request request;
    {
      std::unique_lock<std::mutex> lock(mu_.native());
      const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
        return stopping_ || !requests_.empty();
      };
      asked_.wait(lock, ready);
      const bool ended = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return requests_.empty(); }();
      if (ended) return;
      [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
        request = std::move(requests_.front());
        requests_.pop_front();
      }();
    }
    ReadPrefix(request);
    request.load.done();
  }
}

// Of the first keys, as many as a batch takes; at least one.
std::vector<DiskGet> DiskPages::PlanReads(std::span<const PageKey> keys) const {
  std::vector<DiskGet> gets;
  uint64_t total = 0;
  for (const PageKey& key : keys) {
    std::vector<uint64_t> sizes = disk_->Sizes(NameOfKey(key));
    // What left meanwhile is asked for all the same, and missed.
    if (sizes.empty()) sizes.push_back(kAlignment);
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += WholeBlocks(size);
    if (!gets.empty() && total + bytes > kGetBytes) break;
    total += bytes;
    const std::shared_ptr<std::byte> memory = Aligned(bytes);
    DiskGet get{NameOfKey(key), {}, memory, {}};
    uint64_t at = 0;
    for (const uint64_t size : sizes) {
      get.buffers.emplace_back(memory.get() + at, size);
      at += WholeBlocks(size);
    }
    gets.push_back(std::move(get));
  }
  return gets;
}

void DiskPages::ReadPrefix(const Request& request) {
  const std::span<const PageKey> keys = request.load.keys;
  bool more = true;
  for (size_t first = 0; first < keys.size() && more && !stopping();) {
    if (Clock::now() >= request.deadline) return Count(&DiskPagesCounters::late_loads, 1);
    std::vector<DiskGet> gets = PlanReads(keys.subspan(first));
    disk_->Get(gets, request.deadline);
    std::vector<LoadedValue> values;
    uint64_t read = 0, late = 0;
    for (const DiskGet& get : gets) {
      values.emplace_back();
      if (get.status.ok()) values.back().assign(get.buffers.begin(), get.buffers.end());
      read += get.status.ok();
      late += get.status.code() == Code::kDeadlineExceeded;
      if (!get.status.ok()) LogStatus(&read_log_, "disk_read_failed", get.status);
    }
    Count(&DiskPagesCounters::read, read);
    Count(&DiskPagesCounters::late_loads, late != 0);
    more = request.load.take(first, values);
    first += gets.size();
  }
}

}  // namespace kvstrata
