// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/promote/promote.h"

namespace kvstrata::cuda {
namespace {

// One KV head of one sequence.
class List {
 public:
  List(const PromoteBatch& w, int b, int h)
      : w_(w), hot_(w.layer.hot[b]), sequence_(b), head_(h), now_(w.tokens[b]) {
    const int64_t row = int64_t{w.layer.hot_row} + h;
    entries_ = hot_.entries + row * hot_.page_stride;
    owners_ = hot_.owners + row * hot_.slot_count;
    stamps_ = hot_.stamps + row * hot_.slot_count;
  }

  void Promote(Promoted* done) {
    std::vector<int32_t> missing;
    std::vector<bool> is_selected(static_cast<size_t>(hot_.slot_count));
    for (const int32_t page : PagesOnHost()) {
      int32_t* const slot = std::find(owners_, owners_ + hot_.slot_count, page + 1);
      if (slot == owners_ + hot_.slot_count) {
        missing.push_back(page);
        continue;
      }
      is_selected[static_cast<size_t>(slot - owners_)] = true;
      stamps_[slot - owners_] = now_;
      ++done->hits;
    }
    const std::vector<int32_t> slots = SlotsFor(missing.size(), is_selected);
    done->unplaced += static_cast<int64_t>(missing.size() - slots.size());
    for (size_t i = 0; i < slots.size(); ++i) Place(missing[i], slots[i], done);
  }

 private:
  // Complete pages of the host's memory that the head attends, ascending.
  std::vector<int32_t> PagesOnHost() const {
    std::vector<int32_t> pages;
    const DeviceSelection& s = w_.selection;
    if (s.recent_begin[sequence_] <= s.sink_end[sequence_]) return pages;  // in full
    const int32_t page_tokens = w_.layer.page_tokens;
    const int32_t complete = w_.committed[sequence_] / page_tokens;
    for (const Run& run : AttendedRuns(s, sequence_, head_, now_)) {
      for (int32_t page = run.begin / page_tokens; page * page_tokens < run.end; ++page) {
        const bool is_on_host = page < complete && (hot_.pages[page] & kHostPage) != 0;
        if (is_on_host && (pages.empty() || pages.back() != page)) pages.push_back(page);
      }
    }
    return pages;
  }
  // Slots for up to `wanted` pages, in the order in which pages get them.
  std::vector<int32_t> SlotsFor(size_t wanted, const std::vector<bool>& is_selected) const {
    std::vector<int32_t> slots;
    for (int32_t s = 0; s < hot_.slot_count; ++s) {
      if (!is_selected[static_cast<size_t>(s)]) slots.push_back(s);
    }
    std::ranges::stable_sort(slots, {}, [this](int32_t s) { return stamps_[s]; });
    slots.resize(std::min(wanted, slots.size()));
    if (slots.empty()) return slots;
    const int32_t youngest = stamps_[slots.back()];
    std::ranges::sort(slots, {}, [&](int32_t s) { return std::pair(stamps_[s] == youngest, s); });
    return slots;
  }
  void Place(int32_t page, int32_t slot, Promoted* done) {
    if (owners_[slot] != 0) {
      const int32_t evicted = owners_[slot] - 1;
      entries_[evicted] = hot_.pages[evicted] & ~kHostPage;
      ++done->evictions;
    }
    owners_[slot] = page + 1;
    stamps_[slot] = now_;
    // An entry stands for a page: the layer's slots begin where its layer would.
    const int64_t layer = w_.layer.hot_row / w_.layer.kv_heads;
    entries_[page] = hot_.slots + static_cast<uint64_t>((layer * hot_.slot_count + slot - layer) *
                                                        w_.layer_bytes);
    for (const int64_t offset : {w_.layer.key_offset, w_.layer.value_offset}) {
      const int64_t at = offset + head_ * w_.layer.head_stride;
      std::memcpy(reinterpret_cast<std::byte*>(entries_[page]) + at,
                  reinterpret_cast<const std::byte*>(hot_.pages[page] & ~kHostPage) + at,
                  static_cast<size_t>(w_.layer.head_stride));
    }
  }

  const PromoteBatch& w_;
  const HotPages hot_;
  const int sequence_, head_;
  const int32_t now_;
  uint64_t* entries_;
  int32_t *owners_, *stamps_;
};

}  // namespace

Promoted PromoteRef(const PromoteBatch& w) {
  Promoted done;
  for (int b = 0; b < w.batch; ++b) {
    if (w.layer.hot[b].entries == nullptr) continue;
    for (int h = 0; h < w.layer.kv_heads; ++h) List(w, b, h).Promote(&done);
  }
  return done;
}

void RebaseRef(const RebaseBatch& w) {
  const HotPages& hot = w.hot;
  for (int32_t page = w.first; page < w.last; ++page) {
    if (hot.pages[page] == w.pages[page]) continue;
    hot.pages[page] = w.pages[page];
    for (int64_t row = 0; row < int64_t{w.layers} * w.kv_heads; ++row) {
      hot.entries[row * hot.page_stride + page] = w.pages[page] & ~kHostPage;
      for (int64_t s = row * hot.slot_count; s < (row + 1) * hot.slot_count; ++s) {
        if (hot.owners[s] == page + 1) hot.owners[s] = hot.stamps[s] = 0;
      }
    }
  }
}

}  // namespace kvstrata::cuda
