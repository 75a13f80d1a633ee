// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/tables.h"

#include <algorithm>

#include "base/check.h"
#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"

namespace kvstrata {

void PassArena(const PageMemory& memory, const Session& session, const Arena& arena) {
  if (!session.sink) return;
  const bool writable = session.sink_writes && arena.writer == session.id;
  session.sink({arena.id, arena.memory.bytes, arena.tier, writable, memory.handle_type(arena.tier),
                writable ? arena.memory.fd.get() : arena.memory.read_only_fd.get()});
}

shm::PageEntry Tables::EntryOf(const Sequence& s, const Page* page) {
  shm::PageEntry entry{};
  if (page == nullptr) {
    entry.flags = shm::kPageAbsent;
    return entry;
  }
  entry.arena = page->arena->id;
  entry.tier = static_cast<uint16_t>(page->arena->tier);
  entry.offset = page->offset;
  // What the prefix index knows may be somebody else's any time.
  const bool shared = page->refs > 1 || page->indexed || page->arena->writer != s.session;
  entry.flags = static_cast<uint16_t>((shared ? shm::kPageShared : 0) |
                                      (page->sealed ? shm::kPageSealed : 0));
  return entry;
}

void Tables::WriteExtents(const Sequence& s, shm::ExtentEntry* entries) {
  uint16_t flags = 0;
  if (s.codec && s.codec->rest_load != 0) {
    flags = s.codec->rest_lost.ok() ? shm::kExtentRestDue : shm::kExtentRestLost;
  }
  for (size_t i = 0; i < s.extents.size(); ++i) {
    const Extent& e = s.extents[i];
    const Arena& arena = *e.page->arena;
    entries[i] = {arena.id,       flags,   static_cast<uint16_t>(arena.tier),
                  e.page->offset, e.bytes, e.tokens.begin,
                  e.tokens.end};
  }
}

// The same table as addresses, for the codec's own use. Pages before `first_page` are the same.
void Tables::RefreshView(Session* session, Sequence* s, size_t first_page) {
  if (!s->codec) return;
  CodecState& codec = *s->codec;
  codec.pages.resize(s->pages.size());
  for (size_t i = first_page; i < s->pages.size(); ++i) {
    codec.pages[i] = s->pages[i] == nullptr ? nullptr : s->pages[i]->base();
    catalog_.LetOthersIn(session, 1);
  }
  if (first_page > 0) return;
  codec.extents.clear();
  for (const Extent& e : s->extents) {
    ExtentView view = {e.page->base(), static_cast<int64_t>(e.bytes), e.tokens};
    if (e.description) {
      view.description = e.description->data();
      view.description_bytes = static_cast<int64_t>(e.description->size());
    }
    codec.extents.push_back(view);
  }
}

void Tables::GrantArena(Session* session, const Arena& arena) {
  // A process that sees another GPU could not map it.
  KVS_CHECK(arena.tier == Tier::kHost || arena.pool == PoolId::Device(session->device));
  if (!session->granted.try_emplace(arena.id, arena.writer == session->id).second) return;
  PassArena(books_.memory, *session, arena);
}

void Tables::WriteEntries(Session* session, const Sequence& s, std::span<Page* const> pages,
                          size_t first, shm::PageEntry* entries) {
  const Arena* last = nullptr;
  for (size_t i = first; i < pages.size(); ++i) {
    entries[i] = EntryOf(s, pages[i]);
    if (pages[i] != nullptr && pages[i]->arena != last) {
      last = pages[i]->arena;
      GrantArena(session, *last);
    }
    catalog_.LetOthersIn(session, 1);
  }
}

Result<shm::SequenceTable*> Tables::ReserveTable(Session* session, const Sequence& s,
                                                 uint32_t page_capacity) {
  return ReserveTable(session, s, page_capacity, s.extents.size());
}

Result<shm::SequenceTable*> Tables::ReserveTable(Session* session, const Sequence& s,
                                                 uint32_t page_capacity, size_t extents) {
  const uint32_t blocks = s.BlocksFor(uint64_t{page_capacity} * s.page_tokens());
  const auto make = [&] {
    return session->memory->NewTable(page_capacity, blocks, static_cast<uint32_t>(extents));
  };
  shm::SequenceTable* table = make();
  if (table == nullptr) {
    references_.ReclaimLocked();
    table = make();
  }
  if (table != nullptr) return table;
  return ResourceExhausted("TABLES_FULL",
                           "no room for a table of " + std::to_string(page_capacity) +
                               " pages in the session's table segment of " +
                               std::to_string(session->memory->table_bytes()) +
                               " bytes; close sequences, or end steps that are open");
}

void Tables::Publish(Session* session, Sequence* s, shm::SequenceTable* table) {
  KVS_CHECK(s->pages.size() <= table->page_capacity &&
            s->index_blocks.size() <= table->index_capacity &&
            s->extents.size() == table->extent_count);
  SessionMemory& memory = *session->memory;
  if (s->access_counters.count < table->page_capacity) {
    // Without room for more counters the old ones stay: pages beyond them are not counted.
    if (const AccessCounters access_counters = memory.NewCounters(table->page_capacity);
        access_counters.count != 0) {
      memory.CopyCounts(s->access_counters, access_counters);
      if (s->access_counters.count != 0)
        session->retired_counters.Push(session->tenant->epoch, s->access_counters);
      s->access_counters = access_counters;
    }
  }
  table->version = ++s->version;
  table->sequence_id = s->id;
  table->first_access_counter = s->access_counters.first;
  table->access_counter_count = s->access_counters.count;
  shm::PageEntry* const entries = shm::Entries(table);
  WriteEntries(session, *s, s->pages, 0, entries);
  WriteEntries(session, *s, s->index_blocks, 0, entries + table->page_capacity);
  for (const Extent& e : s->extents) GrantArena(session, *e.page->arena);
  WriteExtents(*s, shm::Extents(table));
  RefreshView(session, s, 0);
  table->pages.store(static_cast<uint32_t>(s->pages.size()), std::memory_order_release);
  table->index_blocks.store(static_cast<uint32_t>(s->index_blocks.size()),
                            std::memory_order_release);
  shm::SequenceSlot& slot = memory.tables()->slots[s->slot];
  slot.sequence_id.store(s->id, std::memory_order_seq_cst);
  slot.table_offset.store(memory.OffsetOf(table), std::memory_order_seq_cst);
  if (s->table != nullptr) session->retired_tables.Push(session->tenant->epoch, s->table);
  s->table = table;
  ++books_.counters.publications;
}

void Tables::PublishInPlace(Session* session, Sequence* s) {
  shm::SequenceTable* table = s->table;
  const size_t first_page = table->pages.load(std::memory_order_relaxed);
  const size_t first_block = table->index_blocks.load(std::memory_order_relaxed);
  shm::PageEntry* const entries = shm::Entries(table);
  WriteEntries(session, *s, s->pages, first_page, entries);
  WriteEntries(session, *s, s->index_blocks, first_block, entries + table->page_capacity);
  RefreshView(session, s, std::max<size_t>(first_page, 1));
  // Readers load the pages' count first: whoever sees the new pages sees their index blocks.
  table->index_blocks.store(static_cast<uint32_t>(s->index_blocks.size()),
                            std::memory_order_release);
  table->pages.store(static_cast<uint32_t>(s->pages.size()), std::memory_order_release);
  ++books_.counters.publications;
}

void Tables::Unpublish(Session* session, Sequence* s) {
  SessionMemory& memory = *session->memory;
  shm::SequenceSlot& slot = memory.tables()->slots[s->slot];
  slot.table_offset.store(0, std::memory_order_seq_cst);
  slot.sequence_id.store(0, std::memory_order_seq_cst);
  slot.truncate_to.store(0, std::memory_order_seq_cst);
  memory.FreeSlot(s->slot);
  session->retired_tables.Push(session->tenant->epoch, s->table);
  if (s->access_counters.count != 0)
    session->retired_counters.Push(session->tenant->epoch, s->access_counters);
  s->table = nullptr;
  s->access_counters = {};
}

}  // namespace kvstrata
