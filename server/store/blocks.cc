// Values for operators: lists by turns, and copies. The lock is held for 256 records, or for one
// artefact, at a time.
#include "server/store/blocks.h"

#include <algorithm>
#include <utility>

#include "server/store/artefact_record.h"
#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

constexpr size_t kUnderLock = 256;  // records

std::string NameOfKey(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

Residence ResidenceOf(const Page& page) {
  return page.arena->tier == Tier::kDevice ? Residence::kDevice : Residence::kHost;
}

}  // namespace

std::string_view NameOf(BlockKind kind) {
  constexpr std::string_view kNames[] = {"", "page", "index", "record", "part", "pin"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view NameOf(BlockState state) {
  constexpr std::string_view kNames[] = {"sound", "corrupt", "gone", "unchecked"};
  return kNames[static_cast<size_t>(state)];
}

BlockInfo Store::Impl::InfoOfBlock(const Page& page) const {
  BlockInfo info;
  info.key = NameOfKey(page.key);
  info.kind = page.summary ? BlockKind::kIndex : BlockKind::kPage;
  if (const auto model = models_.find(page.model); model != models_.end()) {
    const ModelDesc& desc = model->second->desc;
    info.model = desc.name;
    if (!page.summary) info.tokens = static_cast<uint32_t>(desc.geometry.page_tokens);
  }
  info.bytes = page.bytes;
  info.tiers = {ResidenceOf(page)};
  info.pinned = page.pinned;
  info.changed = page.series_changed;
  return info;
}

std::vector<BlockInfo> Store::Impl::Blocks(uint64_t* cursor, size_t records) const {
  std::vector<BlockInfo> found;
  for (const uint64_t last = *cursor + records; *cursor < last;) {
    MutexLock lock(mu_);
    const auto& all = pools_.records();
    const uint64_t end = std::min({last, *cursor + kUnderLock, uint64_t{all.size()}});
    for (; *cursor < end; ++*cursor) {
      if (all[*cursor].indexed && !all[*cursor].replica) found.push_back(InfoOfBlock(all[*cursor]));
    }
    if (*cursor >= all.size()) *cursor = kNoMoreBlocks;
  }
  return found;
}

std::vector<PageKey> Store::Impl::ArtefactKeys() const {
  MutexLock lock(mu_);
  std::vector<PageKey> keys;
  for (const Artefact& artefact : artefacts_.all()) keys.push_back(artefact.key);
  return keys;
}

std::vector<ArtefactRecord::Part> Store::Impl::PartsOf(const PageKey& key,
                                                       BlockInfo* record) const {
  std::vector<ArtefactRecord::Part> parts;
  MutexLock lock(mu_);
  const Artefact* artefact = artefacts_.Peek(key);
  if (artefact == nullptr) return parts;
  for (const Extent& e : artefact->extents) {
    parts.push_back({e.bytes, e.checksum, e.tokens, e.page->arena->tier});
  }
  record->key = NameOfKey(key);
  record->kind = BlockKind::kRecord;
  record->tokens = artefact->prompt_tokens;
  record->tiers = {Residence::kHost};  // in the daemon's own memory, of no pool
  const auto model = models_.find(artefact->extents.front().page->model);
  if (model != models_.end()) record->model = model->second->desc.name;
  return parts;
}

std::vector<BlockInfo> Store::Impl::ArtefactBlocks() const {
  std::vector<BlockInfo> found;
  for (const PageKey& key : ArtefactKeys()) {
    BlockInfo record;
    const std::vector<ArtefactRecord::Part> parts = PartsOf(key, &record);
    if (parts.empty()) continue;
    found.push_back(record);
    for (size_t i = 0; i < parts.size(); ++i) {
      BlockInfo& part = found.emplace_back();
      part.key = NameOfKey(PartKey(key, i, parts[i]));
      part.kind = BlockKind::kPart;
      part.model = record.model;
      part.tokens = static_cast<uint32_t>(parts[i].tokens.end - parts[i].tokens.begin);
      part.bytes = parts[i].bytes;
      part.tiers = {parts[i].tier == Tier::kDevice ? Residence::kDevice : Residence::kHost};
    }
  }
  return found;
}

bool Store::Impl::HoldsBlock(const PageKey& key) const {
  MutexLock lock(mu_);
  return prefix_.Find(key) != nullptr;
}

Page* Store::Impl::PinPart(const PageKey& wanted, RecompressJob* pin) {
  for (const PageKey& key : ArtefactKeys()) {
    BlockInfo record;
    const std::vector<ArtefactRecord::Part> parts = PartsOf(key, &record);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (PartKey(key, i, parts[i]) != wanted) continue;
      MutexLock lock(mu_);
      const Artefact* artefact = artefacts_.Peek(key);
      const bool same = artefact != nullptr && i < artefact->extents.size() &&
                        artefact->extents[i].checksum == parts[i].checksum;
      if (!same) return nullptr;  // built anew meanwhile
      *pin = PinForCopy(artefact->extents[i].page);
      return artefact->extents[i].page;
    }
  }
  return nullptr;
}

Result<BlockBytes> Store::Impl::CopyBlock(const PageKey& key) {
  BlockBytes copy;
  RecompressJob pin;
  Page* page = nullptr;
  std::vector<std::byte> series;
  {
    MutexLock lock(mu_);
    page = prefix_.Find(key);
    if (page != nullptr) {
      copy.kind = page->summary ? BlockKind::kIndex : BlockKind::kPage;
      copy.changed = page->series_changed;
      if (page->series != nullptr) series = page->series->Encode();
      pin = PinForCopy(page);
    } else if (const Artefact* artefact = artefacts_.Peek(key); artefact != nullptr) {
      return BlockBytes{
          Residence::kHost, BlockKind::kRecord, {EncodeRecord(RecordOf(*artefact))}, true};
    }
  }
  if (page == nullptr) {
    page = PinPart(key, &pin);
    copy.kind = BlockKind::kPart;
  }
  if (page == nullptr) return NotFound("BLOCK_UNKNOWN", "memory has nothing under this key");
  copy.from = ResidenceOf(*page);
  copy.buffers.emplace_back(page->bytes);
  const Status read = ReadPage(*page, copy.buffers.front().data());
  if (!series.empty()) copy.buffers.push_back(std::move(series));
  MutexLock lock(mu_);
  UnpinJob(pin);
  if (!read.ok()) return read;
  return copy;
}

}  // namespace kvstrata
