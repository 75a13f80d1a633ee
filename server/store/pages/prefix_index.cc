// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/prefix_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvstrata {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

void PageMap::Allocate(size_t slots) {
  const size_t bytes = slots * sizeof(Slot);
  const size_t alignment = bytes < kHugePage ? alignof(Slot) : kHugePage;
  void* memory = std::aligned_alloc(alignment, bytes);
  KVS_CHECK(memory != nullptr);
  if (bytes >= kHugePage) (void)madvise(memory, bytes, MADV_HUGEPAGE);  // advice
  slots_.reset(new (memory) Slot[slots]);
  mask_ = slots - 1;
}

void PageMap::Fill(Slot* slot, const PageKey& key, Page* page) {
  slot->key = key;
  slot->page = page;
  slot->tenant = page->arena->tenant;
  slot->tier = page->arena->tier;
}

bool PageMap::Insert(const PageKey& key, Page* page) {
  if (4 * (size_ + 1) > 3 * (mask_ + 1)) Grow();
  size_t i = HomeOf(key);
  for (; slots_[i].page != nullptr; i = (i + 1) & mask_) {
    if (slots_[i].key == key) return false;
  }
  Fill(&slots_[i], key, page);
  ++size_;
  return true;
}

void PageMap::Replace(const PageKey& key, Page* page) {
  const Slot* slot = Find(key);
  KVS_CHECK(slot != nullptr);
  Fill(&slots_[static_cast<size_t>(slot - slots_.get())], key, page);
}

void PageMap::Erase(const PageKey& key) {
  const Slot* slot = Find(key);
  KVS_CHECK(slot != nullptr);
  auto hole = static_cast<size_t>(slot - slots_.get());
  // What was pushed on by the one that goes moves back, so that no probe ends before its key.
  for (size_t i = (hole + 1) & mask_; slots_[i].page != nullptr; i = (i + 1) & mask_) {
    const size_t pushed = (i - HomeOf(slots_[i].key)) & mask_;
    if (pushed < ((i - hole) & mask_)) continue;
    slots_[hole] = slots_[i];
    hole = i;
  }
  slots_[hole] = {};
  --size_;
}

void PageMap::Grow() {
  const size_t before = mask_ + 1;
  const auto old = std::exchange(slots_, nullptr);
  Allocate(2 * before);
  size_ = 0;
  for (size_t i = 0; i < before; ++i) {
    if (old[i].page != nullptr) (void)Insert(old[i].key, old[i].page);
  }
}

Page* PrefixIndex::Find(const PageKey& key) const {
  const PageMap::Slot* const slot = pages_.Find(key);
  return slot == nullptr ? nullptr : slot->page;
}

Page* PrefixIndex::FindFor(uint32_t device, const PageKey& key) const {
  const auto reachable = [device](const Page* page) {
    return page->arena->tier == Tier::kHost || page->arena->pool == PoolId::Device(device);
  };
  Page* const page = Find(key);
  if (page == nullptr || reachable(page)) return page;
  const auto replicas = replicas_.find(key);
  if (replicas == replicas_.end()) return nullptr;
  const auto found = std::ranges::find_if(replicas->second, reachable);
  return found == replicas->second.end() ? nullptr : *found;
}

bool PrefixIndex::Holds(const Page& page) const {
  if (!page.replica) return Find(page.key) == &page;
  const auto replicas = replicas_.find(page.key);
  return replicas != replicas_.end() && std::ranges::count(replicas->second, &page) == 1;
}

std::vector<Page*> PrefixIndex::PagesIn(PoolId pool) const {
  std::vector<Page*> found;
  const auto visit = [&](Page* page) {
    if (page->arena->pool == pool) found.push_back(page);
  };
  pages_.ForEach(visit);
  for (const auto& [key, replicas] : replicas_) std::ranges::for_each(replicas, visit);
  return found;
}

bool PrefixIndex::Insert(Page* page) {
  KVS_CHECK(page->sealed && !page->indexed && page->refs > 0);
  if (!pages_.Insert(page->key, page)) return false;
  page->indexed = true;
  page->pinned = pinned_.contains(page->key);
  return true;
}

void PrefixIndex::InsertReplica(Page* page) {
  KVS_CHECK(page->sealed && !page->indexed && page->refs > 0 && Find(page->key) != nullptr);
  replicas_[page->key].push_back(page);
  ++replica_count_;
  page->indexed = page->replica = true;
}

void PrefixIndex::TakeReplica(const Page* page) {
  const auto replicas = replicas_.find(page->key);
  KVS_CHECK(replicas != replicas_.end() && std::erase(replicas->second, page) == 1);
  --replica_count_;
  if (replicas->second.empty()) replicas_.erase(replicas);
}

void PrefixIndex::Replace(Page* page, Page* copy) {
  KVS_CHECK(page->indexed && copy->sealed && copy->key == page->key);
  if (page->replica) {
    std::ranges::replace(replicas_.at(page->key), page, copy);
  } else {
    pages_.Replace(page->key, copy);
  }
  if (page->refs == 0) MarkUsed(page);
  page->indexed = false;
  copy->indexed = true;
  copy->replica = std::exchange(page->replica, false);
  copy->pinned = std::exchange(page->pinned, false);
  copy->stored = page->stored;
  if (copy->refs == 0) MarkCached(copy);
}

void PrefixIndex::Erase(Page* page) {
  KVS_CHECK(page->indexed);
  if (page->refs == 0) MarkUsed(page);
  const auto replicas = page->replica ? replicas_.end() : replicas_.find(page->key);
  if (page->replica) {
    TakeReplica(page);
  } else if (replicas == replicas_.end()) {
    pages_.Erase(page->key);
  } else {
    Page* const next = replicas->second.front();
    if (next->refs == 0) MarkUsed(next);
    TakeReplica(next);
    pages_.Replace(page->key, next);
    next->replica = false;
    next->pinned = page->pinned;
    if (next->refs == 0) MarkCached(next);
  }
  page->indexed = page->replica = page->pinned = false;
}

void PrefixIndex::Pin(const PageKey& key) {
  if (pinned_[key]++ == 0) SetPinned(key, true);
}

void PrefixIndex::Unpin(const PageKey& key) {
  const auto it = pinned_.find(key);
  KVS_CHECK(it != pinned_.end());
  if (--it->second > 0) return;
  pinned_.erase(it);
  SetPinned(key, false);
}

void PrefixIndex::SetPinned(const PageKey& key, bool pinned) {
  Page* page = Find(key);
  if (page == nullptr) return;
  if (page->refs == 0) MarkUsed(page);
  page->pinned = pinned;
  if (page->refs == 0) MarkCached(page);
}

void PrefixIndex::Append(Page* page) {
  List& list = ListOf(*page);
  page->older = list.newest;
  page->newer = nullptr;
  (list.newest != nullptr ? list.newest->newer : list.oldest) = page;
  list.newest = page;
}

void PrefixIndex::Unlink(Page* page) {
  List& list = ListOf(*page);
  (page->older != nullptr ? page->older->newer : list.oldest) = page->newer;
  (page->newer != nullptr ? page->newer->older : list.newest) = page->older;
  page->older = page->newer = nullptr;
}

Page* PrefixIndex::Spare(Page* page) {
  KVS_CHECK(page->indexed && page->refs == 0 && !page->pinned && page->credits > 0);
  --page->credits;
  Page* const next = page->newer;
  if (next == nullptr) return page;
  Unlink(page);
  Append(page);
  return next;
}

void PrefixIndex::MarkCached(Page* page) {
  KVS_CHECK(page->indexed && page->refs == 0);
  if (page->pinned) {
    pinned_bytes_[page->arena->pool.index()] += page->bytes;
    return;
  }
  Append(page);
  cached_bytes_[page->arena->pool.index()] += page->bytes;
  page->arena->cached += page->bytes;
  ++cached_pages_[page->model];
}

void PrefixIndex::MarkUsed(Page* page) {
  KVS_CHECK(page->indexed);
  if (page->pinned) {
    pinned_bytes_[page->arena->pool.index()] -= page->bytes;
    return;
  }
  Unlink(page);
  cached_bytes_[page->arena->pool.index()] -= page->bytes;
  page->arena->cached -= page->bytes;
  const auto found = cached_pages_.find(page->model);
  KVS_CHECK(found != cached_pages_.end());
  if (--found->second == 0) cached_pages_.erase(found);
}

}  // namespace kvstrata
