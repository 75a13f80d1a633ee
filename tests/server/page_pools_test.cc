// SPDX-License-Identifier: Apache-2.0
// In which order pages are taken and released.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "server/memory/memory_resource.h"
#include "server/store/pages/page.h"

namespace kvstrata {
namespace {

constexpr PoolId kDevice = PoolId::Device(0), kHost = PoolId::Host();
constexpr uint64_t kPage = 8192, kArena = 1 << 20;
constexpr uint32_t kPages = 48, kWriter = 1;
constexpr size_t kTogether = 16;  // change places with each other only

class PagePoolsTest : public ::testing::Test {
 protected:
  PagePoolsTest() {
    EXPECT_TRUE(pools_.AddArena(kDevice, 0, kWriter, kArena));
    EXPECT_TRUE(pools_.AddArena(kHost, 0, kWriter, kArena));
  }

  static std::vector<StoreDevice> OneDevice() {
    std::vector<StoreDevice> devices;
    devices.push_back({"one", NewEmulatedDevice()});
    return devices;
  }
  std::vector<Page*> Take(PoolId pool, uint32_t n) {
    std::vector<Page*> pages;
    EXPECT_EQ(pools_.Take(pool, 0, kWriter, kPage, n, &pages), n);
    return pages;
  }
  // The pages' places in units of a page, from the first one's.
  static std::vector<uint64_t> Places(std::span<Page* const> pages, uint64_t first) {
    std::vector<uint64_t> places;
    for (const Page* page : pages) places.push_back(page->offset / kPage - first);
    return places;
  }
  static std::vector<uint64_t> Ascending(size_t n) {
    std::vector<uint64_t> places(n);
    std::iota(places.begin(), places.end(), 0);
    return places;
  }
  size_t FreeExtents() const {
    size_t n = 0;
    for (const auto& [id, arena] : pools_.arenas()) n += arena->extents.free_extents().size();
    return n;
  }

  PageMemory memory_{OneDevice(), kArena, NewHostMemory(), kArena};
  PagePools pools_{&memory_, kArena};
};

TEST_F(PagePoolsTest, PagesOfADeviceLieSideBySideButNotInOrder) {
  const std::vector<Page*> pages = Take(kDevice, kPages);
  std::vector<std::vector<uint64_t>> orders;
  for (size_t i = 0; i < kPages; i += kTogether) {
    orders.push_back(Places(std::span(pages).subspan(i, kTogether), i));
    EXPECT_NE(orders.back(), Ascending(kTogether)) << "from page " << i;
    EXPECT_TRUE(std::ranges::is_permutation(orders.back(), Ascending(kTogether)));
  }
  EXPECT_NE(orders[0], orders[1]);
  pools_.Free(pages);
}

TEST_F(PagePoolsTest, TheNextPagesHaveAnotherOrder) {
  const std::vector<Page*> first = Take(kDevice, kTogether), second = Take(kDevice, kTogether);
  EXPECT_NE(Places(first, 0), Places(second, kTogether));
  pools_.Free(first);
  pools_.Free(second);
}

TEST_F(PagePoolsTest, PagesOfTheHostLieInOrder) {
  const std::vector<Page*> pages = Take(kHost, kPages);
  EXPECT_EQ(Places(pages, 0), Ascending(kPages));
  pools_.Free(pages);
}

TEST_F(PagePoolsTest, WhatEndsASequenceLeavesOnePlaceBehind) {
  const size_t before = FreeExtents();
  std::vector<Page*> pages = Take(kDevice, kPages);
  const std::vector<Page*> end(pages.begin() + 2 * kTogether, pages.end());
  pages.resize(2 * kTogether);
  pools_.Free(end);
  EXPECT_EQ(FreeExtents(), before);
  std::ranges::reverse(pages);
  pools_.Free(pages);
  EXPECT_EQ(FreeExtents(), before);
}

}  // namespace
}  // namespace kvstrata
