// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/chunk_region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/check.h"
#include "server/memory/cgroup.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSlabs = 64;
constexpr uint64_t kSlabGranularity = uint64_t{2} << 20;

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Memory is charged when it is touched, which is too late to refuse anything.
Status CheckMemory(uint64_t bytes) {
  const auto refuse = [bytes](const std::string& whose, uint64_t has) {
    return ResourceExhausted("CHUNKS_MEMORY", "chunks.bytes is " + std::to_string(bytes) + ", " +
                                                  whose + " has " + std::to_string(has) +
                                                  "; make chunks.bytes smaller");
  };
  const uint64_t machine = static_cast<uint64_t>(std::max(0L, sysconf(_SC_PHYS_PAGES))) *
                           static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (machine != 0 && bytes > machine) return refuse("this machine", machine);
  const std::optional<CgroupMemory> cgroup = ReadCgroupMemory();
  if (!cgroup || bytes <= cgroup->available()) return OkStatus();
  return refuse("the daemon's cgroup (" + cgroup->file + ")", cgroup->available());
}

}  // namespace

uint64_t ChunkRegion::SlabBytes(uint64_t region_bytes) {
  return std::min(region_bytes, RoundUp((region_bytes + kSlabs - 1) / kSlabs, kSlabGranularity));
}

Result<std::unique_ptr<ChunkRegion>> ChunkRegion::Make(uint64_t bytes, uint32_t layout_percent) {
  KVS_RETURN_IF_ERROR(CheckMemory(bytes));
  Result<MappedMemory> mapped = MapSealedMemfd("kvstrata-chunks", bytes);
  if (!mapped.ok()) {
    return ResourceExhausted(
        "CHUNKS_MEMORY",
        "no memory for chunks.bytes = " + std::to_string(bytes) + ": " + mapped.status().message());
  }
  (void)madvise(mapped->base, mapped->bytes, MADV_HUGEPAGE);  // advice: shmem may not have them
  std::shared_ptr<MappedMemory> memory(new MappedMemory(std::move(mapped).value()),
                                       [](MappedMemory* m) {
                                         UnmapSealedMemfd(std::move(*m));
                                         delete m;
                                       });
  return std::unique_ptr<ChunkRegion>(new ChunkRegion(std::move(memory), layout_percent));
}

ChunkRegion::ChunkRegion(std::shared_ptr<MappedMemory> memory, uint32_t layout_percent)
    : memory_(std::move(memory)),
      slab_bytes_(SlabBytes(memory_->bytes)),
      slabs_((memory_->bytes + slab_bytes_ - 1) / slab_bytes_),
      most_slabs_(std::max<uint64_t>(1, slabs_.size() * layout_percent / 100)) {}

uint64_t ChunkRegion::bytes() const { return memory_->bytes; }
uint64_t ChunkRegion::most_bytes() const { return std::min(bytes(), most_slabs_ * slab_bytes_); }
int ChunkRegion::fd() const { return memory_->fd.get(); }
std::shared_ptr<void> ChunkRegion::keep() const { return memory_; }

std::span<std::byte> ChunkRegion::BytesOf(const Chunk& chunk) const {
  const uint64_t at = static_cast<uint64_t>(chunk.id) * chunk.row_bytes;
  KVS_CHECK(at + chunk.row_bytes <= memory_->bytes);
  return {memory_->base + at, chunk.row_bytes};
}

// -- where rows lie

uint64_t ChunkRegion::EndOf(size_t slab) const {
  return std::min((slab + 1) * slab_bytes_, memory_->bytes);
}

std::pair<size_t, size_t> ChunkRegion::SlabsOf(uint64_t row_bytes, int32_t id) const {
  const uint64_t at = static_cast<uint64_t>(id) * row_bytes;
  return {at / slab_bytes_, (at + row_bytes - 1) / slab_bytes_ + 1};
}

std::pair<int32_t, int32_t> ChunkRegion::RowsOf(uint64_t row_bytes, size_t slab) const {
  const uint64_t first = slab * slab_bytes_ / row_bytes;
  const uint64_t last = std::min((EndOf(slab) + row_bytes - 1) / row_bytes, bytes() / row_bytes);
  return {static_cast<int32_t>(first), static_cast<int32_t>(std::max(first, last))};
}

// -- who has a slab

// Beside one of the same rows: the row across the border is there then.
size_t ChunkRegion::FindUnowned(uint64_t row_bytes) const {
  size_t found = slabs_.size();
  for (size_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].row_bytes != 0) continue;
    const bool beside = (i > 0 && slabs_[i - 1].row_bytes == row_bytes) ||
                        (i + 1 < slabs_.size() && slabs_[i + 1].row_bytes == row_bytes);
    if (beside) return i;
    if (found == slabs_.size()) found = i;
  }
  return found;
}

size_t ChunkRegion::FindOldest(uint64_t row_bytes) const {
  size_t found = slabs_.size();
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const Slab& slab = slabs_[i];
    if (slab.row_bytes == 0 || slab.row_bytes == row_bytes || slab.busy > 0) continue;
    if (found == slabs_.size() || slab.newest < slabs_[found].newest) found = i;
  }
  return found;
}

void ChunkRegion::Own(uint64_t row_bytes, size_t slab) {
  slabs_[slab] = Slab{row_bytes};
  Rows& rows = rows_[row_bytes];
  ++rows.slabs;
  const auto [first, last] = RowsOf(row_bytes, slab);
  for (int32_t id = first; id < last; ++id) {
    const auto [from, to] = SlabsOf(row_bytes, id);
    bool whole = true;
    for (size_t i = from; i < to; ++i) whole &= slabs_[i].row_bytes == row_bytes;
    if (!whole) continue;
    KVS_CHECK(rows.chunks.try_emplace(id, id, row_bytes).second);
    rows.free.insert(id);
  }
}

void ChunkRegion::Disown(size_t slab, const std::function<void(Chunk*)>& evicted) {
  const uint64_t row_bytes = slabs_[slab].row_bytes;
  Rows& rows = rows_.at(row_bytes);
  const auto [first, last] = RowsOf(row_bytes, slab);
  for (int32_t id = first; id < last; ++id) {
    const auto it = rows.chunks.find(id);
    if (it == rows.chunks.end()) continue;  // its other slab belongs to others
    KVS_CHECK(it->second.place != Chunk::Place::kBusy);
    if (it->second.place == Chunk::Place::kIdle) {
      evicted(&it->second);
      Move(&it->second, Chunk::Place::kFree);
    }
    rows.free.erase(id);
    rows.chunks.erase(it);
  }
  slabs_[slab] = Slab{};
  if (--rows.slabs == 0) rows_.erase(row_bytes);
}

// -- chunks

void ChunkRegion::Move(Chunk* chunk, Chunk::Place to) {
  using enum Chunk::Place;
  Rows& rows = rows_.at(chunk->row_bytes);
  const auto [from, end] = SlabsOf(chunk->row_bytes, chunk->id);
  for (size_t i = from; i < end; ++i) {
    Slab& slab = slabs_[i];
    slab.busy += static_cast<uint32_t>(to == kBusy) - static_cast<uint32_t>(chunk->place == kBusy);
    slab.idle += static_cast<uint32_t>(to == kIdle) - static_cast<uint32_t>(chunk->place == kIdle);
    if (to == kIdle) slab.newest = std::max(slab.newest, chunk->use);
    if (slab.idle == 0 && slab.busy == 0) slab.newest = 0;
  }
  if (chunk->place == kFree) rows.free.erase(chunk->id);
  if (chunk->place == kIdle) rows.idle.erase({chunk->use, chunk->id});
  if (to == kFree) rows.free.insert(chunk->id);
  if (to == kIdle) rows.idle.insert({chunk->use, chunk->id});
  chunk->place = to;
}

void ChunkRegion::Free(Chunk* chunk) { Move(chunk, Chunk::Place::kFree); }
void ChunkRegion::MakeBusy(Chunk* chunk) { Move(chunk, Chunk::Place::kBusy); }
void ChunkRegion::MakeIdle(Chunk* chunk) { Move(chunk, Chunk::Place::kIdle); }

Chunk* ChunkRegion::Find(uint64_t row_bytes, int32_t id) {
  const auto rows = rows_.find(row_bytes);
  if (rows == rows_.end()) return nullptr;
  const auto chunk = rows->second.chunks.find(id);
  return chunk == rows->second.chunks.end() ? nullptr : &chunk->second;
}

const Chunk* ChunkRegion::NextFrom(uint64_t* at) const {
  while (*at < bytes()) {
    const size_t slab = *at / slab_bytes_;
    const uint64_t row_bytes = slabs_[slab].row_bytes;
    const uint64_t id = row_bytes == 0 ? 0 : (*at + row_bytes - 1) / row_bytes;
    if (row_bytes == 0 || id * row_bytes >= EndOf(slab)) {
      *at = EndOf(slab);
      continue;
    }
    *at = id * row_bytes + 1;
    const auto& chunks = rows_.at(row_bytes).chunks;
    const auto found = chunks.find(static_cast<int32_t>(id));
    if (found != chunks.end()) return &found->second;
  }
  return nullptr;
}

bool ChunkRegion::MakeRoom(uint64_t row_bytes, const std::function<void(Chunk*)>& evicted) {
  const auto rows = rows_.find(row_bytes);
  // No row may lie in its slabs: each has the parts of two.
  const bool more =
      rows == rows_.end() || rows->second.slabs < most_slabs_ || rows->second.chunks.empty();
  if (const size_t unowned = FindUnowned(row_bytes); more && unowned < slabs_.size()) {
    Own(row_bytes, unowned);
    return true;
  }
  const bool own = rows != rows_.end() && !rows->second.idle.empty();
  const size_t other = more ? FindOldest(row_bytes) : slabs_.size();
  if (!own && other == slabs_.size()) return false;
  const bool takes_own =
      own && (other == slabs_.size() || rows->second.idle.begin()->first <= slabs_[other].newest);
  if (takes_own) {
    Chunk* const oldest = &rows->second.chunks.at(rows->second.idle.begin()->second);
    evicted(oldest);
    Move(oldest, Chunk::Place::kFree);
    return true;
  }
  Disown(other, evicted);
  Own(row_bytes, other);
  return true;
}

Chunk* ChunkRegion::Take(uint64_t row_bytes, const std::function<void(Chunk*)>& evicted) {
  KVS_CHECK(row_bytes > 0 && row_bytes <= slab_bytes_);
  for (;;) {
    const auto rows = rows_.find(row_bytes);
    if (rows != rows_.end() && !rows->second.free.empty()) {
      Chunk* const chunk = &rows->second.chunks.at(*rows->second.free.begin());
      Move(chunk, Chunk::Place::kBusy);
      return chunk;
    }
    if (!MakeRoom(row_bytes, evicted)) return nullptr;
  }
}

}  // namespace kvstrata
