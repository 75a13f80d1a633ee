// SPDX-License-Identifier: Apache-2.0
// PrefixIndex: sealed pages and complete index blocks by key, and the list of those that nobody
// uses (cached), by pool, oldest first. Pages of a pinned key are in no list while nobody uses
// them.
//
// A key has one page, and with several devices perhaps replicas in other pools: what a session of
// another device asked for. They are cached and evicted like pages, but never pinned; when the page
// goes, the oldest replica takes its place.
//
// Holds no reference: a page here with refs == 0 is cached and may be evicted; the store retires
// it. A sequence releases its pages from the last to the first, so of a prefix nobody uses the end
// is evicted before its beginning.
// Thread-safety: none; guarded by the store's lock. Cost: one hash look-up an operation.
#pragma once

#include <array>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdlib>
#include <memory>
#include <vector>

#include "server/store/pages/page.h"

namespace kvstrata {

// PageMap: pages by key, for look-ups of many keys in a row.
//
// Open addressing with linear probing. A slot is one cache line and has all that a look-up asks, so
// that a key costs one miss, which Prefetch hides behind the keys before it; the table lies in huge
// pages, or the TLB would miss as often as the cache. Thread-safety: none; guarded by the store's
// lock. Cost: 64 to 171 bytes a page; growing moves all.
class PageMap {
 public:
  struct alignas(64) Slot {
    PageKey key{};
    Page* page = nullptr;  // null: the slot is free
    uint32_t tenant = 0;   // that of the page's arena
    Tier tier = Tier::kDevice;
  };

  PageMap() { Allocate(kFirstSlots); }

  // Null: no page has the key. Valid until the next change.
  const Slot* Find(const PageKey& key) const {
    for (size_t i = HomeOf(key);; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (slot.page == nullptr) return nullptr;
      if (slot.key == key) return &slot;
    }
  }
  void Prefetch(const PageKey& key) const { __builtin_prefetch(&slots_[HomeOf(key)]); }

  // False if the key is there.
  bool Insert(const PageKey& key, Page* page);
  // REQUIRES: the key is there.
  void Replace(const PageKey& key, Page* page);
  void Erase(const PageKey& key);

  size_t size() const { return size_; }
  // visit(Page*) for all, in no order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (size_t i = 0; i <= mask_; ++i) {
      if (slots_[i].page != nullptr) visit(slots_[i].page);
    }
  }

 private:
  static constexpr size_t kFirstSlots = 64;
  struct Freed {
    void operator()(Slot* slots) const { std::free(slots); }
  };

  size_t HomeOf(const PageKey& key) const { return PageKeyHash{}(key)&mask_; }
  void Allocate(size_t slots);
  void Grow();
  static void Fill(Slot* slot, const PageKey& key, Page* page);

  std::unique_ptr<Slot[], Freed> slots_;
  size_t mask_ = 0;
  size_t size_ = 0;
};

class PrefixIndex {
 public:
  // Null if there is none.
  Page* Find(const PageKey& key) const;
  // One in memory of the host or of `device`: the page, or a replica; null if there is none.
  Page* FindFor(uint32_t device, const PageKey& key) const;
  // For look-ups that ask where, not what.
  const PageMap& by_key() const { return pages_; }

  // Enters a sealed, referenced page by its key; false if another page has that key.
  bool Insert(Page* page);
  // Enters one beside the page of its key. REQUIRES: there is a page of that key.
  void InsertReplica(Page* page);
  // `copy` takes the place of `page`; one that nobody uses is the newest of its pool. REQUIRES:
  // page is here.
  void Replace(Page* page, Page* copy);
  // REQUIRES: page is here.
  void Erase(Page* page);

  // What is under this key, now or later, is not evicted until as many Unpin.
  void Pin(const PageKey& key);
  void Unpin(const PageKey& key);
  const auto& pinned() const { return pinned_; }  // how often, by key

  // The last reference went, or the first came. REQUIRES: page is here.
  void MarkCached(Page* page);
  void MarkUsed(Page* page);

  // All of them, used or not, in no order.
  std::vector<Page*> PagesIn(PoolId pool) const;
  // Null: nobody leaves any unused there. The next one is Page::newer, or older.
  Page* oldest(PoolId pool) const { return lists_[pool.index()].oldest; }
  Page* newest(PoolId pool) const { return lists_[pool.index()].newest; }
  // Makes a cached page with credits the newest, with one credit less; returns who followed it, or
  // the page itself if it was the newest.
  Page* Spare(Page* page);
  size_t size() const { return pages_.size() + replica_count_; }
  size_t replicas() const { return replica_count_; }
  // Whether this page is here, under its key.
  bool Holds(const Page& page) const;
  uint64_t cached_bytes(PoolId pool) const { return cached_bytes_[pool.index()]; }
  // A model's cached pages in all pools.
  uint64_t cached_pages(uint64_t model) const {
    const auto found = cached_pages_.find(model);
    return found == cached_pages_.end() ? 0 : found->second;
  }
  // Pages that nobody uses and a pin keeps; not among the cached ones.
  uint64_t pinned_bytes(PoolId pool) const { return pinned_bytes_[pool.index()]; }

 private:
  struct List {
    Page* oldest = nullptr;
    Page* newest = nullptr;
  };

  List& ListOf(const Page& page) { return lists_[page.arena->pool.index()]; }
  // Takes a replica out of its key's list.
  void TakeReplica(const Page* page);
  void Append(Page* page);
  void Unlink(Page* page);
  void SetPinned(const PageKey& key, bool pinned);

  PageMap pages_;
  boost::unordered_flat_map<PageKey, std::vector<Page*>, PageKeyHash> replicas_;  // none is empty
  size_t replica_count_ = 0;
  boost::unordered_flat_map<PageKey, uint32_t, PageKeyHash> pinned_;
  std::array<List, kMaxPools> lists_{};
  std::array<uint64_t, kMaxPools> cached_bytes_{}, pinned_bytes_{};
  std::unordered_map<uint64_t, uint64_t> cached_pages_;  // by model; none: none
};

}  // namespace kvstrata
