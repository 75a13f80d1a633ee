#include "server/work/disk_pages.h"

#include <pthread.h>

#include <string>
#include <system_error>

#include "server/work/pin_records.h"
#include "server/work/tier_buffers.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBufferBytes = uint64_t{64} << 20;  // more than that is of the heap
constexpr std::chrono::seconds kCheckpointTimeout{60};

// Of all that a pin keeps, its own record too.
std::vector<std::string> NamesOf(const PrefixPin& pin) {
  std::vector<std::string> names = {PinRecordName(pin.id)};
  for (const PageKey& key : pin.pages) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.index_blocks) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.artefact) names.push_back(TierNameOf(key));
  return names;
}

}  // namespace

DiskPages::DiskPages(const DiskPagesOptions& options, Store* store, DiskTier* disk)
    : options_(options), store_(store), disk_(disk), buffers_(kBufferBytes) {
  const Status added =
      disk_->AddMemory(buffers_.memory(), buffers_.bytes(), Clock::now() + kPutTimeout);
  if (!added.ok()) write_log_.Warn("disk_buffers_unregistered", added);
  writer_ = std::thread([this] { Write(); });
  try {
    for (uint32_t i = 0; i < options_.readers; ++i) readers_.emplace_back([this] { Read(); });
  } catch (const std::system_error&) {
    Stop(Clock::now(), 0);  // those that there are
    throw;
  }
  pthread_setname_np(writer_.native_handle(), "kvs-disk-write");
  for (std::thread& reader : readers_) pthread_setname_np(reader.native_handle(), "kvs-disk-read");
  store_->SetPageTier(this);
}

DiskPages::~DiskPages() {
  Stop(Clock::now(), 0);
  store_->SetPageTier(nullptr);
}

void DiskPages::Stop(Deadline deadline, uint64_t most_bytes) {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    stopping_ = true;
    stop_deadline_ = deadline;
    stop_bytes_ = most_bytes;
  }
  offered_.notify_all();
  asked_.notify_all();
  for (std::thread& reader : readers_) reader.join();
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

bool DiskPages::Holds(const PageKey& key) const {
  return disk_->Contains({reinterpret_cast<const char*>(key.data()), key.size()});
}

Result<uint64_t> DiskPages::Resize(uint64_t budget_bytes) {
  KVS_ASSIGN_OR_RETURN(const uint64_t left,
                       disk_->Resize(budget_bytes, Clock::now() + kPutTimeout));
  Count(&DiskPagesCounters::evicted, left);
  const Status saved = disk_->Checkpoint(Clock::now() + kCheckpointTimeout);
  if (!saved.ok()) write_log_.Warn("disk_checkpoint_failed", saved);
  return left;
}

Status DiskPages::Pin(const PrefixPin& pin) {
  disk_->Pin(NamesOf(pin));
  const Deadline deadline = Clock::now() + kPutTimeout;
  TierPut record = EncodePin(pin);
  disk_->Put({&record, 1}, deadline);
  if (record.status.reason() == "DISK_FULL") PutInPlaceOfOthers(&record, deadline);
  KVS_RETURN_IF_ERROR(record.status);
  return disk_->Flush(deadline);
}

Status DiskPages::Unpin(const PrefixPin& pin, bool forget) {
  disk_->Unpin(NamesOf(pin));
  return forget ? ErasePin(disk_, pin.id, Clock::now() + kPutTimeout) : OkStatus();
}

}  // namespace kvstrata
