#include "server/work/tier_pages.h"

#include <pthread.h>

#include <string>
#include <utility>

#include "server/tier/blocking_calls.h"
#include "server/work/pin_records.h"
#include "server/work/tier_buffers.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBufferBytes = uint64_t{64} << 20;  // more than that is of the heap

// Of all that a pin keeps, its own record too.
std::vector<std::string> NamesOf(const PrefixPin& pin) {
  std::vector<std::string> names = {PinRecordName(pin.id)};
  for (const PageKey& key : pin.pages) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.index_blocks) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.artefact) names.push_back(TierNameOf(key));
  return names;
}

}  // namespace

TierPages::TierPages(const TierPagesOptions& options, Store* store, ValueTier* tier,
                     TierHooks hooks)
    : options_(options),
      store_(store),
      tier_(tier),
      hooks_(std::move(hooks)),
      buffers_(kBufferBytes),
      loads_(options.loads, tier, &buffers_, [this] { scrubs_.Wake(); }),
      scrubs_(
          store, tier, &buffers_, [this] { return loads_.idle(); }, options.loads.load_timeout) {
  if (hooks_.add_memory) {
    const Status added =
        hooks_.add_memory(buffers_.memory(), buffers_.bytes(), Clock::now() + kPutTimeout);
    if (!added.ok()) log_.Warn("tier_buffers_unregistered", added);
  }
  writer_ = std::thread([this] { Write(); });
  pthread_setname_np(writer_.native_handle(), "kvs-tier-write");
  store_->SetPageTier(this);
}

TierPages::~TierPages() {
  Stop(Clock::now(), 0);
  store_->SetPageTier(nullptr);
}

void TierPages::Stop(Deadline deadline, uint64_t most_bytes) {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    stopping_ = true;
    stop_deadline_ = deadline;
    stop_bytes_ = most_bytes;
  }
  offered_.notify_all();
  scrubs_.Refuse();
  loads_.Cancel();
  WaitUntilWritten(deadline);
  end_writes_.request_stop();
  writer_.join();
  scrubs_.Stop();
  loads_.Await();
}

void TierPages::WaitUntilWritten(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mu_.native());
  ended_.wait_until(lock, deadline,
                    [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return written_out_; });
}

bool TierPages::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

TierPagesCounters TierPages::counters() const {
  const TierLoadsCounters loads = loads_.counters();
  MutexLock lock(mu_);
  TierPagesCounters all = counters_;
  static_cast<TierLoadsCounters&>(all) = loads;
  return all;
}

size_t TierPages::waiting() const {
  MutexLock lock(mu_);
  return offers_.size() + writing_;
}

void TierPages::Count(uint64_t TierPagesCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

bool TierPages::Holds(const PageKey& key) const {
  TierProbe probe{{reinterpret_cast<const char*>(key.data()), key.size()}, {}};
  tier_->Probe({&probe, 1}, {{}, {}, [] {}});  // known at once, or not
  return !probe.sizes.empty();
}

Status TierPages::Pin(const PrefixPin& pin) {
  if (hooks_.pin) hooks_.pin(NamesOf(pin));
  TierPut record = EncodePin(pin);
  PutAndWait(tier_, {&record, 1}, Clock::now() + kPutTimeout, {}, true);
  return record.status;
}

Status TierPages::Unpin(const PrefixPin& pin, bool forget) {
  if (hooks_.unpin) hooks_.unpin(NamesOf(pin));
  return forget ? ErasePin(tier_, pin.id, Clock::now() + kPutTimeout) : OkStatus();
}

}  // namespace kvstrata
