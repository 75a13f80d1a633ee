// SPDX-License-Identifier: Apache-2.0
// Refs of promote and rebase on a small cache: what the header promises of slots, entries, owners
// and bytes, after each of many random selections, whose pages move in between.
#include <algorithm>

#include "kernels/ops/promote/promote.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayers = 2, kLayer = 1, kHeads = 2, kPages = 12, kSlots = 4, kPageTokens = 16;
constexpr int64_t kHeadBytes = kPageTokens * 32, kLayerBytes = 2 * kHeads * kHeadBytes;

class SmallCache {
 public:
  explicit SmallCache(Random& random)
      : memory_(2 * kPages * kLayers * kLayerBytes), slots_(kLayers * kSlots * kLayerBytes) {
    for (std::byte& b : memory_) b = static_cast<std::byte>(random.Below(256));
  }
  // Page `page` lies at one of two places; `on_host` in the host's memory.
  void Move(int page, bool on_host) {
    place_[page] ^= 1;
    tagged_[page] = Address(page) | (on_host ? kHostPage : 0);
  }
  void Rebase() {
    RebaseRef({Hot(), tagged_, 0, kPages, kLayers, kHeads, kLayerBytes});
    for (int page = 0; page < kPages; ++page) EXPECT_EQ(pages_[page], tagged_[page]);
  }
  Promoted Promote(const std::vector<int32_t>& units, int32_t now) {
    const HotPages hot = Hot();
    const int32_t sink_end = 16, recent_begin = (kPages - 2) * kPageTokens;
    const int32_t committed = (kPages - 1) * kPageTokens + 3;
    const auto count = static_cast<int32_t>(units.size());
    PromoteBatch w;
    w.layer.page_tokens = kPageTokens;
    w.layer.kv_heads = kHeads;
    w.layer.key_offset = kLayer * kLayerBytes;
    w.layer.value_offset = w.layer.key_offset + kHeads * kHeadBytes;
    w.layer.head_stride = kHeadBytes;
    w.layer.hot = &hot;
    w.layer.hot_row = kLayer * kHeads;
    w.selection = {16, 1, count, units.data(), &count, &sink_end, &recent_begin};
    w.batch = 1;
    w.layer_bytes = kLayerBytes;
    w.tokens = &now;
    w.committed = &committed;
    return PromoteRef(w);
  }
  // The slot of a page in a row; -1: none.
  int SlotOf(int row, int page) const {
    const int32_t* const own = owners_ + row * kSlots;
    const int32_t* const at = std::find(own, own + kSlots, page + 1);
    return at == own + kSlots ? -1 : static_cast<int>(at - own);
  }
  bool IsOnHost(int page) const { return (pages_[page] & kHostPage) != 0; }
  int32_t Stamp(int row, int slot) const { return stamps_[row * kSlots + slot]; }
  // Entries name slots that hold the page's slice, or the page.
  void ExpectEntries() const {
    for (int row = 0; row < kLayers * kHeads; ++row) {
      const int head = row % kHeads, layer = row / kHeads;
      for (int page = 0; page < kPages; ++page) {
        const uint64_t own = pages_[page] & ~kHostPage, entry = entries_[row * kPages + page];
        if (SlotOf(row, page) < 0) {
          EXPECT_EQ(entry, own);
          continue;
        }
        for (const int64_t values : {0, kHeads}) {
          const int64_t at = layer * kLayerBytes + (values + head) * kHeadBytes;
          EXPECT_EQ(std::memcmp(reinterpret_cast<const void*>(entry + static_cast<uint64_t>(at)),
                                reinterpret_cast<const void*>(own + static_cast<uint64_t>(at)),
                                kHeadBytes),
                    0)
              << "row " << row << " page " << page;
        }
      }
    }
  }

 private:
  uint64_t Address(int page) const {
    return reinterpret_cast<uint64_t>(memory_.data()) +
           static_cast<uint64_t>((2 * page + place_[page]) * kLayers * kLayerBytes);
  }
  HotPages Hot() {
    return {entries_, pages_, reinterpret_cast<uint64_t>(slots_.data()), owners_, stamps_,
            kPages,   kSlots};
  }

  std::vector<std::byte> memory_, slots_;
  int place_[kPages] = {};
  uint64_t tagged_[kPages] = {}, pages_[kPages] = {}, entries_[kLayers * kHeads * kPages] = {};
  int32_t owners_[kLayers * kHeads * kSlots] = {}, stamps_[kLayers * kHeads * kSlots] = {};
};

// Pages of the layer's rows that have slots, with their stamps, by head.
using Placed = std::vector<std::pair<int, int32_t>>;
Placed PlacedIn(const SmallCache& cache, int head) {
  Placed placed;
  for (int page = 0; page < kPages; ++page) {
    const int row = kLayer * kHeads + head, slot = cache.SlotOf(row, page);
    if (slot >= 0) placed.emplace_back(page, cache.Stamp(row, slot));
  }
  return placed;
}

// What a head has after a promotion of `wanted` at `now`.
void ExpectPromoted(const SmallCache& cache, int head, const Placed& before,
                    const std::vector<int32_t>& wanted, int32_t now) {
  size_t placed = 0;
  int32_t oldest_left = now, youngest_gone = 0;
  const Placed after = PlacedIn(cache, head);
  for (const auto& [page, stamp] : after) {
    if (std::ranges::find(wanted, page) == wanted.end()) {
      oldest_left = std::min(oldest_left, stamp);
      continue;
    }
    ++placed;
    EXPECT_EQ(stamp, now);
  }
  EXPECT_EQ(placed, std::min<size_t>(wanted.size(), kSlots));
  // What was selected stays; of the rest nothing that stays is older than what went.
  for (const auto& [page, stamp] : before) {
    const auto same = [page = page](const auto& p) { return p.first == page; };
    if (std::ranges::any_of(after, same)) continue;
    EXPECT_TRUE(std::ranges::find(wanted, page) == wanted.end()) << page;
    youngest_gone = std::max(youngest_gone, stamp);
  }
  EXPECT_LE(youngest_gone, oldest_left);
}

TEST(PromoteRef, KeepsWhatWasSelectedLast) {
  Random random;
  SCOPED_TRACE(random.Trace());
  SmallCache cache(random);
  for (int page = 0; page < kPages; ++page) cache.Move(page, random.Below(4) > 0);
  cache.Rebase();
  Promoted total;
  for (int32_t now = 201; now < 500; ++now) {
    if (random.Below(5) == 0) {
      cache.Move(random.Below(kPages), random.Below(4) > 0);
      cache.Rebase();
      cache.ExpectEntries();
    }
    // Page 0 is a sink, the last but one recent and complete, the last not complete.
    std::vector<int32_t> units, wanted = {0};
    for (int page = 1; page < kPages - 2; ++page) {
      if (random.Below(4) == 0) units.push_back(page);
    }
    wanted.insert(wanted.end(), units.begin(), units.end());
    wanted.push_back(kPages - 2);
    std::erase_if(wanted, [&](int page) { return !cache.IsOnHost(page); });
    const Placed before[kHeads] = {PlacedIn(cache, 0), PlacedIn(cache, 1)};
    const Promoted done = cache.Promote(units, now);
    total.hits += done.hits;
    total.evictions += done.evictions;
    total.unplaced += done.unplaced;
    cache.ExpectEntries();
    EXPECT_EQ(cache.SlotOf(0, 0), -1);  // another layer
    for (int head = 0; head < kHeads; ++head) {
      ExpectPromoted(cache, head, before[head], wanted, now);
      EXPECT_EQ(cache.SlotOf(kLayer * kHeads + head, kPages - 1), -1);
    }
  }
  EXPECT_GT(total.hits, 100);
  EXPECT_GT(total.evictions, 50);
  EXPECT_GT(total.unplaced, 5);
}

TEST(PromoteRef, SlotsAreGivenOutByIndex) {
  Random random;
  SmallCache cache(random);
  for (int page = 0; page < kPages; ++page) cache.Move(page, page > 0 && page < kPages - 2);
  cache.Rebase();
  const int row = kLayer * kHeads;
  cache.Promote({3, 4, 5}, 201);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(cache.SlotOf(row, 3 + i), i);
  cache.Promote({4, 6}, 202);  // the free slot
  EXPECT_EQ(cache.SlotOf(row, 6), 3);
  // Slots 0 and 2 are older than 1 and 3, of which the lower one goes, too.
  cache.Promote({7, 8, 9}, 203);
  EXPECT_EQ(cache.SlotOf(row, 7), 0);
  EXPECT_EQ(cache.SlotOf(row, 8), 2);
  EXPECT_EQ(cache.SlotOf(row, 9), 1);
  EXPECT_EQ(cache.SlotOf(row, 6), 3);
}

}  // namespace
}  // namespace kvstrata::cuda
