// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_pages.h"

#include <string>
#include <utility>

#include "server/tier/blocking_calls.h"
#include "server/tier/tier_buffers.h"
#include "server/work/tiers/pin_records.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPutTimeout{10};
constexpr uint64_t kBufferBytes = uint64_t{64} << 20;  // more than that is of the heap

// The names of all that a pin keeps, its own record too.
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
    : store_(store),
      tier_(tier),
      hooks_(std::move(hooks)),
      buffers_(kBufferBytes),
      loads_(options.loads, tier, &buffers_, [this] { scrubs_.Wake(); }),
      scrubs_(
          store, tier, &buffers_, [this] { return loads_.idle(); }, options.loads.load_timeout),
      writer_(options.writer, store, tier, &buffers_, hooks_.checkpoint) {
  if (hooks_.add_memory) {
    const Status added =
        hooks_.add_memory(buffers_.memory(), buffers_.bytes(), Clock::now() + kPutTimeout);
    if (!added.ok()) log_.Warn("tier_buffers_unregistered", added);
  }
  store_->prefixes().SetPageTier(this);
}

TierPages::~TierPages() {
  Stop(Clock::now(), 0);
  store_->prefixes().SetPageTier(nullptr);
}

void TierPages::Stop(Deadline deadline, uint64_t most_bytes) {
  scrubs_.Refuse();
  loads_.Cancel();
  writer_.Stop(deadline, most_bytes);
  scrubs_.Stop();
  loads_.Await();
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
