// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/sealed_values.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"

namespace kvstrata {
namespace {

constexpr size_t kUnderLock = 256;  // records

std::string NameOfKey(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

}  // namespace

void SealedValues::NoteRecord(const PageKey& artefact, std::span<const std::byte> value) {
  if (std::optional<ArtefactRecord> record = ParseRecord(value)) {
    ledger_.Note(artefact, std::move(*record));
  }
}

ValueInfo SealedValues::InfoOfPage(const Page& page) const {
  ValueInfo info;
  info.key = NameOfKey(page.key);
  info.kind = page.summary ? ValueKind::kIndex : ValueKind::kPage;
  if (const auto model = books_.models.all().find(page.model); model != books_.models.all().end()) {
    const ModelDesc& desc = model->second->desc;
    info.model = desc.name;
    if (!page.summary) info.tokens = static_cast<uint32_t>(desc.geometry.page_tokens);
  }
  info.bytes = page.bytes;
  info.tiers = {page.arena->tier};
  info.pinned = page.pinned;
  info.changed = page.series_changed;
  return info;
}

std::vector<ValueInfo> SealedValues::PageValues(uint64_t* cursor, size_t records) const {
  std::vector<ValueInfo> found;
  for (const uint64_t last = *cursor + records; *cursor < last;) {
    StoreLock lock(books_.mu);
    const auto& all = books_.pools.records();
    const uint64_t end = std::min({last, *cursor + kUnderLock, uint64_t{all.size()}});
    for (; *cursor < end; ++*cursor) {
      if (all[*cursor].indexed && !all[*cursor].replica) found.push_back(InfoOfPage(all[*cursor]));
    }
    if (*cursor >= all.size()) *cursor = kNoMoreValues;
  }
  return found;
}

std::vector<PageKey> SealedValues::ArtefactKeys() const {
  StoreLock lock(books_.mu);
  std::vector<PageKey> keys;
  for (const Artefact& artefact : books_.artefacts.all()) keys.push_back(artefact.key);
  return keys;
}

std::vector<ArtefactRecord::Stored> SealedValues::ExtentsOf(const PageKey& key,
                                                            ValueInfo* record) const {
  std::vector<ArtefactRecord::Stored> extents;
  StoreLock lock(books_.mu);
  const Artefact* artefact = books_.artefacts.Peek(key);
  if (artefact == nullptr) return extents;
  for (const Extent& e : artefact->extents) {
    extents.push_back({e.bytes, e.checksum, e.tokens, e.page->arena->tier});
  }
  record->key = NameOfKey(key);
  record->kind = ValueKind::kRecord;
  record->tokens = artefact->prompt_tokens;
  record->tiers = {Tier::kHost};  // in the daemon's own memory, of no pool
  const auto model = books_.models.all().find(artefact->extents.front().page->model);
  if (model != books_.models.all().end()) record->model = model->second->desc.name;
  return extents;
}

std::vector<ValueInfo> SealedValues::ArtefactValues() const {
  std::vector<ValueInfo> found;
  for (const PageKey& key : ArtefactKeys()) {
    ValueInfo record;
    const std::vector<ArtefactRecord::Stored> extents = ExtentsOf(key, &record);
    if (extents.empty()) continue;
    found.push_back(record);
    for (size_t i = 0; i < extents.size(); ++i) {
      ValueInfo& extent = found.emplace_back();
      extent.key = NameOfKey(ExtentKey(key, i, extents[i]));
      extent.kind = ValueKind::kExtent;
      extent.model = record.model;
      extent.tokens = static_cast<uint32_t>(extents[i].tokens.end - extents[i].tokens.begin);
      extent.bytes = extents[i].bytes;
      extent.tiers = {extents[i].tier};
    }
  }
  return found;
}

bool SealedValues::HoldsPage(const PageKey& key) const {
  StoreLock lock(books_.mu);
  return books_.prefix.Find(key) != nullptr;
}

Page* SealedValues::KeepExtent(const PageKey& wanted, uint64_t* hold) {
  for (const PageKey& key : ArtefactKeys()) {
    ValueInfo record;
    const std::vector<ArtefactRecord::Stored> extents = ExtentsOf(key, &record);
    for (size_t i = 0; i < extents.size(); ++i) {
      if (ExtentKey(key, i, extents[i]) != wanted) continue;
      StoreLock lock(books_.mu);
      const Artefact* artefact = books_.artefacts.Peek(key);
      const bool same = artefact != nullptr && i < artefact->extents.size() &&
                        artefact->extents[i].checksum == extents[i].checksum;
      if (!same) return nullptr;  // built anew meanwhile
      *hold = holds_.Keep(artefact->extents[i].page);
      return artefact->extents[i].page;
    }
  }
  return nullptr;
}

Result<ValueBytes> SealedValues::CopyValue(const PageKey& key) {
  ValueBytes copy;
  uint64_t hold = 0;
  Page* page = nullptr;
  std::vector<std::byte> series;
  {
    StoreLock lock(books_.mu);
    page = books_.prefix.Find(key);
    if (page != nullptr) {
      copy.kind = page->summary ? ValueKind::kIndex : ValueKind::kPage;
      copy.changed = page->series_changed;
      if (page->series != nullptr) series = page->series->Encode();
      hold = holds_.Keep(page);
    } else if (const Artefact* artefact = books_.artefacts.Peek(key); artefact != nullptr) {
      return ValueBytes{Tier::kHost, ValueKind::kRecord, {EncodeRecord(RecordOf(*artefact))}, true};
    }
  }
  if (page == nullptr) {
    page = KeepExtent(key, &hold);
    copy.kind = ValueKind::kExtent;
  }
  if (page == nullptr) return NotFound("VALUE_UNKNOWN", "memory has nothing under this key");
  copy.from = page->arena->tier;
  copy.buffers.emplace_back(page->bytes);
  const Status read = books_.memory.Read(*page, copy.buffers.front().data());
  if (!series.empty()) copy.buffers.push_back(std::move(series));
  StoreLock lock(books_.mu);
  holds_.End(hold);
  if (!read.ok()) return read;
  return copy;
}

std::vector<SealedValue> SealedValues::Sealed(const PageKey& key) const {
  StoreLock lock(books_.mu);
  if (const Page* page = books_.prefix.Find(key); page != nullptr) {
    SealedValue value{key, {page->bytes}, page->series_changed};
    if (page->series != nullptr) value.sizes.push_back(page->series->Encode().size());
    return {std::move(value)};
  }
  const Artefact* artefact = books_.artefacts.Peek(key);
  if (artefact == nullptr) return {};
  const ArtefactRecord record = RecordOf(*artefact);
  std::vector<SealedValue> values;
  for (size_t i = 0; i < record.extents.size(); ++i) {
    const Page& page = *artefact->extents[i].page;
    values.push_back({ExtentKey(key, i, record.extents[i]), {page.bytes}, true});
  }
  // A record is offered when its artefact was built anew: the stored one was not good enough.
  values.push_back({key, {EncodeRecord(record).size()}, true});
  return values;
}

bool SealedValues::CopySealed(const PageKey& key, size_t value,
                              std::span<const std::span<std::byte>> to, CopyFor whom) {
  Page* page = nullptr;
  std::vector<std::byte> beside;  // what lies in no page; the last buffer
  uint64_t hold = 0;
  {
    StoreLock lock(books_.mu);
    page = books_.prefix.Find(key);
    if (page != nullptr) {
      if (page->series != nullptr) beside = page->series->Encode();
    } else if (const Artefact* artefact = books_.artefacts.Peek(key); artefact == nullptr) {
      return false;
    } else if (value < artefact->extents.size()) {
      page = artefact->extents[value].page;
    } else {
      ArtefactRecord record = RecordOf(*artefact);
      beside = EncodeRecord(record);
      ledger_.Note(key, std::move(record));
    }
    const size_t buffers = size_t{page != nullptr} + size_t{!beside.empty()};
    if (to.size() != buffers || (page != nullptr && to.front().size() != page->bytes)) return false;
    if (!beside.empty() && to.back().size() != beside.size()) return false;
    if (!beside.empty()) std::ranges::copy(beside, to.back().begin());
    if (page == nullptr) return true;
    if (whom == CopyFor::kLocalTier) page->series_changed = false;
    hold = holds_.Keep(page);
  }
  const Status copied = books_.memory.Read(*page, to.front().data());
  StoreLock lock(books_.mu);
  holds_.End(hold);
  return copied.ok();
}

void SealedValues::NoteStored(std::span<const PageKey> keys) {
  StoreLock lock(books_.mu);
  for (const PageKey& key : keys) {
    if (Page* page = books_.prefix.Find(key); page != nullptr) page->stored = true;
  }
}

}  // namespace kvstrata
