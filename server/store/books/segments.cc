// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/segments.h"

#include <atomic>
#include <new>

#include "base/check.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

constexpr uint64_t kRequestOffset = sizeof(shm::SessionHeader);
constexpr uint64_t kReplyOffset = kRequestOffset + shm::kRequestRingBytes;
constexpr uint64_t kAccessCountersOffset = kReplyOffset + shm::kReplyRingBytes;
constexpr uint64_t kSessionBytes = kAccessCountersOffset + shm::kAccessCounters * sizeof(uint32_t);
constexpr uint64_t kAccessCounterGranularity = 16;  // a cache line: two sequences never share one
static_assert(kSessionBytes % kMemoryGranularity == 0);

void FillHeader(shm::SessionHeader* h, uint64_t session, uint64_t daemon_epoch) {
  h->magic = shm::kMagic;
  h->version = shm::kVersion;
  h->session_id = session;
  h->daemon_epoch = daemon_epoch;
  h->request_ring_offset = kRequestOffset;
  h->reply_ring_offset = kReplyOffset;
  h->access_counters_offset = kAccessCountersOffset;
  h->segment_bytes = kSessionBytes;
}

}  // namespace

Result<std::unique_ptr<SessionMemory>> SessionMemory::Create(uint64_t session,
                                                             uint64_t daemon_epoch,
                                                             uint64_t global_epoch) {
  KVS_ASSIGN_OR_RETURN(MappedMemory segment, MapSealedMemfd("kvstrata-session", kSessionBytes));
  Result<MappedMemory> table =
      MapSealedMemfd("kvstrata-tables", shm::kTableSegmentBytes, Writers::kOne);
  if (!table.ok()) {
    UnmapSealedMemfd(std::move(segment));
    return table.status();
  }
  std::unique_ptr<SessionMemory> memory(
      new SessionMemory(std::move(segment), std::move(table).value()));
  FillHeader(memory->header(), session, daemon_epoch);
  shm::TableHeader* tables = memory->tables();
  tables->magic = shm::kMagic;
  tables->version = shm::kVersion;
  tables->segment_bytes = shm::kTableSegmentBytes;
  tables->global_epoch.store(global_epoch, std::memory_order_seq_cst);
  return memory;
}

SessionMemory::SessionMemory(MappedMemory session, MappedMemory table)
    : session_(std::move(session)),
      table_(std::move(table)),
      buffer_(std::make_unique<Buffer>(boost::interprocess::create_only,
                                       table_.base + sizeof(shm::TableHeader),
                                       table_.bytes - sizeof(shm::TableHeader))),
      access_counters_(shm::kAccessCounters, kAccessCounterGranularity) {
  counted_.emplace(header());
}

SessionMemory::~SessionMemory() {
  counted_.reset();
  buffer_.reset();
  UnmapSealedMemfd(std::move(session_));
  UnmapSealedMemfd(std::move(table_));
}

std::optional<uint32_t> SessionMemory::TakeSlot() {
  if (!free_slots_.empty()) {
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (next_slot_ == static_cast<uint32_t>(shm::kMaxSequences)) return std::nullopt;
  return next_slot_++;
}

void SessionMemory::FreeSlot(uint32_t slot) { free_slots_.push_back(slot); }

shm::SequenceTable* SessionMemory::NewTable(uint32_t page_capacity, uint32_t index_capacity,
                                            uint32_t extents) {
  const uint64_t bytes = shm::TableBytes(page_capacity, index_capacity, extents);
  if (bytes > table_.bytes) return nullptr;
  void* at = buffer_->allocate_aligned(bytes, 8, std::nothrow);
  if (at == nullptr) return nullptr;
  auto* table = new (at) shm::SequenceTable();
  table->bytes = bytes;
  table->page_capacity = page_capacity;
  table->index_capacity = index_capacity;
  table->extent_count = extents;
  ++live_tables_;
  return table;
}

void SessionMemory::FreeTable(shm::SequenceTable* table) {
  KVS_CHECK(live_tables_ > 0);
  --live_tables_;
  buffer_->deallocate(table);
}

uint64_t SessionMemory::OffsetOf(const shm::SequenceTable* table) const {
  return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(table) - table_.base);
}

uint32_t* SessionMemory::Counter(uint64_t i) const {
  return reinterpret_cast<uint32_t*>(session_.base + kAccessCountersOffset) + i;
}

AccessCounters SessionMemory::NewCounters(uint32_t count) {
  if (count == 0) return {};
  const std::optional<uint64_t> first = access_counters_.Allocate(count);
  if (!first) return {};
  for (uint32_t i = 0; i < count; ++i) {
    std::atomic_ref<uint32_t>(*Counter(*first + i)).store(0, std::memory_order_relaxed);
  }
  return {*first, count};
}

void SessionMemory::FreeCounters(AccessCounters slice) {
  if (slice.count != 0) access_counters_.Free(slice.first, slice.count);
}

uint64_t SessionMemory::CounterCost(AccessCounters slice) {
  return (slice.count + kAccessCounterGranularity - 1) / kAccessCounterGranularity *
         kAccessCounterGranularity;
}

uint32_t SessionMemory::ReadCount(AccessCounters slice, uint32_t i) const {
  if (i >= slice.count) return 0;
  return std::atomic_ref<uint32_t>(*Counter(slice.first + i)).load(std::memory_order_relaxed);
}

void SessionMemory::CopyCounts(AccessCounters from, AccessCounters to) {
  for (uint32_t i = 0; i < std::min(from.count, to.count); ++i) {
    std::atomic_ref<uint32_t>(*Counter(to.first + i))
        .fetch_add(ReadCount(from, i), std::memory_order_relaxed);
  }
}

}  // namespace kvstrata
