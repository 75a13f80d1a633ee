// SPDX-License-Identifier: Apache-2.0
// Page keys and the prefix index.
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <deque>
#include <map>
#include <random>
#include <set>

#include "server/store/pages/prefix_index.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {
namespace {

using testing::SmallModel;
using testing::Tokens;

// Keys that crowd around both ends of the table's first slots, so that probes run on and around.
TEST(PageMap, AgreesWithAMap) {
  std::vector<std::unique_ptr<Arena>> arenas;
  for (const PoolId pool : {PoolId::Device(0), PoolId::Host()}) {
    arenas.push_back(std::make_unique<Arena>(1, pool, 7, kDaemon, MappedMemory{}));
  }
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t keys = seed % 2 == 0 ? 40 : 400;  // without growing, and with
    PageMap map;
    std::map<PageKey, Page*> model;
    std::deque<Page> pages;
    for (int step = 0; step < 4000; ++step) {
      const uint32_t i = random() % keys;
      PageKey key{};
      key[0] = static_cast<uint8_t>(i % 5 + (i % 2 == 0 ? 0 : 60));
      key[8] = static_cast<uint8_t>(i);
      key[9] = static_cast<uint8_t>(i >> 8);
      Page* page = &pages.emplace_back();
      page->arena = arenas[random() % 2].get();
      const bool there = model.contains(key);
      if (!there || random() % 4 == 0) {
        ASSERT_EQ(map.Insert(key, page), !there);
        model.emplace(key, page);
      } else if (random() % 3 == 0) {
        map.Replace(key, page);
        model[key] = page;
      } else {
        map.Erase(key);
        model.erase(key);
      }
      ASSERT_EQ(map.size(), model.size());
      const PageMap::Slot* const slot = map.Find(key);
      ASSERT_EQ(slot != nullptr, model.contains(key));
      if (step % 100 != 0) continue;
      for (const auto& [k, p] : model) {
        const PageMap::Slot* const found = map.Find(k);
        ASSERT_NE(found, nullptr);
        ASSERT_EQ(found->page, p);
        ASSERT_EQ(found->tier, p->arena->tier);
        ASSERT_EQ(found->tenant, 7u);
      }
    }
  }
}

TEST(KeyChain, EveryPartOfTheIdentityCounts) {
  std::set<PageKey> keys;
  int variants = 0;
  const auto add = [&](const std::string& tenant, const ModelDesc& model, const PageKey& parent,
                       const std::vector<int32_t>& tokens) {
    ++variants;
    keys.insert(KeyChain(tenant, model).Next(parent, tokens));
  };
  const auto with = [&](auto change) {
    ModelDesc model = SmallModel();
    change(model);
    add("uid:1", model, {}, Tokens(16));
  };
  with([](ModelDesc&) {});
  with([](ModelDesc& m) { m.digest = "other"; });
  with([](ModelDesc& m) { m.layout = "other"; });
  with([](ModelDesc& m) { m.adapter = "lora"; });
  with([](ModelDesc& m) { m.rank = 1; });
  with([](ModelDesc& m) { m.ranks = 2; });
  with([](ModelDesc& m) { m.geometry.rotary = {10000, 64}; });
  with([](ModelDesc& m) { m.geometry.rotary = {10001, 64}; });
  with([](ModelDesc& m) { m.geometry.rotary = {10000, 32}; });
  with([](ModelDesc& m) { m.geometry.rotary = {10000, 64, true}; });
  with([](ModelDesc& m) { m.geometry.dtype = DType::kF16; });
  with([](ModelDesc& m) { m.geometry.layers = 2; });
  with([](ModelDesc& m) { m.geometry.query_heads = 4; });
  with([](ModelDesc& m) { m.geometry.kv_heads = 2; });
  with([](ModelDesc& m) { m.geometry.head_dim = 128; });
  with([](ModelDesc& m) { m.geometry.scale = 0.5f; });
  with([](ModelDesc& m) { m.geometry.scale = 0.25f; });
  // Text that moves from one field to the next is another identity: fields are length-prefixed.
  with([](ModelDesc& m) { m.digest = "dige", m.layout = "st"; });
  with([](ModelDesc& m) { m.digest = "dig", m.layout = "est"; });
  add("uid:2", SmallModel(), {}, Tokens(16));
  add("uid:1", SmallModel(), PageKey{1}, Tokens(16));
  add("uid:1", SmallModel(), {}, Tokens(16, 1));
  EXPECT_EQ(keys.size(), static_cast<size_t>(variants));
  // The name and the boundaries are none of it.
  ModelDesc renamed = SmallModel();
  renamed.name = "other";
  renamed.boundary_tokens = {1};
  EXPECT_TRUE(keys.contains(KeyChain("uid:1", renamed).Next({}, Tokens(16))));
}

// A page of a version that did not look for a NaN when it was sealed lies under another key, on a
// disk or in a remote tier: nobody finds it. The encoding is written out here once more.
TEST(KeyChain, PagesThatNobodyLookedAtHaveOtherKeys) {
  const ModelDesc model = SmallModel();
  const Geometry& g = model.geometry;
  std::string shared;
  const auto add = [](std::string* to, uint8_t tag, const void* data, uint64_t bytes) {
    to->push_back(static_cast<char>(tag));
    to->append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    to->append(static_cast<const char*>(data), bytes);
  };
  const auto number = [&](uint8_t tag, std::vector<int64_t> n) {
    add(&shared, tag, n.data(), n.size() * sizeof(int64_t));
  };
  add(&shared, 1, "uid:1", 5);
  add(&shared, 2, model.digest.data(), model.digest.size());
  add(&shared, 3, model.layout.data(), model.layout.size());
  number(4, {g.layers, g.query_heads, g.kv_heads, g.head_dim, g.page_tokens, 0});
  number(5, {static_cast<int64_t>(g.dtype)});
  add(&shared, 6, model.adapter.data(), model.adapter.size());
  number(7, {model.rank, model.ranks});
  const std::string before = shared;
  number(16, {2});
  const std::vector<int32_t> tokens = Tokens(16);
  const auto key_of = [&](std::string text) {
    const PageKey none{};
    add(&text, 8, none.data(), none.size());
    add(&text, 9, tokens.data(), tokens.size() * sizeof(int32_t));
    PageKey key;
    SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), key.data());
    return key;
  };
  const PageKey key = KeyChain("uid:1", model).Next({}, tokens);
  EXPECT_EQ(key, key_of(shared));
  EXPECT_NE(key, key_of(before));
}

TEST(KeyChain, ChainsWholePagesOnly) {
  const KeyChain chain("uid:1", SmallModel());
  const std::vector<PageKey> keys = chain.Pages({}, Tokens(47));
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0], chain.Next({}, Tokens(16)));
  EXPECT_EQ(keys[1], chain.Next(keys[0], Tokens(16, 16)));
  EXPECT_EQ(chain.Pages(keys[0], Tokens(16, 16)), std::vector<PageKey>{keys[1]});
  EXPECT_TRUE(chain.Pages({}, Tokens(15)).empty());
}

TEST(IndexBlockKey, DiffersByLayoutAndPage) {
  const Geometry g = SmallModel().geometry;
  const auto layout = [&](const char* plan) { return IndexOf(*ParsePlan(plan), g); };
  std::set<PageKey> keys;
  for (const char* plan : {"quest{page = 16}", "quest{page = 32}", "chess", "bits",
                           "bits{bits = 3}", "bits{unit = 32}"}) {
    keys.insert(IndexBlockKey(PageKey{1}, layout(plan)));
  }
  keys.insert(IndexBlockKey(PageKey{2}, layout("chess")));
  EXPECT_EQ(keys.size(), 7u);
  // Another budget has the same index.
  EXPECT_TRUE(keys.contains(IndexBlockKey(PageKey{1}, layout("quest{page = 16, budget = 64}"))));
  EXPECT_TRUE(keys.contains(IndexBlockKey(PageKey{1}, layout("bits{budget = 64}"))));
}

constexpr PoolId kDevice = PoolId::Device(0), kOther = PoolId::Device(1), kHost = PoolId::Host();

class PrefixIndexTest : public ::testing::Test {
 protected:
  Page* NewPage(uint8_t key, PoolId pool = kDevice) {
    std::vector<Page*> out;
    EXPECT_EQ(pools_.Take(pool, 0, 1, 4096, 1, &out), 1u);
    out[0]->key = PageKey{key};
    out[0]->sealed = true;
    pools_.Ref(out[0]);
    return out[0];
  }
  void Cache(Page* page) {
    pools_.Unref(page);
    index_.MarkCached(page);
  }

  static std::vector<StoreDevice> TwoDevices() {
    std::vector<StoreDevice> devices;
    for (const char* name : {"one", "two"}) devices.push_back({name, NewEmulatedDevice()});
    return devices;
  }

  PageMemory memory_{TwoDevices(), 1 << 20, NewHostMemory(), 1 << 20};
  PagePools pools_{&memory_, 1 << 20};
  bool arena_ = pools_.AddArena(kDevice, 0, 1, 4096) && pools_.AddArena(kOther, 0, 1, 4096);
  PrefixIndex index_;
};

TEST_F(PrefixIndexTest, FindsWhatWasInsertedOnce) {
  Page *a = NewPage(1), *twin = NewPage(1);
  EXPECT_EQ(index_.Find(PageKey{1}), nullptr);
  EXPECT_TRUE(index_.Insert(a));
  EXPECT_FALSE(index_.Insert(twin));
  EXPECT_FALSE(twin->indexed);
  EXPECT_EQ(index_.Find(PageKey{1}), a);
  index_.Erase(a);
  EXPECT_EQ(index_.Find(PageKey{1}), nullptr);
  EXPECT_EQ(index_.size(), 0u);
}

TEST_F(PrefixIndexTest, CachedPagesAreListedOldestFirst) {
  Page *a = NewPage(1), *b = NewPage(2), *c = NewPage(3);
  for (Page* page : {a, b, c}) ASSERT_TRUE(index_.Insert(page));
  EXPECT_EQ(index_.oldest(kDevice), nullptr);
  for (Page* page : {b, a, c}) Cache(page);
  EXPECT_EQ(index_.cached_bytes(kDevice), 3 * 4096u);
  EXPECT_EQ(index_.oldest(kDevice), b);
  index_.MarkUsed(a);  // from the middle
  pools_.Ref(a);
  EXPECT_EQ(b->newer, c);
  EXPECT_EQ(c->older, b);
  index_.Erase(b);
  EXPECT_EQ(index_.oldest(kDevice), c);
  index_.Erase(c);
  EXPECT_EQ(index_.oldest(kDevice), nullptr);
  EXPECT_EQ(index_.cached_bytes(kDevice), 0u);
}

TEST_F(PrefixIndexTest, WhatHasCreditsIsPassedOver) {
  Page *a = NewPage(1), *b = NewPage(2);
  for (Page* page : {a, b}) ASSERT_TRUE(index_.Insert(page));
  for (Page* page : {a, b}) Cache(page);
  a->credits = 2;
  EXPECT_EQ(index_.Spare(a), b);
  EXPECT_EQ(index_.oldest(kDevice), b);
  EXPECT_EQ(b->newer, a);
  EXPECT_EQ(index_.Spare(a), a) << "it was the newest";
  EXPECT_EQ(a->credits, 0);
  EXPECT_EQ(a->newer, nullptr);
  EXPECT_EQ(index_.cached_bytes(kDevice), 2 * 4096u);
}

TEST_F(PrefixIndexTest, ACopyOfWhatNobodyUsesIsTheNewestOfItsTier) {
  ASSERT_TRUE(pools_.AddArena(kHost, 0, 1, 4096));
  Page *a = NewPage(1), *copy = nullptr;
  ASSERT_TRUE(index_.Insert(a));
  Cache(a);
  std::vector<Page*> taken;
  ASSERT_EQ(pools_.Take(kHost, 0, 1, 4096, 1, &taken), 1u);
  copy = taken.front();
  copy->key = a->key;
  copy->sealed = true;
  index_.Replace(a, copy);
  EXPECT_EQ(index_.oldest(kDevice), nullptr);
  EXPECT_EQ(index_.oldest(kHost), copy);
  EXPECT_EQ(index_.cached_bytes(kHost), 4096u);
  index_.Erase(copy);
}

TEST_F(PrefixIndexTest, ACopyTakesThePlaceOfItsSource) {
  Page *a = NewPage(1), *copy = NewPage(1);
  ASSERT_TRUE(index_.Insert(a));
  Cache(a);
  index_.Replace(a, copy);
  EXPECT_EQ(index_.Find(PageKey{1}), copy);
  EXPECT_FALSE(a->indexed);
  EXPECT_EQ(index_.oldest(kDevice), nullptr);
  EXPECT_EQ(index_.cached_bytes(kDevice), 0u);
}

TEST_F(PrefixIndexTest, AReplicaIsFoundFromItsDevice) {
  Page *a = NewPage(1), *replica = NewPage(1, kOther);
  ASSERT_TRUE(index_.Insert(a));
  EXPECT_EQ(index_.FindFor(0, PageKey{1}), a);
  EXPECT_EQ(index_.FindFor(1, PageKey{1}), nullptr) << "of another device";
  index_.InsertReplica(replica);
  EXPECT_EQ(index_.FindFor(1, PageKey{1}), replica);
  EXPECT_EQ(index_.Find(PageKey{1}), a);
  EXPECT_EQ(index_.size(), 2u);
  EXPECT_EQ(index_.replicas(), 1u);
  EXPECT_TRUE(index_.Holds(*a) && index_.Holds(*replica));
  index_.Erase(replica);
  EXPECT_FALSE(index_.Holds(*replica) || replica->replica || replica->indexed);
  EXPECT_EQ(index_.FindFor(1, PageKey{1}), nullptr);
  EXPECT_EQ(index_.size(), 1u);
}

TEST_F(PrefixIndexTest, AReplicaTakesThePlaceOfThePage) {
  Page *a = NewPage(1), *replica = NewPage(1, kOther);
  index_.Pin(PageKey{1});
  ASSERT_TRUE(index_.Insert(a));
  index_.InsertReplica(replica);
  Cache(replica);
  EXPECT_FALSE(replica->pinned) << "a pin keeps one page";
  EXPECT_EQ(index_.cached_bytes(kOther), 4096u);
  index_.Erase(a);
  EXPECT_EQ(index_.Find(PageKey{1}), replica);
  EXPECT_FALSE(replica->replica);
  EXPECT_TRUE(replica->pinned) << "it is the page now";
  EXPECT_EQ(index_.cached_bytes(kOther), 0u);
  EXPECT_EQ(index_.pinned_bytes(kOther), 4096u);
  index_.Unpin(PageKey{1});
  EXPECT_EQ(index_.cached_bytes(kOther), 4096u);
}

TEST_F(PrefixIndexTest, ACopyOfAReplicaIsAReplica) {
  ASSERT_TRUE(pools_.AddArena(kHost, 0, 1, 4096));
  Page *a = NewPage(1), *replica = NewPage(1, kOther), *copy = NewPage(1, kHost);
  ASSERT_TRUE(index_.Insert(a));
  index_.InsertReplica(replica);
  index_.Replace(replica, copy);
  EXPECT_EQ(index_.FindFor(1, PageKey{1}), copy);
  EXPECT_EQ(index_.FindFor(0, PageKey{1}), a);
  EXPECT_TRUE(copy->replica && !replica->replica && !replica->indexed);
  EXPECT_TRUE(index_.PagesIn(kOther).empty());
  EXPECT_EQ(index_.PagesIn(kHost), std::vector<Page*>{copy});
}

}  // namespace
}  // namespace kvstrata
