#include "server/store/prefix_index.h"

#include <utility>

#include "base/check.h"

namespace kvstrata {

Page* PrefixIndex::Find(const PageKey& key) const {
  const PageMap::Slot* const slot = pages_.Find(key);
  return slot == nullptr ? nullptr : slot->page;
}

std::vector<Page*> PrefixIndex::PagesIn(Tier tier) const {
  std::vector<Page*> found;
  pages_.ForEach([&](Page* page) {
    if (page->arena->tier == tier) found.push_back(page);
  });
  return found;
}

bool PrefixIndex::Insert(Page* page) {
  KVS_CHECK(page->sealed && !page->indexed && page->refs > 0);
  if (!pages_.Insert(page->key, page)) return false;
  page->indexed = true;
  page->pinned = pinned_.contains(page->key);
  return true;
}

void PrefixIndex::Replace(Page* page, Page* copy) {
  KVS_CHECK(page->indexed && copy->sealed && copy->key == page->key);
  pages_.Replace(page->key, copy);
  if (page->refs == 0) MarkUsed(page);
  page->indexed = false;
  copy->indexed = true;
  copy->pinned = std::exchange(page->pinned, false);
  copy->stored = page->stored;
  if (copy->refs == 0) MarkCached(copy);
}

void PrefixIndex::Erase(Page* page) {
  KVS_CHECK(page->indexed);
  if (page->refs == 0) MarkUsed(page);
  pages_.Erase(page->key);
  page->indexed = page->pinned = false;
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
  KVS_CHECK(page->indexed && page->refs == 0 && !page->pinned && page->chances > 0);
  --page->chances;
  Page* const next = page->newer;
  if (next == nullptr) return page;
  Unlink(page);
  Append(page);
  return next;
}

void PrefixIndex::MarkCached(Page* page) {
  KVS_CHECK(page->indexed && page->refs == 0);
  if (page->pinned) {
    pinned_bytes_[static_cast<int>(page->arena->tier)] += page->bytes;
    return;
  }
  Append(page);
  cached_bytes_[static_cast<int>(page->arena->tier)] += page->bytes;
}

void PrefixIndex::MarkUsed(Page* page) {
  KVS_CHECK(page->indexed);
  if (page->pinned) {
    pinned_bytes_[static_cast<int>(page->arena->tier)] -= page->bytes;
    return;
  }
  Unlink(page);
  cached_bytes_[static_cast<int>(page->arena->tier)] -= page->bytes;
}

}  // namespace kvstrata
