// SPDX-License-Identifier: Apache-2.0
// Users of two nodes that are one tenant of the cluster have the same page keys, and nobody else
// has.
#include "server/store/options/cluster_tenants.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/store/prompt_values.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using Keys = std::vector<PageKey>;
constexpr int32_t kPrompt = 65;  // 4 pages and a token

// A node where these users stand for these tenants.
class Node {
 public:
  Node(std::initializer_list<std::pair<const char*, const char*>> map) {
    StoreOptions options = SmallPools(64, 64);
    for (const auto& [user, tenant] : map) {
      EXPECT_EQ(options.cluster_tenants.Map(user, tenant), "");
    }
    store_ = NewStore(options);
  }

  Store& store() { return *store_; }
  Keys KeysOf(const std::string& user) {
    const TestSession session(store_.get(), user);
    return store_->lookups().Lookup(session.id(), session.model(), Tokens(kPrompt)).value().keys;
  }
  // As an operator finds them.
  Keys KeysFor(const std::string& tenant) {
    const TestSession session(store_.get(), "uid:9");
    const auto values =
        ValuesOfPrompt(store_.get(), tenant, session.model(), Tokens(kPrompt), "").value();
    Keys keys;
    for (const TierSearch::Key& key : values.keys) keys.push_back(key.key);
    return keys;
  }

 private:
  std::unique_ptr<Store> store_;
};

TEST(ClusterTenants, TwoUsersOfOneTenantHaveTheSameKeys) {
  Node a{{"uid:1", "search"}}, b{{"uid:2", "search"}, {"uid:3", "other"}}, c{};
  const Keys search = a.KeysOf("uid:1");
  ASSERT_EQ(search.size(), 4u);
  EXPECT_EQ(search, KeyChain("cluster:search", SmallModel()).Pages({}, Tokens(64)));
  EXPECT_EQ(b.KeysOf("uid:2"), search);
  EXPECT_NE(b.KeysOf("uid:3"), search) << "another tenant";
  EXPECT_NE(b.KeysOf("uid:1"), search) << "the same number, which stands for nobody here";
  EXPECT_NE(c.KeysOf("uid:1"), search);
  EXPECT_EQ(c.KeysOf("uid:1"), b.KeysOf("uid:1")) << "who is not mapped is called as before";
  EXPECT_EQ(c.KeysOf("uid:1"), KeyChain("uid:1", SmallModel()).Pages({}, Tokens(64)));
}

TEST(ClusterTenants, AnOperatorNamesAUserOrTheTenant) {
  Node a{{"uid:1", "search"}}, b{};
  const Keys search = a.KeysOf("uid:1");
  EXPECT_EQ(a.KeysFor("uid:1"), search);
  EXPECT_EQ(a.KeysFor("cluster:search"), search);
  EXPECT_EQ(b.KeysFor("cluster:search"), search) << "where nobody stands for it";
  EXPECT_NE(b.KeysFor("uid:1"), search);
}

// Memory goes by the user: what he has is found under either name, and by nobody else.
TEST(ClusterTenants, WhatAUserHasIsFoundUnderTheTenantsName) {
  Node a{{"uid:1", "search"}};
  TestSession session(&a.store());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(kPrompt));
  const auto held = [&](const char* tenant) {
    return a.store().lookups().LookupFor(tenant, session.model(), Tokens(kPrompt))->held_tokens();
  };
  EXPECT_EQ(held("uid:1"), 64u);
  EXPECT_EQ(held("cluster:search"), 64u);
  EXPECT_EQ(held("uid:2"), 0u);
  EXPECT_EQ(held("cluster:other"), 0u);
  const auto pin = a.store().pins().PinPrefix("cluster:search", session.model(), Tokens(kPrompt),
                                              std::chrono::hours(1));
  ASSERT_TRUE(pin.ok()) << pin.status().ToString();
  EXPECT_EQ(pin->pin.tenant, "uid:1");
  EXPECT_EQ(pin->device_pages, 4u);
  ExpectClean(a.store());
}

TEST(ClusterTenants, OneUserOfANodeStandsForATenant) {
  ClusterTenants tenants;
  EXPECT_EQ(tenants.Map("uid:1", "search"), "");
  EXPECT_EQ(tenants.Map("uid:2", "search"), "uid:1");
  EXPECT_EQ(tenants.NameOf("uid:1"), "cluster:search");
  EXPECT_EQ(tenants.NameOf("uid:2"), "uid:2");
  EXPECT_EQ(tenants.UserOf("cluster:search"), "uid:1");
  EXPECT_EQ(tenants.UserOf("uid:1"), "uid:1") << "as another node calls a user that is not mapped";
  EXPECT_EQ(tenants.size(), 1u);
}

}  // namespace
}  // namespace kvstrata::testing
