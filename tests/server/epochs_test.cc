// SPDX-License-Identifier: Apache-2.0
// Epochs: what a reader may see is not freed, what it cannot see is; over the real shared memory.
#include "server/store/pages/epochs.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "proto/table_reader.h"
#include "server/store/books/segments.h"

namespace kvstrata {
namespace {

std::unique_ptr<SessionMemory> NewMemory() {
  auto memory = SessionMemory::Create(1, 99, 1);
  EXPECT_TRUE(memory.ok()) << memory.status().ToString();
  return std::move(memory).value();
}

shm::TableReader ReaderOf(const SessionMemory& m) {
  return shm::TableReader(m.header(), m.tables(), m.table_bytes());
}

TEST(Epochs, OldestReaderIsTheSmallestEnteredEpoch) {
  auto memory = NewMemory();
  shm::TableReader reader = ReaderOf(*memory);
  EXPECT_EQ(OldestReader(*memory->header()), kNoReader);
  memory->tables()->global_epoch = 5;
  const int a = reader.Enter();
  memory->tables()->global_epoch = 9;
  const int b = reader.Enter();
  EXPECT_EQ(OldestReader(*memory->header()), 5u);
  EXPECT_EQ(CountReaders(*memory->header()), 2u);
  reader.Leave(a);
  EXPECT_EQ(OldestReader(*memory->header()), 9u);
  reader.Leave(b);
  EXPECT_EQ(OldestReader(*memory->header()), kNoReader);
}

TEST(Epochs, ReclaimStopsAtTheOldestReader) {
  RetireQueue<int> queue;
  for (int i = 1; i <= 4; ++i) queue.Push(static_cast<uint64_t>(i), i);
  std::vector<int> freed;
  const auto free = [&](int i) { freed.push_back(i); };
  queue.Reclaim(1, free);  // entered at 1: may see what was retired at 1
  EXPECT_TRUE(freed.empty());
  queue.Reclaim(3, free);
  EXPECT_EQ(freed, (std::vector<int>{1, 2}));
  queue.Reclaim(kNoReader, free);
  EXPECT_EQ(freed, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_TRUE(queue.items().empty());
}

TEST(Epochs, AllReaderSlotsTakenIsSaidAndNotFatal) {
  auto memory = NewMemory();
  shm::TableReader reader = ReaderOf(*memory);
  for (int i = 0; i < shm::kMaxReaders; ++i) ASSERT_EQ(reader.Enter(), i);
  EXPECT_EQ(reader.Enter(), -1);
  reader.Leave(7);
  EXPECT_EQ(reader.Enter(), 7);
}

TEST(SessionMemory, HeaderSaysWhereThingsAre) {
  auto memory = NewMemory();
  const shm::SessionHeader& h = *memory->header();
  EXPECT_EQ(h.magic, shm::kMagic);
  EXPECT_EQ(h.session_id, 1u);
  EXPECT_EQ(h.daemon_epoch, 99u);
  EXPECT_EQ(h.request_ring_offset, sizeof(shm::SessionHeader));
  EXPECT_EQ(h.reply_ring_offset, h.request_ring_offset + shm::kRequestRingBytes);
  EXPECT_EQ(h.access_counters_offset, h.reply_ring_offset + shm::kReplyRingBytes);
  EXPECT_EQ(h.segment_bytes, memory->session_bytes());
  EXPECT_EQ(memory->tables()->global_epoch, 1u);
}

TEST(SessionMemory, TablesFillTheSegmentAndReturn) {
  auto memory = NewMemory();
  std::vector<shm::SequenceTable*> tables;
  for (shm::SequenceTable* t; (t = memory->NewTable(100000, 100)) != nullptr;) tables.push_back(t);
  EXPECT_GT(tables.size(), 35u);  // 64 MiB / 1.6 MB
  for (shm::SequenceTable* t : tables) {
    EXPECT_EQ(memory->OffsetOf(t) % 8, 0u);
    EXPECT_GE(memory->OffsetOf(t), sizeof(shm::TableHeader));
    memory->FreeTable(t);
  }
  EXPECT_TRUE(memory->TablesSane());
  EXPECT_EQ(memory->live_tables(), 0u);
  EXPECT_NE(memory->NewTable(4000000, 0), nullptr);
}

TEST(SessionMemory, AccessCountersKeepTheirCountsWhenTheyMove) {
  auto memory = NewMemory();
  const AccessCounters small = memory->NewCounters(4), other = memory->NewCounters(4);
  auto* counters = reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(memory->header()) +
                                               memory->header()->access_counters_offset);
  counters[small.first + 2] = 7;
  counters[other.first] = 1;
  const AccessCounters large = memory->NewCounters(40);
  memory->CopyCounts(small, large);
  memory->FreeCounters(small);
  EXPECT_EQ(memory->ReadCount(large, 2), 7u);
  EXPECT_EQ(memory->ReadCount(large, 0), 0u);
  EXPECT_EQ(memory->ReadCount(large, 40), 0u);          // beyond the slice
  const AccessCounters again = memory->NewCounters(4);  // reuses the freed place, zeroed
  EXPECT_EQ(again.first, small.first);
  EXPECT_EQ(memory->ReadCount(again, 2), 0u);
}

// Readers in other threads see whole tables only; a table is poisoned just before it is freed.
TEST(Epochs, ReadersNeverSeeFreedTables) {
  auto memory = NewMemory();
  RetireQueue<shm::SequenceTable*> retired;
  constexpr uint32_t kEntries = 16;
  const auto publish = [&](uint64_t version) {
    shm::SequenceTable* table = memory->NewTable(kEntries, 0);
    ASSERT_NE(table, nullptr);
    table->version = version;
    table->sequence_id = 1;
    for (uint32_t i = 0; i < kEntries; ++i) shm::Entries(table)[i].offset = version;
    table->pages.store(kEntries, std::memory_order_release);
    memory->tables()->slots[0].table_offset.store(memory->OffsetOf(table));
  };
  publish(1);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> seen{0}, torn{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      shm::TableReader reader = ReaderOf(*memory);
      while (!stop.load()) {
        const int slot = reader.Enter();
        const shm::TableView view = reader.Read(0, 1);
        for (uint32_t k = 0; k < view.pages; ++k)
          torn += view.page(k)->offset != view.table->version;
        torn += view.pages != kEntries;
        reader.Leave(slot);
        ++seen;
      }
    });
  }
  uint64_t epoch = 1;
  for (uint64_t version = 2; version < 4000 || seen.load() < 1000; ++version) {
    const uint64_t offset = memory->tables()->slots[0].table_offset.load();
    auto* old = reinterpret_cast<shm::SequenceTable*>(
        reinterpret_cast<std::byte*>(memory->tables()) + offset);
    publish(version);
    retired.Push(epoch, old);
    memory->tables()->global_epoch.store(++epoch);
    retired.Reclaim(OldestReader(*memory->header()), [&](shm::SequenceTable* table) {
      for (uint32_t i = 0; i < kEntries; ++i) shm::Entries(table)[i].offset = 0xDEAD;
      memory->FreeTable(table);
    });
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(torn.load(), 0u);
  retired.Reclaim(kNoReader, [&](shm::SequenceTable* table) { memory->FreeTable(table); });
  EXPECT_EQ(memory->live_tables(), 1u);
}

}  // namespace
}  // namespace kvstrata
