// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/page_map.h"

#include <sys/mman.h>

#include <cstdlib>
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

}  // namespace kvstrata
