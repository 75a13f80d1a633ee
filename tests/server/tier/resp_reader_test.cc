// SPDX-License-Identifier: Apache-2.0
// RespReader and slots: replies cut at every byte, and bytes that are no replies.
#include "server/tier/redis/client/resp_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {
namespace {

using Kind = RespReply::Kind;

std::string Flat(const RespReply& reply) {
  std::string text = std::to_string(static_cast<int>(reply.kind)) + "(" +
                     std::to_string(reply.integer) + "," + reply.text;
  for (const RespReply& item : reply.items) text += " " + Flat(item);
  return text + ")";
}

// Feeds `stream` in pieces that end at `cuts`; the replies, and "broken" at the end if it broke.
std::vector<std::string> Read(RespReader* reader, std::string_view stream,
                              const std::vector<size_t>& cuts) {
  std::vector<std::string> replies;
  size_t at = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const size_t end = i < cuts.size() ? cuts[i] : stream.size();
    while (at < end) {
      const std::span<std::byte> room = reader->Room();
      EXPECT_FALSE(room.empty());
      const size_t bytes = std::min(room.size(), end - at);
      std::memcpy(room.data(), stream.data() + at, bytes);
      at += bytes;
      reader->Wrote(bytes);
      for (;;) {
        RespReply reply;
        const Result<RespReader::Step> step = reader->Next(&reply);
        if (!step.ok()) {
          EXPECT_EQ(step.status().reason(), "REDIS_PROTOCOL");
          replies.push_back("broken");
          return replies;
        }
        if (*step == RespReader::Step::kMore) break;
        replies.push_back(Flat(reply));
      }
    }
  }
  return replies;
}

TEST(RespReader, RepliesCutAtEveryByte) {
  const std::string stream =
      "+OK\r\n-MOVED 1 a:2\r\n:-17\r\n$-1\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n*-1\r\n*0\r\n"
      "*3\r\n:1\r\n*2\r\n$2\r\nxy\r\n$-1\r\n+z\r\n";
  RespReader whole;
  const std::vector<std::string> expected = Read(&whole, stream, {});
  ASSERT_EQ(expected.size(), 9u);
  EXPECT_EQ(expected.back(), "5(0, 2(1,) 5(0, 3(2,xy) 4(0,)) 0(0,z))");
  for (size_t a = 0; a < stream.size(); ++a) {
    for (size_t b = a; b < stream.size(); b += 3) {
      RespReader reader;
      ASSERT_EQ(Read(&reader, stream, {a, b}), expected) << a << " " << b;
    }
  }
}

TEST(RespReader, AValueGoesStraightToItsPlace) {
  std::mt19937_64 random(7);
  std::string value(40000, 0);
  for (char& c : value) c = static_cast<char>(random());
  const std::string stream = "$40000\r\n" + value + "\r\n:1\r\n";
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> head(512), first(20000), second(40000 - 20512);
    const BulkTarget target{head, {first, second}};
    std::vector<size_t> cuts;
    for (int i = 0; i < 5; ++i) cuts.push_back(random() % stream.size());
    std::ranges::sort(cuts);
    RespReader reader;
    reader.Expect(&target);
    const std::vector<std::string> replies = Read(&reader, stream, cuts);
    ASSERT_EQ(replies, (std::vector<std::string>{"3(40000,)", "2(1,)"}));
    ASSERT_EQ(std::memcmp(head.data(), value.data(), 512), 0);
    ASSERT_EQ(std::memcmp(first.data(), value.data() + 512, 20000), 0);
    ASSERT_EQ(std::memcmp(second.data(), value.data() + 20512, second.size()), 0);
  }
}

TEST(RespReader, AValueOfAnotherSizeFillsTheHeadAlone) {
  for (const size_t bytes : {3, 511, 512, 513, 600, 5000}) {
    const std::string stream =
        "$" + std::to_string(bytes) + "\r\n" + std::string(bytes, 'v') + "\r\n+x\r\n";
    std::vector<std::byte> head(512), buffer(100, std::byte{7});
    const BulkTarget target{head, {buffer}};
    for (size_t cut = 0; cut < stream.size(); cut += 7) {
      RespReader reader;
      reader.Expect(&target);
      ASSERT_EQ(Read(&reader, stream, {cut}).size(), 2u) << bytes;
      EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte{7}));
      EXPECT_EQ(head[std::min<size_t>(bytes, 512) - 1], std::byte{'v'});
    }
  }
}

TEST(RespReader, WhatExceedsALimitOrIsNoReplyBreaks) {
  const std::string deep = [] {
    std::string text;
    for (size_t i = 0; i <= RespReader::kMaxNesting; ++i) text += "*1\r\n";
    return text;
  }();
  for (const std::string& stream :
       std::vector<std::string>{"$99999999999\r\n", "$-2\r\n", "$1x\r\n", "$\r\n", "*9999999\r\n",
                                "*-2\r\n", ":12a\r\n", ":\r\n", "?\r\n", "\r\n", "$1\r\nabc",
                                ":99999999999999999999\r\n", deep, "+" + std::string(10000, 'a')}) {
    RespReader reader;
    EXPECT_EQ(Read(&reader, stream, {}).back(), "broken") << stream.substr(0, 20);
  }
}

// Bytes of RESP's own alphabet, so that they get somewhere.
TEST(RespReader, AnyBytesNeitherCrashNorLeaveTheirPlace) {
  const char* given = std::getenv("KVS_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("KVS_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const std::string alphabet = "$*:+-0123456789\r\n\r\n\r\nab";
  for (int round = 0; round < 20000; ++round) {
    std::string stream;
    const size_t bytes = 1 + random() % 200;
    for (size_t i = 0; i < bytes; ++i) {
      if (random() % 3 == 0) stream += "\r\n";
      stream +=
          random() % 50 == 0 ? static_cast<char>(random()) : alphabet[random() % alphabet.size()];
    }
    std::vector<std::byte> memory(3 * 64, std::byte{0x5A});
    const BulkTarget target{std::span(memory).subspan(64, 16), {std::span(memory).subspan(80, 48)}};
    std::vector<size_t> cuts = {random() % stream.size(), random() % stream.size()};
    std::ranges::sort(cuts);
    RespReader reader;
    if (random() % 2 == 0) reader.Expect(&target);
    (void)Read(&reader, stream, cuts);
    for (size_t i = 0; i < 64; ++i) {
      ASSERT_EQ(memory[i], std::byte{0x5A});
      ASSERT_EQ(memory[128 + i], std::byte{0x5A});
    }
  }
}

TEST(RedisSlots, KnownNamesHaveTheirSlots) {
  EXPECT_EQ(SlotOf("123456789"), 0x31C3 % kSlots);
  EXPECT_EQ(SlotOf("foo"), 12182);
  EXPECT_EQ(SlotOf("{user1000}.following"), SlotOf("user1000"));
  EXPECT_EQ(SlotOf("foo{{bar}}zap"), SlotOf("{bar"));
  EXPECT_NE(SlotOf("foo{}{bar}"), SlotOf("bar"));
}

TEST(RedisSlots, AddressesAndRedirections) {
  EXPECT_EQ(ParseRedisAddress("[::1]:7000")->ToString(), "[::1]:7000");
  EXPECT_EQ(ParseRedisAddress("host")->port, 6379);
  for (const char* bad : {"", ":1", "a:", "a:0", "a:70000", "a:x"}) {
    EXPECT_EQ(ParseRedisAddress(bad).status().reason(), "REDIS_ADDRESS") << bad;
  }
  const auto to = RedirectionOf({Kind::kError, 0, "MOVED 3999 ::1:6381", {}}, {"h", 1});
  ASSERT_TRUE(to);
  EXPECT_EQ(to->to, (RedisAddress{"::1", 6381}));
  const auto same = RedirectionOf({Kind::kError, 0, "ASK 1 :6381", {}}, {"h", 1});
  ASSERT_TRUE(same);
  EXPECT_TRUE(same->ask && same->to.host == "h");
  EXPECT_FALSE(RedirectionOf({Kind::kError, 0, "MOVED 99999 a:1", {}}, {"h", 1}));
  EXPECT_FALSE(RedirectionOf({Kind::kError, 0, "ERR no", {}}, {"h", 1}));
}

}  // namespace
}  // namespace kvstrata::redis
