// SPDX-License-Identifier: Apache-2.0
// PageMap: pages by key, for look-ups of many keys in a row.
//
// Open addressing with linear probing. A slot is one cache line and has all that a look-up asks, so
// that a key costs one miss, which Prefetch hides behind the keys before it; the table lies in huge
// pages, or the TLB would miss as often as the cache. Thread-safety: none; guarded by the store's
// lock. Cost: 64 to 171 bytes a page; growing moves all.
#ifndef KVSTRATA_SERVER_STORE_PAGES_PAGE_MAP_H_
#define KVSTRATA_SERVER_STORE_PAGES_PAGE_MAP_H_

#include <cstdlib>
#include <memory>

#include "server/store/pages/page.h"

namespace kvstrata {

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PAGES_PAGE_MAP_H_
