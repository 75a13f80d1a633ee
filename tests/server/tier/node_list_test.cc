// SPDX-License-Identifier: Apache-2.0
// NodeList over real servers, three masters of a cluster: who announces itself is listed, who does
// not any more leaves with its time to live, and two that want one seat both have one.
#include "server/nodes/node_list.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "server/tier/redis/client/redis_slots.h"
#include "tests/server/tier/redis_servers.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
using remote::NodeAnnouncement;
using remote::NodeKeys;
using remote::RemoteSecret;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kPatience{60};

NodeKeys Keys(const char* secret = "0123456789abcdef0123456789abcdef") {
  return {*RemoteSecret::Of(secret), remote::Seal::kNone};
}

uint64_t Now() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

class NodeListTest : public ::testing::Test {
 protected:
  static RedisServersOptions ThreeMasters() {
    RedisServersOptions options;
    options.masters = 3;
    options.cluster = true;
    return options;
  }
  std::unique_ptr<NodeList> NewList(const std::string& address) const {
    redis::RedisClientOptions client;
    for (const std::string& server : servers_.addresses()) {
      client.servers.push_back(*redis::ParseRedisAddress(server));
    }
    NodeListOptions options;
    options.address = address;
    options.release = "1.0.0";
    options.renew = milliseconds(50);
    options.retry = milliseconds(20);
    options.fresh = milliseconds(0);
    auto list = std::make_unique<NodeList>(
        options, Keys(), std::make_shared<RedisThreads>(std::move(client), seconds(60)));
    if (!address.empty()) list->Start();
    return list;
  }
  static Result<ListedNodes> Find(NodeList* list, seconds patience = kPatience) {
    std::promise<Result<ListedNodes>> answer;
    list->Find(Clock::now() + patience,
               [&](const Result<ListedNodes>& found) { answer.set_value(found); });
    return answer.get_future().get();
  }
  // Until the list is of these, in their order; false: it never is.
  static bool Becomes(NodeList* list, const std::vector<std::string>& addresses,
                      uint32_t refused = 0) {
    for (const auto end = Clock::now() + kPatience; Clock::now() < end; std::this_thread::yield()) {
      const Result<ListedNodes> found = Find(list);
      if (!found.ok() || found->refused != refused) continue;
      std::vector<std::string> got;
      for (const NodeAnnouncement& node : found->nodes) got.push_back(node.address);
      if (got == addresses) return true;
    }
    return false;
  }
  // SET at the server that has the seats.
  void Put(const std::string& name, const std::string& value, const std::string& ttl_ms) const {
    for (size_t i = 0; i < servers_.count(); ++i) {
      const redis::RespReply reply = servers_.Ask(i, {"SET", name, value, "PX", ttl_ms});
      if (reply.kind == redis::RespReply::Kind::kText) return;
    }
    FAIL() << "no master takes " << name;
  }

  RedisServers servers_{ThreeMasters()};
};

TEST_F(NodeListTest, WhoAnnouncesItselfIsListedUntilItStops) {
  const auto watcher = NewList("");
  EXPECT_TRUE(Becomes(watcher.get(), {}));
  const auto a = NewList("10.0.0.1:7500");
  {
    const auto b = NewList("10.0.0.2:7500");
    EXPECT_TRUE(Becomes(watcher.get(), {"10.0.0.1:7500", "10.0.0.2:7500"}));
    EXPECT_TRUE(Becomes(b.get(), {"10.0.0.1:7500", "10.0.0.2:7500"}));
  }
  EXPECT_TRUE(Becomes(watcher.get(), {"10.0.0.1:7500"}));
}

TEST_F(NodeListTest, WhoDiedIsListedForItsTimeToLive) {
  const auto watcher = NewList("");
  Put(Keys().NameOf(9), Keys().Write({9, 1, Now(), "10.0.0.9:7500", "1.0.0"}), "2000");
  EXPECT_TRUE(Becomes(watcher.get(), {"10.0.0.9:7500"}));
  EXPECT_TRUE(Becomes(watcher.get(), {}));
}

TEST_F(NodeListTest, OfTwoWithOneAddressTheNewerHolds) {
  const auto watcher = NewList("");
  Put(Keys().NameOf(1), Keys().Write({1, 1, Now() - 20, "10.0.0.9:7500", "old"}), "600000");
  Put(Keys().NameOf(2), Keys().Write({2, 2, Now(), "10.0.0.9:7500", "new"}), "600000");
  Put(Keys().NameOf(3), Keys().Write({3, 3, Now() - 10, "10.0.0.9:7500", "older"}), "600000");
  const Result<ListedNodes> found = Find(watcher.get());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  ASSERT_EQ(found->nodes.size(), 1u);
  EXPECT_EQ(found->nodes.front().release, "new");
}

TEST_F(NodeListTest, WhatNoNodeWroteIsCountedAndLeftOut) {
  const auto watcher = NewList("");
  const NodeKeys others = Keys("fedcba9876543210fedcba9876543210");
  Put(Keys().NameOf(1), others.Write({1, 1, Now(), "10.6.6.6:7500", "1.0.0"}), "600000");
  Put(Keys().NameOf(2), "garbage", "600000");
  EXPECT_TRUE(Becomes(watcher.get(), {}, 2));
}

TEST_F(NodeListTest, ASeatThatSomebodyTookIsLeftToThem) {
  const auto a = NewList("10.0.0.1:7500");
  EXPECT_TRUE(Becomes(a.get(), {"10.0.0.1:7500"}));
  const uint32_t seat = Find(a.get())->nodes.front().seat;
  // As a node does, the other one writes again: the first may have written over it once.
  const auto end = Clock::now() + kPatience;
  size_t listed = 0;
  while (listed != 2 && Clock::now() < end) {
    Put(Keys().NameOf(seat), Keys().Write({seat, 1, Now(), "10.0.0.2:7500", "1.0.0"}), "600000");
    const Result<ListedNodes> found = Find(a.get());
    listed = found.ok() ? found->nodes.size() : 0;
  }
  EXPECT_TRUE(Becomes(a.get(), {"10.0.0.1:7500", "10.0.0.2:7500"}));
}

TEST_F(NodeListTest, WithoutServersTheListThatWasKnownHolds) {
  const auto watcher = NewList("");
  Put(Keys().NameOf(9), Keys().Write({9, 1, Now(), "10.0.0.9:7500", "1.0.0"}), "600000");
  EXPECT_TRUE(Becomes(watcher.get(), {"10.0.0.9:7500"}));
  for (size_t i = 0; i < servers_.count(); ++i) servers_.Stop(i);
  const Result<ListedNodes> found = Find(watcher.get(), seconds(1));
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ(found->nodes.size(), 1u);
  watcher->Stop();
  EXPECT_EQ(Find(NewList("").get(), seconds(1)).ok(), false) << "nothing was known";
}

}  // namespace
}  // namespace kvstrata
