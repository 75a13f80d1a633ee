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

std::vector<PageKey> DiskPages::NextOffers() {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto take = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::vector<PageKey> keys;
    writing_ = 0;
    if (stopping_ && Clock::now() >= stop_deadline_) return keys;
    const auto end = offers_.begin() + static_cast<ptrdiff_t>(std::min(offers_.size(), kPutValues));
    keys.assign(offers_.begin(), end);
    offers_.erase(offers_.begin(), end);
    writing_ = keys.size();
    return keys;
  };
  std::vector<PageKey> keys = take();
  if (!keys.empty()) return keys;
  offered_.wait(lock,
                [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !offers_.empty(); });
  return take();
}

void DiskPages::Write() {
  for (std::vector<PageKey> keys = NextOffers(); !keys.empty(); keys = NextOffers()) {
    for (std::span<const PageKey> left = keys; !left.empty();) {
      std::vector<DiskPut> puts = CopyOut(&left);
      PutAll(puts);
    }
  }
}

std::vector<DiskPut> DiskPages::CopyOut(std::span<const PageKey>* keys) {
  std::vector<std::pair<PageKey, uint64_t>> batch;
  uint64_t total = 0, gone = 0;
  std::vector<PageKey> stored;
  for (; !keys->empty(); *keys = keys->subspan(1)) {
    const PageKey& key = keys->front();
    if (Holds(key)) {
      stored.push_back(key);
      continue;
    }
    const uint64_t bytes = store_->SealedBytes(key);
    gone += bytes == 0;
    if (bytes == 0) continue;
    if (!batch.empty() && total + bytes > kPutBytes) break;
    batch.emplace_back(key, bytes);
    total += bytes;
  }
  std::vector<DiskPut> puts;
  const std::shared_ptr<std::byte> memory = total == 0 ? nullptr : Aligned(total);
  uint64_t at = 0;
  for (const auto& [key, bytes] : batch) {
    const std::span<std::byte> to(memory.get() + at, bytes);
    at += bytes;  // a multiple of 4096, as all pages are
    if (store_->CopySealed(key, to)) {
      puts.push_back({NameOfKey(key), {to}, memory, {}});
    } else {
      ++gone;
    }
  }
  Count(&DiskPagesCounters::gone, gone);
  store_->NoteStored(stored);
  return puts;
}

void DiskPages::PutAll(std::span<DiskPut> puts) {
  if (puts.empty()) return;
  const Deadline deadline = Clock::now() + kPutTimeout;
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
  Count(&DiskPagesCounters::written, written);
  Count(&DiskPagesCounters::failed, puts.size() - written);
}

void DiskPages::PutInPlaceOfOthers(DiskPut* put, Deadline deadline) {
  const std::vector<uint64_t> sizes = {put->buffers.front().size()};
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

bool DiskPages::Load(PrefixLoad load) {
  {
    MutexLock lock(mu_);
    if (stopping_ || requests_.size() >= kMaxLoads) {
      ++counters_.refused_loads;
      return false;
    }
    requests_.push_back({std::move(load), Clock::now() + options_.load_timeout});
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
  std::vector<uint64_t> sizes;
  uint64_t total = 0;
  for (const PageKey& key : keys) {
    const std::vector<uint64_t> buffers = disk_->Sizes(NameOfKey(key));
    // What left meanwhile, or is no page's, is asked for with a size that it has not.
    const uint64_t bytes = buffers.size() == 1 ? buffers.front() : kAlignment;
    if (!sizes.empty() && total + bytes > kGetBytes) break;
    sizes.push_back((bytes + kAlignment - 1) / kAlignment * kAlignment);
    total += sizes.back();
  }
  const std::shared_ptr<std::byte> memory = Aligned(total);
  uint64_t at = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    gets.push_back({NameOfKey(keys[i]), {{memory.get() + at, sizes[i]}}, memory, {}});
    at += sizes[i];
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
    std::vector<std::span<const std::byte>> values;
    uint64_t read = 0, late = 0;
    for (const DiskGet& get : gets) {
      values.push_back(get.status.ok() ? get.buffers.front() : std::span<std::byte>());
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
