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
  for (const auto& [key, page] : pages_) {
    if (page->arena->tier == tier) found.push_back(page);
  }
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
  KVS_CHECK(page->indexed && copy->sealed && copy->refs > 0 && copy->key == page->key);
  pages_.Replace(page->key, copy);
  if (page->refs == 0) MarkUsed(page);
  page->indexed = false;
  copy->indexed = true;
  copy->pinned = std::exchange(page->pinned, false);
  copy->stored = page->stored;
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

void PrefixIndex::MarkCached(Page* page) {
  KVS_CHECK(page->indexed && page->refs == 0);
  if (page->pinned) {
    pinned_bytes_[static_cast<int>(page->arena->tier)] += page->bytes;
    return;
  }
  page->older = newest_;
  page->newer = nullptr;
  (newest_ != nullptr ? newest_->newer : oldest_) = page;
  newest_ = page;
  cached_bytes_[static_cast<int>(page->arena->tier)] += page->bytes;
}

void PrefixIndex::MarkUsed(Page* page) {
  KVS_CHECK(page->indexed);
  if (page->pinned) {
    pinned_bytes_[static_cast<int>(page->arena->tier)] -= page->bytes;
    return;
  }
  (page->older != nullptr ? page->older->newer : oldest_) = page->newer;
  (page->newer != nullptr ? page->newer->older : newest_) = page->older;
  page->older = page->newer = nullptr;
  cached_bytes_[static_cast<int>(page->arena->tier)] -= page->bytes;
}

}  // namespace kvstrata
