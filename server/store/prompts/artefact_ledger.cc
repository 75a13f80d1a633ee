// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/artefact_ledger.h"

#include <openssl/sha.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

namespace kvstrata {
namespace {

constexpr size_t kDiskBlock = 4096;  // docs/disk_format.md

struct RecordHeader {
  static constexpr uint64_t kMagic = 0x31465452'4153564B;  // "KVSARTF1"
  static constexpr uint32_t kVersion = 1;
  uint64_t magic;
  uint32_t version;
  uint32_t prompt_tokens;
  uint32_t extents;
  uint32_t released;
  uint64_t series_bytes;
};
static_assert(sizeof(RecordHeader) == 32);

struct ExtentEntry {
  uint64_t bytes;
  uint64_t checksum;
  int32_t begin, end;
  uint32_t tier;
  uint32_t zero;
};
static_assert(sizeof(ExtentEntry) == 32 && sizeof(Run) == 8);

template <typename T>
void AppendPod(const T& value, std::vector<std::byte>* bytes) {
  const auto raw = std::as_bytes(std::span(&value, 1));
  bytes->insert(bytes->end(), raw.begin(), raw.end());
}

// False when there are too few.
template <typename T>
bool TakePod(std::span<const std::byte>* bytes, T* value) {
  if (bytes->size() < sizeof(T)) return false;
  std::memcpy(value, bytes->data(), sizeof(T));
  *bytes = bytes->subspan(sizeof(T));
  return true;
}

bool Within(const Run& run, int32_t begin, uint32_t prompt_tokens) {
  return run.begin >= begin && run.end > run.begin &&
         static_cast<uint32_t>(run.end) <= prompt_tokens;
}

bool TakeExtents(uint32_t n, std::span<const std::byte>* bytes, ArtefactRecord* record) {
  int32_t begin = 0;
  for (uint32_t i = 0; i < n; ++i) {
    ExtentEntry e;
    if (!TakePod(bytes, &e)) return false;
    const ArtefactRecord::Stored stored{
        e.bytes, e.checksum, {e.begin, e.end}, static_cast<Tier>(e.tier)};
    if (!Within(stored.tokens, begin, record->prompt_tokens)) return false;
    if (e.bytes == 0 || e.tier >= kTiers) return false;
    begin = e.begin;
    record->extents.push_back(stored);
  }
  return true;
}

bool TakeReleased(uint32_t n, std::span<const std::byte>* bytes, ArtefactRecord* record) {
  int32_t begin = 0;
  for (uint32_t i = 0; i < n; ++i) {
    Run run;
    if (!TakePod(bytes, &run) || !Within(run, begin, record->prompt_tokens)) return false;
    begin = run.end;
    record->released.push_back(run);
  }
  return true;
}

size_t BytesOf(const ArtefactRecord& record) {
  constexpr size_t kEntry = 256;  // the record, the list's and the map's nodes
  return kEntry + record.extents.size() * sizeof(ArtefactRecord::Stored) +
         record.released.size() * sizeof(Run);
}

}  // namespace

ArtefactRecord RecordOf(const Artefact& artefact) {
  ArtefactRecord record{artefact.prompt_tokens, {}, artefact.released, artefact.series};
  for (const Extent& e : artefact.extents) {
    record.extents.push_back({e.bytes, e.checksum, e.tokens, e.page->arena->tier});
  }
  return record;
}

std::vector<std::byte> EncodeRecord(const ArtefactRecord& record) {
  const std::vector<std::byte> series = record.series.Encode();
  std::vector<std::byte> bytes;
  AppendPod(RecordHeader{RecordHeader::kMagic, RecordHeader::kVersion, record.prompt_tokens,
                         static_cast<uint32_t>(record.extents.size()),
                         static_cast<uint32_t>(record.released.size()), series.size()},
            &bytes);
  for (const ArtefactRecord::Stored& stored : record.extents) {
    AppendPod(ExtentEntry{stored.bytes, stored.checksum, stored.tokens.begin, stored.tokens.end,
                          static_cast<uint32_t>(stored.tier), 0},
              &bytes);
  }
  for (const Run& run : record.released) AppendPod(run, &bytes);
  bytes.insert(bytes.end(), series.begin(), series.end());
  // Its length tells a record from a page, which is whole blocks.
  if (bytes.size() % kDiskBlock == 0) bytes.push_back(std::byte{0});
  return bytes;
}

std::optional<ArtefactRecord> ParseRecord(std::span<const std::byte> bytes) {
  RecordHeader h;
  if (!TakePod(&bytes, &h)) return std::nullopt;
  if (h.magic != RecordHeader::kMagic || h.version != RecordHeader::kVersion) return std::nullopt;
  ArtefactRecord record;
  record.prompt_tokens = h.prompt_tokens;
  if (h.extents == 0 || !TakeExtents(h.extents, &bytes, &record)) return std::nullopt;
  if (!TakeReleased(h.released, &bytes, &record)) return std::nullopt;
  const size_t behind = bytes.size() - std::min<size_t>(bytes.size(), h.series_bytes);
  if (bytes.size() < h.series_bytes || behind > 1) return std::nullopt;
  std::optional<Series> series = Series::Parse(bytes.first(h.series_bytes));
  if (!series) return std::nullopt;
  record.series = std::move(*series);
  return record;
}

PageKey ExtentKey(const PageKey& artefact, size_t i, const ArtefactRecord::Stored& stored) {
  std::string text = "kvstrata artefact part 1";
  text.append(reinterpret_cast<const char*>(artefact.data()), artefact.size());
  const std::array<uint64_t, 5> numbers = {i, stored.bytes, stored.checksum,
                                           static_cast<uint64_t>(stored.tokens.begin),
                                           static_cast<uint64_t>(stored.tokens.end)};
  text.append(reinterpret_cast<const char*>(numbers.data()), sizeof(numbers));
  PageKey key;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), key.data());
  return key;
}

Status CopyVerified(const ArtefactRecord::Stored& stored, std::span<const std::byte> value,
                    const Geometry& geometry, const ExtentCopier& copy) {
  if (value.size() < stored.bytes) {
    return {Code::kDataLoss, "EXTENT_INVALID",
            "an extent of an artefact is shorter than its record"};
  }
  const ExtentView view{value.data(), static_cast<int64_t>(stored.bytes), stored.tokens};
  KVS_RETURN_IF_ERROR(CheckExtent(view, geometry, KindOf(view)));
  ExtentHeader header;
  std::memcpy(&header, value.data(), sizeof(header));
  if (header.checksum != stored.checksum) {
    return {Code::kDataLoss, "EXTENT_CHECKSUM", "an extent of an artefact is not the record's"};
  }
  return CopyVerified(value, copy);
}

void ArtefactLedger::Forget(std::list<Entry>::iterator at) {
  bytes_ -= BytesOf(*at->second);
  by_key_.erase(at->first);
  by_age_.erase(at);
}

void ArtefactLedger::Note(const PageKey& artefact, ArtefactRecord record) {
  record.series = {};
  MutexLock lock(mu_);
  if (const auto old = by_key_.find(artefact); old != by_key_.end()) Forget(old->second);
  if (record.released.empty()) return;
  bytes_ += BytesOf(record);
  by_age_.emplace_back(artefact, std::make_shared<const ArtefactRecord>(std::move(record)));
  by_key_.emplace(artefact, std::prev(by_age_.end()));
  while (bytes_ > kMaxBytes) Forget(by_age_.begin());
}

std::shared_ptr<const ArtefactRecord> ArtefactLedger::Find(const PageKey& artefact) const {
  MutexLock lock(mu_);
  const auto found = by_key_.find(artefact);
  return found == by_key_.end() ? nullptr : found->second->second;
}

}  // namespace kvstrata
