// SPDX-License-Identifier: Apache-2.0
// The proof of the books. Everything is counted again from the sequences, the prefix index and the
// retired lists, and compared with what the allocators, the counters and the clients' tables say.
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/lookups/prefix_pins.h"
#include "server/store/references/page_references.h"
#include "server/store/sequences/inspection.h"

namespace kvstrata {

class Auditor {
 public:
  Auditor(const Books& books, const SessionCatalog& catalog, const PageReferences& references,
          const PageHolds& holds, const PrefixPins& pins)
      : books_(books), catalog_(catalog), pages_(references), holds_(holds), pins_(pins) {}

  AuditReport Run() KVS_NO_THREAD_SAFETY_ANALYSIS {
    CountReferences();
    CheckPages();
    CheckArenas();
    CheckCached();
    CheckPins();
    CheckSessions();
    return std::move(report_);
  }

 private:
  void Find(std::string finding) { report_.findings.push_back(std::move(finding)); }

  static std::string NameOfPage(const Page& page) {
    if (page.arena == nullptr) return "freed page record";
    return "page " + std::to_string(page.arena->id) + ":" + std::to_string(page.offset);
  }

  void CountReferences() KVS_NO_THREAD_SAFETY_ANALYSIS {
    for (const auto& [id, s] : catalog_.sequences()) {
      ++report_.sequences;
      CountReferences(*s);
    }
    for (const auto& [id, session] : catalog_.sessions()) {
      if (session->outside != nullptr) CountReferences(*session->outside);
    }
    for (const Artefact& artefact : books_.artefacts.all()) {
      for (const Extent& extent : artefact.extents) {
        ++references_[extent.page];
        ++artefacts_[extent.page];
      }
    }
    references_.erase(nullptr);  // pages that were released
    for (const auto& [id, hold] : holds_.all()) {
      for (const Page* page : hold.kept) ++keeps_[page];
      for (const Page* page : hold.referred) {
        ++references_[page];
        referred_.insert(page);
      }
    }
    for (const Page* page : pages_.parked()) {
      if (!retired_.insert(page).second) Find(NameOfPage(*page) + " is parked twice");
      if (page->keeps == 0) Find(NameOfPage(*page) + " is parked for no hold");
    }
    for (const Tenant* tenant : catalog_.tenants()) {
      for (const auto& [epoch, page] : tenant->retired.items()) {
        if (!retired_.insert(page).second) Find(NameOfPage(*page) + " is retired twice");
        if (epoch > tenant->epoch) Find(NameOfPage(*page) + " is retired in the future");
        if (page->arena != nullptr && page->arena->tenant != tenant->id) {
          Find(NameOfPage(*page) + " is retired for a tenant that is not its own");
        }
      }
    }
  }

  void CountReferences(const Sequence& s) {
    for (const Page* page : s.pages) ++references_[page];
    for (const Page* block : s.index_blocks) ++references_[block];
    for (const Extent& extent : s.extents) ++references_[extent.page];
  }

  void CheckPages() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::map<uint64_t, uint64_t> by_model;
    for (const Page& page : books_.pools.records()) {
      const uint32_t found = references_.contains(&page) ? references_[&page] : 0;
      if (page.arena == nullptr) {
        if (found != 0) Find("a freed page record is referred to " + std::to_string(found) + "x");
        if (retired_.contains(&page)) Find("a freed page record is retired");
        continue;
      }
      ++report_.pages;
      report_.bytes += page.bytes;
      ++by_model[page.model];
      const std::string name = NameOfPage(page);
      if (page.refs != found) {
        Find(name + " counts " + std::to_string(page.refs) + " references, " +
             std::to_string(found) + " were found");
      }
      if (page.artefacts != (artefacts_.contains(&page) ? artefacts_[&page] : 0)) {
        Find(name + " counts other artefacts than there are");
      }
      if (page.keeps != (keeps_.contains(&page) ? keeps_[&page] : 0)) {
        Find(name + " counts other holds than there are");
      }
      if (page.retired != retired_.contains(&page)) Find(name + ": retired flag is wrong");
      if (page.retired && (found != 0 || page.indexed)) Find(name + " is retired but reachable");
      if (!page.retired && found == 0 && !page.indexed) Find(name + " is reachable from nowhere");
      if (page.replica && !page.indexed) Find(name + " is a replica and not indexed");
      if (page.indexed && !books_.prefix.Holds(page)) {
        Find(name + " says it is in the prefix index and is not");
      }
      if (page.indexed && !page.sealed) Find(name + " is in the prefix index and not sealed");
    }
    uint64_t indexed = 0;
    for (const Page& page : books_.pools.records())
      indexed += page.arena != nullptr && page.indexed;
    if (indexed != books_.prefix.size()) {
      Find("the prefix index has " + std::to_string(books_.prefix.size()) + " entries, " +
           std::to_string(indexed) + " pages say so");
    }
    for (const auto& [id, model] : books_.models.all()) {
      if (model->pages != by_model[id]) {
        Find("model " + std::to_string(id) + " counts " + std::to_string(model->pages) +
             " pages, has " + std::to_string(by_model[id]));
      }
    }
  }

  // Pages and free extents tile each arena; arenas fill each pool.
  void CheckArenas() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::map<const Arena*, std::map<uint64_t, uint64_t>> extents;
    std::map<const Arena*, uint32_t> live;
    std::map<const Arena*, uint64_t> retired_bytes;
    for (const Page& page : books_.pools.records()) {
      if (page.arena == nullptr) continue;
      if (!extents[page.arena].emplace(page.offset, page.bytes).second) {
        Find(NameOfPage(page) + " exists twice");
      }
      live[page.arena] += page.refs > 0;
      retired_bytes[page.arena] += page.retired ? page.bytes : 0;
    }
    uint64_t taken[kMaxPools] = {}, used[kMaxPools] = {};
    for (const auto& [id, arena] : books_.pools.arenas()) {
      taken[arena->pool.index()] += arena->memory.bytes;
      used[arena->pool.index()] += arena->extents.used();
      auto& tiles = extents[arena.get()];
      for (const auto& [offset, bytes] : arena->extents.free_extents()) {
        if (!tiles.emplace(offset, bytes).second) {
          Find("arena " + std::to_string(id) + ": free and taken at " + std::to_string(offset));
        }
      }
      uint64_t end = 0;
      for (const auto& [offset, bytes] : tiles) {
        if (offset != end) {
          Find("arena " + std::to_string(id) + ": expected an extent at " + std::to_string(end) +
               ", the next is at " + std::to_string(offset));
        }
        end = offset + bytes;
      }
      if (end != arena->memory.bytes) Find("arena " + std::to_string(id) + " is not covered");
      if (arena->live != live[arena.get()]) {
        Find("arena " + std::to_string(id) + " counts " + std::to_string(arena->live) +
             " pages in use, has " + std::to_string(live[arena.get()]));
      }
      if (arena->retired != retired_bytes[arena.get()]) {
        Find("arena " + std::to_string(id) + " counts " + std::to_string(arena->retired) +
             " bytes retired, has " + std::to_string(retired_bytes[arena.get()]));
      }
      const bool session = arena->writer != kOrphan && arena->writer != kDaemon;
      if (session && !catalog_.sessions().contains(arena->writer)) {
        Find("arena " + std::to_string(id) + " is written by session " +
             std::to_string(arena->writer) + ", which is gone");
      }
    }
    for (const PoolId pool : books_.memory.ids()) {
      if (taken[pool.index()] != books_.pools.taken(pool) ||
          used[pool.index()] != books_.pools.used(pool)) {
        Find("pool '" + books_.memory.NameOfPool(pool) + "' does not add up");
      }
    }
  }

  void CheckCached() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::set<const Page*> listed;
    std::map<uint64_t, uint64_t> by_model;
    std::map<const Arena*, uint64_t> by_arena;
    uint64_t bytes[kMaxPools] = {}, pinned[kMaxPools] = {};
    for (const PoolId pool : books_.memory.ids()) {
      for (const Page* page = books_.prefix.oldest(pool); page != nullptr; page = page->newer) {
        if (!listed.insert(page).second) return Find("the list of cached pages runs in a circle");
        if (page->refs != 0 || !page->indexed) Find(NameOfPage(*page) + " is listed as cached");
        if (page->arena->pool != pool) Find(NameOfPage(*page) + " is listed in another pool");
        bytes[pool.index()] += page->bytes;
        ++by_model[page->model];
        by_arena[page->arena] += page->bytes;
      }
    }
    for (const auto& [id, arena] : books_.pools.arenas()) {
      if (arena->cached != by_arena[arena.get()]) {
        Find("cached bytes of arena " + std::to_string(id) + " do not add up");
      }
    }
    for (const auto& [id, model] : books_.models.all()) {
      if (by_model[id] != books_.prefix.cached_pages(id)) {
        Find("cached pages of model " + std::to_string(id) + " do not add up");
      }
    }
    for (const Page& page : books_.pools.records()) {
      if (page.arena == nullptr || !page.indexed || page.refs > 0) continue;
      if (page.pinned == listed.contains(&page)) {
        Find(NameOfPage(page) +
             (page.pinned ? " is pinned and listed as cached" : " is cached and not listed"));
      }
      if (page.pinned) pinned[page.arena->pool.index()] += page.bytes;
    }
    for (const PoolId pool : books_.memory.ids()) {
      if (bytes[pool.index()] != books_.prefix.cached_bytes(pool)) {
        Find("cached bytes of pool '" + books_.memory.NameOfPool(pool) + "' do not add up");
      }
      if (pinned[pool.index()] != books_.prefix.pinned_bytes(pool)) {
        Find("pinned bytes of pool '" + books_.memory.NameOfPool(pool) + "' do not add up");
      }
    }
  }

  void CheckPins() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::map<PageKey, uint32_t> keys;
    for (const auto& [id, pin] : pins_.all()) {
      for (const PageKey& key : pin.pages) ++keys[key];
      for (const PageKey& key : pin.index_blocks) ++keys[key];
      for (const PageKey& key : pin.artefact) ++keys[key];
    }
    if (keys.size() != books_.prefix.pinned().size()) Find("pinned keys do not add up");
    for (const auto& [key, n] : books_.prefix.pinned()) {
      if (!keys.contains(key) || keys[key] != n) Find("a key counts other pins than there are");
    }
    for (const Page& page : books_.pools.records()) {
      const bool kept = page.indexed && !page.replica && keys.contains(page.key);
      if (page.arena == nullptr || page.pinned == kept) continue;
      Find(NameOfPage(page) + ": pinned flag is wrong");
    }
  }

  void CheckSessions() KVS_NO_THREAD_SAFETY_ANALYSIS {
    size_t owned = 0;
    for (const auto& [id, session] : catalog_.sessions()) {
      if (session->fenced) {
        if (!session->sequences.empty())
          Find("session " + std::to_string(id) + " ended with leases");
        continue;
      }
      ++report_.sessions;
      owned += session->sequences.size();
      // In a long request tables may be behind, or not published yet.
      if (session->long_request != std::thread::id()) continue;
      uint64_t access_counters = 0;
      for (const auto& [sequence, s] : session->sequences) {
        CheckSequence(*session, *s);
        access_counters += SessionMemory::CounterCost(s->access_counters);
      }
      for (const auto& [epoch, slice] : session->retired_counters.items()) {
        access_counters += SessionMemory::CounterCost(slice);
      }
      const std::string name = "session " + std::to_string(id);
      if (access_counters != session->memory->counters_used())
        Find(name + ": access counters do not add up");
      if (session->memory->live_tables() !=
          session->sequences.size() + session->retired_tables.items().size()) {
        Find(name + ": tables do not add up");
      }
      if (!session->memory->TablesSane()) Find(name + ": the table segment's heap is broken");
    }
    if (owned != catalog_.sequences().size()) {
      Find(std::to_string(catalog_.sequences().size()) + " sequences, " + std::to_string(owned) +
           " owned by live sessions");
    }
  }

  void CheckSequence(const Session& session, const Sequence& s) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const std::string name = "sequence " + std::to_string(s.id);
    const shm::SequenceSlot& slot = session.memory->tables()->slots[s.slot];
    if (s.session != session.id || slot.sequence_id.load() != s.id ||
        slot.table_offset.load() != session.memory->OffsetOf(s.table)) {
      Find(name + ": its slot names another table");
    }
    if (slot.truncate_to.load() != (s.truncate_to ? uint64_t{*s.truncate_to} + 1 : 0)) {
      Find(name + ": its slot asks for another truncation");
    }
    if (s.table->pages.load() != s.pages.size() ||
        s.table->index_blocks.load() != s.index_blocks.size()) {
      return Find(name + ": its table has another length");
    }
    if (s.tokens > s.capacity_tokens()) Find(name + " has more tokens than pages");
    if (s.tail.size() != s.tokens % s.page_tokens()) Find(name + ": its tail has a wrong length");
    const shm::PageEntry* entries = shm::Entries(s.table);
    for (size_t i = 0; i < s.pages.size(); ++i) {
      if (s.pages[i] == nullptr) {
        CheckAbsent(s, i);
      } else {
        CheckEntry(session, s, entries[i], *s.pages[i]);
      }
    }
    CheckExtents(session, s);
    entries += s.table->page_capacity;
    for (size_t i = 0; i < s.index_blocks.size(); ++i) {
      CheckEntry(session, s, entries[i], *s.index_blocks[i]);
    }
  }

  void CheckAbsent(const Sequence& s, size_t i) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const std::string name = "sequence " + std::to_string(s.id) + ", page " + std::to_string(i);
    if (shm::Entries(s.table)[i].flags != shm::kPageAbsent) {
      Find(name + " was released and its table names it");
    }
    if ((i + 1) * s.page_tokens() > s.tokens) Find(name + " was released before it was full");
  }

  void CheckExtents(const Session& session, const Sequence& s) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (s.table->extent_count != s.extents.size()) {
      return Find("sequence " + std::to_string(s.id) + ": its table has other extents");
    }
    const shm::ExtentEntry* entries = shm::Extents(s.table);
    for (size_t i = 0; i < s.extents.size(); ++i) {
      const Extent& e = s.extents[i];
      const shm::ExtentEntry& t = entries[i];
      CheckEntry(session, s, {t.arena, shm::kPageSealed, t.tier, t.offset}, *e.page);
      const std::string name = "sequence " + std::to_string(s.id) + ", extent " + std::to_string(i);
      if (t.bytes != e.bytes || t.begin != e.tokens.begin || t.end != e.tokens.end) {
        Find(name + ": its table says something else");
      }
      if (e.bytes > e.page->bytes) Find(name + " is larger than its memory");
      if (!e.page->sealed || e.page->indexed) Find(name + " is no extent");
    }
  }

  void CheckEntry(const Session& session, const Sequence& s, const shm::PageEntry& entry,
                  const Page& page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const std::string name = "sequence " + std::to_string(s.id) + ", " + NameOfPage(page);
    if (page.arena == nullptr) return Find(name + " is in its table");
    if (entry.arena != page.arena->id || entry.offset != page.offset ||
        entry.tier != static_cast<uint16_t>(page.arena->tier)) {
      Find(name + ": its table names another place");
    }
    if (page.arena->tenant != session.tenant->id) Find(name + " belongs to another tenant");
    if (page.arena->tier == Tier::kDevice && page.arena->pool != PoolId::Device(session.device)) {
      Find(name + " lies on another device than its session's");
    }
    if (!session.granted.contains(page.arena->id)) Find(name + ": the arena was not granted");
    // Not sealed and referred to twice: whoever writes must have been told to ask first.
    const bool told = (entry.flags & shm::kPageShared) != 0;
    if (!page.sealed && !told && (page.refs > 1 || page.arena->writer != s.session)) {
      if (!referred_.contains(&page)) Find(name + " is shared and its table calls it private");
    }
  }

  const Books& books_;
  const SessionCatalog& catalog_;
  const PageReferences& pages_;
  const PageHolds& holds_;
  const PrefixPins& pins_;
  AuditReport report_;
  std::unordered_map<const Page*, uint32_t> references_, keeps_, artefacts_;
  std::set<const Page*> retired_, referred_;  // referred to by holds
};

AuditReport Inspection::Audit() const {
  StoreLock lock(books_.mu);
  return Auditor(books_, catalog_, references_, holds_, pins_).Run();
}

}  // namespace kvstrata
