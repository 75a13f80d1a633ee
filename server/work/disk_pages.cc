#include "server/work/disk_pages.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "kernels/codec/extent.h"
#include "server/store/artefact_record.h"
#include "server/work/disk_buffers.h"
#include "server/work/pin_records.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

// Of one batch, but for its first value: the device is idle between two.
constexpr uint64_t kPutBytes = uint64_t{64} << 20;
constexpr uint64_t kGetBytes = uint64_t{64} << 20;
constexpr uint64_t kBufferBytes = uint64_t{64} << 20;  // more than that is of the heap
constexpr size_t kPutValues = 256;
constexpr uint64_t kScrubBytes = uint64_t{4} << 20;  // of a batch, but for its first value
constexpr uint64_t kScrubsPerSecond = 8;             // batches, where the rate is limited
constexpr std::chrono::milliseconds kScrubLook{100};
constexpr size_t kScrubSlots = 256;  // looked at under the tier's lock
constexpr std::chrono::seconds kPutTimeout{10};
constexpr std::chrono::seconds kCheckpointTimeout{60};

// Of all that a pin keeps, its own record too.
std::vector<std::string> NamesOf(const PrefixPin& pin) {
  std::vector<std::string> names = {PinRecordName(pin.id)};
  for (const PageKey& key : pin.pages) names.push_back(DiskNameOf(key));
  for (const PageKey& key : pin.index_blocks) names.push_back(DiskNameOf(key));
  for (const PageKey& key : pin.artefact) names.push_back(DiskNameOf(key));
  return names;
}

Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }

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
    : options_(options), store_(store), disk_(disk), buffers_(kBufferBytes) {
  const Status added =
      disk_->AddMemory(buffers_.memory(), buffers_.bytes(), Clock::now() + kPutTimeout);
  if (!added.ok()) LogStatus(&write_log_, "disk_buffers_unregistered", added);
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

bool DiskPages::ScrubsEnd() const {
  MutexLock lock(mu_);
  return no_scrubs_ || stopping_;
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
    if (drains_ != Drains::kNo) {
      ++counters_.refused;
      return;
    }
    if (stopping_ || offers_.size() >= options_.queue) {
      ++counters_.dropped;
      return;
    }
    offers_.push_back(key);
  }
  offered_.notify_one();
}

Status DiskPages::Drain() {
  {
    MutexLock lock(mu_);
    if (drains_ == Drains::kDrained) return OkStatus();
    if (drains_ == Drains::kFailed && !drain_failed_.ok()) {
      return std::exchange(drain_failed_, OkStatus());
    }
    drains_ = Drains::kDrying;
  }
  offered_.notify_one();
  return OkStatus();
}

bool DiskPages::draining() const {
  MutexLock lock(mu_);
  return drains_ != Drains::kNo;
}

bool DiskPages::drained() const {
  MutexLock lock(mu_);
  return drains_ == Drains::kDrained;
}

bool DiskPages::IsDry() const {
  MutexLock lock(mu_);
  return drains_ == Drains::kDrying && offers_.empty();
}

void DiskPages::EndDrying(const Status& checkpoint) {
  MutexLock lock(mu_);
  // Resumed, and perhaps begun again, meanwhile: what was offered in between comes first.
  if (drains_ != Drains::kDrying || !offers_.empty()) return;
  drains_ = checkpoint.ok() ? Drains::kDrained : Drains::kFailed;
  drain_failed_ = checkpoint;
}

void DiskPages::Resume() {
  {
    MutexLock lock(mu_);
    if (std::exchange(drains_, Drains::kNo) == Drains::kNo) return;
  }
  std::vector<BlockInfo> here = store_->ArtefactBlocks();
  std::erase_if(here, [](const BlockInfo& b) { return b.kind != BlockKind::kRecord; });
  for (uint64_t cursor = 0; cursor != kNoMoreBlocks;) {
    std::ranges::move(store_->Blocks(&cursor, kPutValues), std::back_inserter(here));
    for (const BlockInfo& block : here) {
      PageKey key{};
      std::ranges::copy(block.key, key.begin());
      if (block.changed || !Holds(key)) Offer(key);
    }
    here.clear();
  }
}

std::optional<std::vector<PageKey>> DiskPages::NextOffers() {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    writing_ = 0;
    return stopping_ || !offers_.empty() || drains_ == Drains::kDrying;
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
  DiskPut put{DiskNameOf(value.key), {}, nullptr, {}, true};
  const auto same = [&put](const DiskPut& other) { return other.key == put.key; };
  uint64_t total = 0;
  for (const uint64_t bytes : value.sizes) total += WholeBlocks(bytes);
  const bool full = !batch->puts.empty() && batch->bytes + total > kPutBytes;
  if (full || std::any_of(batch->puts.begin(), batch->puts.end(), same)) PutAll(batch);
  const std::shared_ptr<std::byte> memory = buffers_.Take(total);
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
  const bool dry = IsDry();
  const bool timed = unsaved_ && options_.checkpoint_interval.count() != 0;
  if (!dry && !(timed && Clock::now() >= checkpoint_at_)) return;
  unsaved_ = false;
  const Status status = disk_->Checkpoint(Clock::now() + kCheckpointTimeout);
  if (dry) EndDrying(status);
  if (!status.ok()) return LogStatus(&write_log_, "disk_checkpoint_failed", status);
  Count(&DiskPagesCounters::checkpoints, 1);
}

Result<uint64_t> DiskPages::Resize(uint64_t budget_bytes) {
  KVS_ASSIGN_OR_RETURN(const uint64_t left,
                       disk_->Resize(budget_bytes, Clock::now() + kPutTimeout));
  Count(&DiskPagesCounters::evicted, left);
  const Status saved = disk_->Checkpoint(Clock::now() + kCheckpointTimeout);
  LogLimiter once{1};
  if (!saved.ok()) LogStatus(&once, "disk_checkpoint_failed", saved);
  return left;
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

DiskPages::Task DiskPages::NextTask() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> Task {
    for (;;) {
      const bool scrubs = scrub_ != nullptr;
      if (!requests_.empty()) {
        Task task{std::move(requests_.front()), nullptr};
        requests_.pop_front();
        return task;
      }
      const bool due = scrubs && Clock::now() >= scrub_->next_look;
      if (scrubs && (due || no_scrubs_ || stopping_)) return {std::nullopt, scrub_.get()};
      if (stopping_) return {};
      if (scrubs) {
        asked_.wait_until(lock, scrub_->next_look);
      } else {
        asked_.wait(lock);
      }
    }
  }();
}

void DiskPages::Read() {
  for (;;) {
    Task task = NextTask();
    if (task.load) {
      ReadPrefix(*task.load);
      task.load->load.done();
    } else if (task.scrub != nullptr) {
      GoOnScrubbing(task.scrub);
    } else {
      return;
    }
  }
}

// Of the first keys, as many as a batch takes; at least one.
std::vector<DiskGet> DiskPages::PlanReads(std::span<const PageKey> keys) {
  std::vector<DiskGet> gets;
  uint64_t total = 0;
  for (const PageKey& key : keys) {
    std::vector<uint64_t> sizes = disk_->Sizes(DiskNameOf(key));
    // What left meanwhile is asked for all the same, and missed.
    if (sizes.empty()) sizes.push_back(kDiskAlignment);
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += WholeBlocks(size);
    if (!gets.empty() && total + bytes > kGetBytes) break;
    total += bytes;
    gets.push_back(NewDiskGet(DiskNameOf(key), sizes, &buffers_));
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

// --- scrubbing -----------------------------------------------------------------------------------

Status DiskPages::Scrub(TierScrub scrub) {
  {
    MutexLock lock(mu_);
    if (no_scrubs_ || stopping_) return Stopping();
    if (scrub_ != nullptr) {
      return {Code::kFailedPrecondition, "SCRUB_RUNNING", "another scrub of the disk runs"};
    }
    scrub_ = std::make_unique<Scrubbing>();
    scrub_->scrub = std::move(scrub);
  }
  asked_.notify_one();
  return OkStatus();
}

void DiskPages::EndScrubs() {
  {
    MutexLock lock(mu_);
    no_scrubs_ = true;
  }
  asked_.notify_one();
}

void DiskPages::EndScrub(const Status& why) {
  std::unique_ptr<Scrubbing> ended;
  {
    MutexLock lock(mu_);
    ended = std::move(scrub_);
  }
  ended->scrub.done(why);
}

bool DiskPages::PlanScrub(const DiskTier& disk, DiskBuffers* buffers, Scrubbing* scrub,
                          std::vector<DiskGet>* gets) {
  const uint64_t rate = scrub->scrub.bytes_per_second;
  const uint64_t most = rate == 0 ? kScrubBytes : std::min(kScrubBytes, rate / kScrubsPerSecond);
  for (uint64_t bytes = 0;;) {
    while (scrub->ahead.empty() && scrub->cursor != kNoMoreSlots) {
      for (DiskValue& value : disk.Scan(&scrub->cursor, kScrubSlots)) {
        scrub->ahead.push_back(std::move(value));
      }
    }
    if (scrub->ahead.empty()) return false;
    const DiskValue& value = scrub->ahead.front();
    for (const uint64_t size : value.sizes) bytes += WholeBlocks(size);
    if (!gets->empty() && bytes > most) return true;
    gets->push_back(NewDiskGet(value.key, value.sizes, buffers));
    gets->back().inspects = true;
    scrub->ahead.pop_front();
  }
}

void DiskPages::NoteParts(const DiskGet& get, Scrubbing* scrub) {
  if (get.buffers.size() != 1 || get.key.size() != sizeof(PageKey)) return;
  const std::span<const std::byte> bytes = get.buffers.front();
  ExtentHeader header{};
  if (bytes.size() >= sizeof(header)) std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic == kExtentMagic && header.version == kExtentVersion) {
    scrub->parts.insert(get.key);
    return;
  }
  const std::optional<ArtefactRecord> record = ParseRecord(bytes);
  if (!record) return;
  PageKey artefact{};
  std::ranges::copy(get.key, artefact.begin());
  for (size_t i = 0; i < record->parts.size(); ++i) {
    scrub->named.insert(DiskNameOf(PartKey(artefact, i, record->parts[i])));
  }
}

void DiskPages::EraseOrphans(Scrubbing* scrub) {
  for (const BlockInfo& block : store_->ArtefactBlocks()) scrub->named.insert(block.key);
  std::vector<std::string> orphans;
  std::ranges::copy_if(scrub->parts, std::back_inserter(orphans),
                       [scrub](const std::string& key) { return !scrub->named.contains(key); });
  // A record that was written behind the scrub's back loses parts here: it is built again then.
  const Status erased = disk_->Erase(orphans, Clock::now() + kPutTimeout);
  if (!erased.ok()) return LogStatus(&read_log_, "disk_erase_failed", erased);
  scrub->so_far.orphans = orphans.size();
}

std::optional<Status> DiskPages::ScrubBatch(Scrubbing* scrub) {
  std::vector<DiskGet> gets;
  const auto began = Clock::now();
  const bool more = PlanScrub(*disk_, &buffers_, scrub, &gets);
  disk_->Get(gets, began + options_.load_timeout);
  uint64_t bytes = 0;
  for (const DiskGet& get : gets) {
    if (get.status.code() == Code::kUnavailable) return get.status;
    const bool lost = get.status.code() == Code::kDataLoss;
    scrub->so_far.late += get.status.code() == Code::kDeadlineExceeded;
    scrub->so_far.corrupt += lost;
    if (lost) LogStatus(&read_log_, "disk_scrub_corrupt", get.status);
    if (!get.status.ok() && !lost) continue;  // erased or replaced meanwhile, or late
    ++scrub->so_far.values;
    for (const auto& buffer : get.buffers) bytes += buffer.size();
    if (!lost) NoteParts(get, scrub);
  }
  scrub->so_far.bytes += bytes;
  if (!more) {
    EraseOrphans(scrub);
    return OkStatus();
  }
  const uint64_t rate = scrub->scrub.bytes_per_second;
  if (rate == 0) return std::nullopt;
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / static_cast<double>(rate));
  scrub->next_batch = began + std::chrono::duration_cast<Clock::duration>(takes);
  return std::nullopt;
}

void DiskPages::GoOnScrubbing(Scrubbing* scrub) {
  if (ScrubsEnd()) return EndScrub(Stopping());
  std::optional<Status> ended;
  if (Clock::now() >= scrub->next_batch) ended = ScrubBatch(scrub);
  const bool wanted = scrub->scrub.progress(scrub->so_far);
  if (ended) return EndScrub(*ended);
  if (!wanted) return EndScrub({Code::kAborted, "SCRUB_CANCELLED", "who asked for it went away"});
  scrub->next_look = std::min(scrub->next_batch, Clock::now() + kScrubLook);
}

}  // namespace kvstrata
