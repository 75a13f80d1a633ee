// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_row.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/tier/blocking_calls.h"
#include "server/work/tiers/pin_records.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBufferBytes = uint64_t{64} << 20;  // more than that is of the heap

// The names of all that a pin keeps, its own record too.
std::vector<std::string> NamesOf(const PrefixPin& pin) {
  std::vector<std::string> names = {PinRecordName(pin.id)};
  for (const PageKey& key : pin.pages) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.index_blocks) names.push_back(TierNameOf(key));
  for (const PageKey& key : pin.artefact) names.push_back(TierNameOf(key));
  return names;
}

TierLoadsOptions LoadsOf(const TierRowOptions& options) {
  TierLoadsOptions loads = options.loads;
  loads.path = options.searches ? BytePath::kRemoteToMemory : BytePath::kDiskToMemory;
  loads.timed = options.searches ? Timed::kRemoteLoad : Timed::kDiskLoad;
  return loads;
}

}  // namespace

TierRowOptions TierRowOptions::Far() {
  TierRowOptions options;
  options.searches.emplace();
  options.loads.readers = 4;
  options.loads.load_timeout = std::chrono::seconds(1);
  options.writer.write = TierWrite::kReused;
  options.writer.queue = std::numeric_limits<uint32_t>::max();
  options.writer.queue_bytes = uint64_t{1} << 30;
  options.writer.batch_bytes = uint64_t{16} << 20;
  return options;
}

TierRow::TierRow(const TierRowOptions& options, Store* store, ValueTier* tier, TierHooks hooks,
                 ValueTier* above)
    : tier_(tier),
      hooks_(std::move(hooks)),
      buffers_(kBufferBytes),
      searches_(options.searches ? std::make_unique<TierSearches>(*options.searches, tier)
                                 : nullptr),
      loads_(LoadsOf(options), tier, &buffers_,
             [this] {
               if (scrubs_ != nullptr) scrubs_->Wake();
             }),
      scrubs_(far() ? nullptr
                    : std::make_unique<TierScrubs>(
                          store, tier, &buffers_, [this] { return loads_.idle(); },
                          options.loads.load_timeout)),
      writer_(options.writer, WriterTerms(above), store, tier, &buffers_) {
  if (!hooks_.add_memory) return;
  const Status added =
      hooks_.add_memory(buffers_.memory(), buffers_.bytes(), Clock::now() + kPutTimeout);
  if (!added.ok()) log_.Warn("tier_buffers_unregistered", added);
}

TierRow::~TierRow() { Stop(); }

TierWriterTerms TierRow::WriterTerms(ValueTier* above) {
  if (far()) {
    return {"kvs-remote-write", BytePath::kMemoryToRemote, &searches_->known(), above, {}};
  }
  return {"kvs-tier-write", BytePath::kMemoryToDisk, nullptr, above, hooks_.checkpoint};
}

void TierRow::Stop() {
  if (far()) searches_->Cancel();
  if (!far()) scrubs_->Refuse();
  loads_.Cancel();
  writer_.Stop();
  if (far()) searches_->Await();
  if (!far()) scrubs_->Stop();
  loads_.Await();
}

bool TierRow::Holds(const PageKey& key) const {
  TierProbe probe{{reinterpret_cast<const char*>(key.data()), key.size()}, {}};
  tier_->Probe({&probe, 1}, {{}, {}, [] {}});  // known at once, or not
  return !probe.sizes.empty();
}

bool TierRow::Search(TierSearch search) {
  return far() && searches_->Begin(std::move(search), loads_.bytes_per_second());
}

bool TierRow::Load(TierLoad load) {
  if (!far()) return loads_.Add(std::move(load));
  load.take = [this, keys = load.keys, take = std::move(load.take)](
                  size_t first, std::span<const LoadedValue> values) {
    searches_->NoteLoaded(std::span(keys).subspan(first, values.size()), values);
    return take(first, values);
  };
  return loads_.Add(std::move(load));
}

Status TierRow::Pin(const PrefixPin& pin) {
  if (far()) return OkStatus();
  if (hooks_.pin) hooks_.pin(NamesOf(pin));
  TierPut record = EncodePin(pin);
  PutAndWait(tier_, {&record, 1}, Clock::now() + kPutTimeout, {}, true);
  return record.status;
}

Status TierRow::Unpin(const PrefixPin& pin, bool forget) {
  if (far()) return OkStatus();
  if (hooks_.unpin) hooks_.unpin(NamesOf(pin));
  return forget ? ErasePin(tier_, pin.id, Clock::now() + kPutTimeout) : OkStatus();
}

void TierRow::Configure(const TierRowOptions& options) {
  if (far()) searches_->Configure(*options.searches);
  if (!far()) scrubs_->SetTimeout(options.loads.load_timeout);
  loads_.SetTimeout(options.loads.load_timeout);
  writer_.Configure(options.writer);
}

void TierRow::NotePurged(const PageKey& key) {
  if (far()) searches_->known().present.Erase(key);
}

TierRowCounters TierRow::counters() const {
  TierRowCounters all;
  static_cast<TierWriterCounters&>(all) = writer_.counters();
  static_cast<TierLoadsCounters&>(all) = loads_.counters();
  if (far()) static_cast<TierSearchesCounters&>(all) = searches_->counters();
  return all;
}

}  // namespace kvstrata
