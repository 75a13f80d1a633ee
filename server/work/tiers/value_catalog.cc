// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/value_catalog.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "server/tier/blocking_calls.h"
#include "server/tier/tier_buffers.h"
#include "server/work/tiers/pin_records.h"

namespace kvstrata {
namespace {

constexpr size_t kLooks = 65536;    // records and slots of one list
constexpr size_t kLookBatch = 256;  // those looked at under one lock
constexpr std::chrono::seconds kGetTimeout{10};

// One list: a walk over memory's records, its artefacts, and the disk's slots.
class Walk {
 public:
  Walk(Store* store, ValueTier* tier, const ChunkValues* chunks, uint64_t after)
      : store_(store), tier_(tier), chunks_(chunks) {
    const auto phase = static_cast<Phase>(after >> kPhaseShift);
    Enter(phase);
    if (phase_ == phase) at_ = after & ((uint64_t{1} << kPhaseShift) - 1);
  }

  bool ended() const { return phase_ == kEnd; }
  // Where the next list goes on.
  uint64_t position() const { return ended() ? 0 : uint64_t{phase_} << kPhaseShift | at_; }

  // The values of the next `n` records or slots.
  std::vector<ValueInfo> Next(size_t n) {
    switch (phase_) {
      case kPages:
        return Pages(n);
      case kArtefacts:
        return Artefacts(n);
      case kChunks:
        return Chunks(n);
      case kDisk:
        return OnDisk(n);
      case kEnd:
        break;
    }
    return {};
  }

 private:
  enum Phase : uint8_t { kPages, kArtefacts, kChunks, kDisk, kEnd };
  static constexpr int kPhaseShift = 62;

  void Enter(Phase phase) {
    if (phase == kChunks && chunks_->list == nullptr) phase = kDisk;
    phase_ = phase == kDisk && tier_ == nullptr ? kEnd : phase;
    at_ = 0;
  }

  std::vector<ValueInfo> Pages(size_t n) {
    std::vector<ValueInfo> found = store_->values().PageValues(&at_, n);
    if (at_ == kNoMoreValues) Enter(kArtefacts);
    NoteDisk(&found);
    return found;
  }

  std::vector<ValueInfo> Artefacts(size_t n) {
    std::vector<ValueInfo> all = store_->values().ArtefactValues();
    const size_t first = std::min<size_t>(at_, all.size());
    const size_t last = std::min(all.size(), first + n);
    std::vector<ValueInfo> found(all.begin() + static_cast<ptrdiff_t>(first),
                                 all.begin() + static_cast<ptrdiff_t>(last));
    at_ = last;
    if (last == all.size()) Enter(kChunks);
    NoteDisk(&found);
    return found;
  }

  std::vector<ValueInfo> Chunks(size_t n) {
    std::vector<ValueInfo> found = chunks_->list(&at_, n);
    if (at_ == kNoMoreValues) Enter(kDisk);
    NoteDisk(&found);
    return found;
  }

  void NoteDisk(std::vector<ValueInfo>* found) const {
    for (ValueInfo& value : *found) {
      if (tier_ != nullptr && !KnownSizes(tier_, value.key).empty())
        value.tiers.push_back(Tier::kDisk);
    }
  }

  std::vector<ValueInfo> OnDisk(size_t n) {
    if (!known_) LearnDisk();
    std::vector<ValueInfo> found;
    TierWalk walk{at_, n, {}, {}};
    // A tier that cannot be walked shows nothing more.
    const Status walked = WalkOn(tier_, &walk, std::chrono::steady_clock::now() + kGetTimeout);
    at_ = walked.ok() ? walk.cursor : kWalkEnd;
    for (const TierValue& value : walk.values) {
      PageKey key{};
      const bool page_key = value.key.size() == key.size();
      if (page_key) std::ranges::copy(value.key, key.begin());
      if (IsChunkKey(value.key) && chunks_->has && chunks_->has(value.key)) continue;
      if (artefacts_.contains(value.key) || (page_key && store_->values().HoldsPage(key))) continue;
      found.push_back(InfoOf(value));
    }
    if (at_ == kWalkEnd) Enter(kEnd);
    return found;
  }

  // What tells kinds on disk apart, once a list.
  void LearnDisk() {
    known_ = true;
    for (const ValueInfo& value : store_->values().ArtefactValues()) artefacts_.insert(value.key);
    for (const ModelInfo& model : store_->inspection().Models()) {
      const auto bytes = static_cast<uint64_t>(model.desc.geometry.page_bytes());
      models_.emplace(WholeBlocks(bytes), model.desc);
    }
    for (const PinInfo& pin : store_->pins().Pins()) {
      pins_.emplace(PinRecordName(pin.pin.id), pin);
      for (const PageKey& key : pin.pin.pages) pinned_.insert(TierNameOf(key));
      for (const PageKey& key : pin.pin.index_blocks) pinned_.insert(TierNameOf(key));
    }
  }

  ValueInfo InfoOf(const TierValue& value) const {
    ValueInfo info;
    info.key = value.key;
    for (const uint64_t size : value.sizes) info.bytes += size;
    info.tiers = {Tier::kDisk};
    info.pinned = pinned_.contains(value.key);
    const auto fits = models_.equal_range(value.sizes.front());
    if (IsChunkKey(value.key)) {
      info.kind = ValueKind::kChunk;
    } else if (value.key.size() != sizeof(PageKey)) {
      info.kind = ValueKind::kPin;
      const auto pin = pins_.find(value.key);
      if (pin == pins_.end()) return info;
      info.model = pin->second.pin.model_name;
      info.tokens = pin->second.pin.tokens();
    } else if (value.sizes.size() == 1 && info.bytes % kValueAlignment != 0) {
      info.kind = ValueKind::kRecord;  // all others are whole blocks
    } else if (value.sizes.size() == 2 || fits.first != fits.second) {
      info.kind = ValueKind::kPage;  // none but pages have a series beside them
    }
    if (info.kind == ValueKind::kPage && std::distance(fits.first, fits.second) == 1) {
      info.model = fits.first->second.name;
      info.tokens = static_cast<uint32_t>(fits.first->second.geometry.page_tokens);
    }
    return info;
  }

  Store* const store_;
  ValueTier* const tier_;
  const ChunkValues* const chunks_;
  Phase phase_ = kPages;
  uint64_t at_ = 0;
  bool known_ = false;
  std::set<std::string> artefacts_, pinned_;   // keys
  std::multimap<uint64_t, ModelDesc> models_;  // by bytes of a page
  std::map<std::string, PinInfo> pins_;        // by the name of the record
};

bool Passes(const ValueFilter& filter, const ValueInfo& value) {
  const auto there = [&filter](Tier tier) { return NameOf(tier) == filter.tier; };
  if (!filter.model.empty() && value.model != filter.model) return false;
  return filter.tier.empty() || std::ranges::any_of(value.tiers, there);
}

Status Unknown() {
  return NotFound("VALUE_UNKNOWN", "neither memory nor the disk has anything under this key");
}

bool SameBytes(const std::vector<std::byte>& memory, std::span<const std::byte> disk) {
  return std::ranges::equal(memory, disk);
}

}  // namespace

ValueList ValueCatalog::List(const ValueFilter& filter, uint64_t after, size_t limit) const {
  Walk walk(store_, tier_, &chunks_, after);
  ValueList list;
  for (size_t looks = 0; looks < kLooks && list.values.size() < limit && !walk.ended();) {
    const size_t n = std::min(kLookBatch, limit - list.values.size());
    for (ValueInfo& value : walk.Next(n)) {
      if (Passes(filter, value)) list.values.push_back(std::move(value));
    }
    looks += n;
  }
  list.next = walk.position();
  return list;
}

Result<ValueBytes> ValueCatalog::InMemory(const std::string& name) const {
  if (IsChunkKey(name)) return chunks_.get ? chunks_.get(name) : Unknown();
  PageKey key{};
  if (name.size() != key.size()) return Unknown();
  std::ranges::copy(name, key.begin());
  return store_->values().CopyValue(key);
}

Result<ValueBytes> ValueCatalog::Get(const std::string& key) const {
  Result<ValueBytes> memory = InMemory(key);
  if (memory.status().reason() != "VALUE_UNKNOWN") return memory;
  const ValueSizes sizes = tier_ != nullptr ? KnownSizes(tier_, key) : ValueSizes();
  if (sizes.empty()) return Unknown();
  TierGet get = NewTierGet(key, sizes.all(), nullptr);
  get.inspects = true;
  GetAndWait(tier_, {&get, 1}, std::chrono::steady_clock::now() + kGetTimeout);
  if (get.status.code() == Code::kNotFound) return Unknown();
  KVS_RETURN_IF_ERROR(get.status);
  ValueBytes bytes;
  bytes.from = Tier::kDisk;
  for (const auto& buffer : get.buffers) bytes.buffers.emplace_back(buffer.begin(), buffer.end());
  return bytes;
}

Result<ValueVerdict> ValueCatalog::Verify(const std::string& key) const {
  ValueVerdict verdict;
  const Result<ValueBytes> memory = InMemory(key);
  if (!memory.ok() && memory.status().reason() != "VALUE_UNKNOWN") return memory.status();
  if (memory.ok()) verdict.tiers.push_back(memory->from);
  verdict.state = memory.ok() ? ValueState::kUnchecked : ValueState::kGone;
  const ValueSizes sizes = tier_ != nullptr ? KnownSizes(tier_, key) : ValueSizes();
  if (sizes.empty()) return verdict;
  TierGet get = NewTierGet(key, sizes.all(), nullptr);
  get.inspects = true;
  GetAndWait(tier_, {&get, 1}, std::chrono::steady_clock::now() + kGetTimeout);
  // Erased, or replaced, since it was asked for.
  const Code code = get.status.code();
  if (code == Code::kNotFound || code == Code::kInvalidArgument) return verdict;
  if (!get.status.ok() && get.status.code() != Code::kDataLoss) return get.status;
  verdict.tiers.push_back(Tier::kDisk);
  verdict.state = get.status.ok() ? ValueState::kSound : ValueState::kCorrupt;
  verdict.detail = get.status.message();
  const bool compare = get.status.ok() && memory.ok() && memory->kind != ValueKind::kRecord;
  if (compare && !SameBytes(memory->buffers.front(), get.buffers.front())) {
    verdict.state = ValueState::kCorrupt;
    verdict.detail =
        "the copies in memory and on disk differ, and the disk's has its checksum: memory is "
        "damaged, or an engine computed it anew with other bits";
  }
  return verdict;
}

}  // namespace kvstrata
