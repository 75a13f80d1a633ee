// SPDX-License-Identifier: Apache-2.0
// Reading published tables (shm_layout.h, "table segment"), by the client and by the daemon for its
// remote sessions: enter an epoch, read a table whose bytes stay until the epoch is left.
//
// Thread-safety: Enter and Leave from any thread; a reader slot belongs to one step.
#pragma once

#include <optional>

#include "proto/shm_layout.h"

namespace kvstrata::shm {

// One version of a sequence's table, bounds already checked against the segment.
struct TableView {
  const SequenceTable* table = nullptr;  // null: no such sequence, or a table that breaks bounds
  uint32_t pages = 0;
  uint32_t index_blocks = 0;
  const PageEntry* page(uint32_t i) const { return Entries(table) + i; }
  const PageEntry* index_block(uint32_t i) const {
    return Entries(table) + table->page_capacity + i;
  }
  uint32_t extents() const { return table->extent_count; }
  const ExtentEntry* extent(uint32_t i) const { return Extents(table) + i; }
};

// Whether the entries make sense by themselves: tokens in order, sizes that do not overflow. That
// the bytes lie inside their arena is for whoever knows the arenas. Once per version is enough.
inline bool ExtentsSound(const TableView& view) {
  int32_t begin = 0;
  for (uint32_t i = 0; i < view.extents(); ++i) {
    const ExtentEntry& e = *view.extent(i);
    if (e.begin < begin || e.end < e.begin || e.bytes == 0) return false;
    if (e.offset % 8 != 0 || e.offset + e.bytes < e.offset) return false;
    begin = e.begin;
  }
  return true;
}

class TableReader {
 public:
  TableReader() = default;
  TableReader(SessionHeader* session, const TableHeader* tables, uint64_t table_bytes)
      : session_(session), tables_(tables), table_bytes_(table_bytes) {}

  // Enters the current epoch in a free reader slot; -1 when kMaxReaders steps are open.
  int Enter() {
    for (int i = 0; i < kMaxReaders; ++i) {
      std::atomic<uint64_t>& slot = session_->readers[i].epoch;
      uint64_t epoch = tables_->global_epoch.load(std::memory_order_seq_cst);
      uint64_t free_slot = 0;
      if (!slot.compare_exchange_strong(free_slot, epoch, std::memory_order_seq_cst)) continue;
      // The daemon may have moved on between the load and the store: enter what holds now.
      for (uint64_t now; (now = tables_->global_epoch.load(std::memory_order_seq_cst)) != epoch;) {
        epoch = now;
        slot.store(epoch, std::memory_order_seq_cst);
      }
      return i;
    }
    return -1;
  }
  void Leave(int slot) { session_->readers[slot].epoch.store(0, std::memory_order_seq_cst); }

  // The current table of a slot. REQUIRES: the caller is inside Enter/Leave.
  TableView Read(uint32_t slot, uint64_t sequence) const {
    if (slot >= static_cast<uint32_t>(kMaxSequences)) return {};
    const SequenceSlot& s = tables_->slots[slot];
    const uint64_t offset = s.table_offset.load(std::memory_order_acquire);
    if (offset < sizeof(TableHeader) || offset % 8 != 0 ||
        offset > table_bytes_ - sizeof(SequenceTable)) {
      return {};
    }
    const auto* t = reinterpret_cast<const SequenceTable*>(
        reinterpret_cast<const std::byte*>(tables_) + offset);
    const uint64_t bytes = TableBytes(t->page_capacity, t->index_capacity, t->extent_count);
    if (t->sequence_id != sequence || bytes > table_bytes_ - offset) return {};
    TableView view{t, t->pages.load(std::memory_order_acquire),
                   t->index_blocks.load(std::memory_order_acquire)};
    if (view.pages > t->page_capacity || view.index_blocks > t->index_capacity) return {};
    return view;
  }

  // For one that has no table: it was published here once, and another session closed it.
  bool Closed(uint32_t slot, uint64_t sequence) const {
    if (slot >= static_cast<uint32_t>(kMaxSequences)) return false;
    const SequenceSlot& s = tables_->slots[slot];
    return s.table_offset.load(std::memory_order_acquire) == 0 ||
           s.sequence_id.load(std::memory_order_acquire) != sequence;
  }

  // How many tokens of the sequence another session wants left (Store::TruncateKey); nothing: none
  // does.
  std::optional<uint32_t> TruncateTo(uint32_t slot, uint64_t sequence) const {
    if (slot >= static_cast<uint32_t>(kMaxSequences)) return std::nullopt;
    const SequenceSlot& s = tables_->slots[slot];
    const uint64_t asked = s.truncate_to.load(std::memory_order_acquire);
    if (asked == 0 || s.sequence_id.load(std::memory_order_acquire) != sequence)
      return std::nullopt;
    return static_cast<uint32_t>(asked - 1);
  }

  // What an audit asks of the slot's sequence. REQUIRES: Read of the slot found a table.
  RecallRequest Recall(uint32_t slot) const {
    return RecallRequest::Of(tables_->slots[slot].recall_audit.load(std::memory_order_relaxed));
  }

 private:
  SessionHeader* session_ = nullptr;
  const TableHeader* tables_ = nullptr;
  uint64_t table_bytes_ = 0;
};

// Leading tokens whose index rows are there, by who made them (`indexed`, of `tokens`) and by the
// table: a sealed block is complete, whoever sealed it.
inline uint32_t IndexedTokens(const TableView& view, uint32_t block_tokens, uint32_t indexed,
                              uint32_t tokens) {
  for (uint32_t i = indexed / block_tokens; i < view.index_blocks; ++i) {
    const uint64_t end = (uint64_t{i} + 1) * block_tokens;
    if (end > tokens || (view.index_block(i)->flags & kPageSealed) == 0) break;
    indexed = static_cast<uint32_t>(end);
  }
  return indexed;
}

}  // namespace kvstrata::shm
