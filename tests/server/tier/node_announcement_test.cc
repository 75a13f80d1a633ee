// SPDX-License-Identifier: Apache-2.0
// The bytes of a node's announcement: those of docs/remote_format.md, and that nothing is taken
// which no node of the cluster wrote.
#include "server/tier/remote/node_announcement.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace kvstrata::remote {
namespace {

using std::chrono::seconds;
using std::chrono::system_clock;

constexpr std::string_view kSecret = "0123456789abcdef0123456789abcdef";
constexpr seconds kTtl{30};
const system_clock::time_point kNow{seconds(1'700'000'000)};

NodeKeys Keys(std::string_view secret = kSecret, Seal seal = Seal::kNone) {
  return {*RemoteSecret::Of(secret), seal};
}

NodeAnnouncement Node() { return {5, 0x1122334455667788, 1'700'000'000, "10.0.0.7:7500", "1.0.0"}; }

std::string Hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

// The reason why it is refused; "": it is not.
std::string Refused(const NodeKeys& keys, std::string_view bytes, uint32_t seat = 5,
                    system_clock::time_point now = kNow) {
  const auto node = keys.Read(bytes, seat, now, kTtl);
  return node.ok() ? "" : node.status().reason();
}

TEST(NodeAnnouncementTest, ItsBytesAreThoseOfThePage) {
  const std::string bytes = Keys().Write(Node());
  ASSERT_EQ(bytes.size(), kAnnouncementBytes);
  EXPECT_EQ(Hex(bytes.substr(0, 56)),
            "4b56534e4f444531"
            "01000000"
            "00000000"
            "8877665544332211"
            "00f1536500000000"
            "05000000"
            "0d00"
            "0500"
            "31302e302e302e373a37353030000000");
  EXPECT_EQ(Hex(bytes.substr(296, 8)), "312e302e30000000");
  EXPECT_EQ(Hex(bytes.substr(352)),
            "770a250df95180642f0a931d2b576ff6348a3e6dca07f0688d9d442806356814");
  EXPECT_EQ(Keys().NameOf(5), "kv1:{5d930ae75e1bc00d}:node.5");
}

TEST(NodeAnnouncementTest, WhatWasWrittenIsRead) {
  const auto node = Keys().Read(Keys().Write(Node()), 5, kNow, kTtl);
  ASSERT_TRUE(node.ok()) << node.status().ToString();
  EXPECT_EQ(node->seat, 5u);
  EXPECT_EQ(node->node, 0x1122334455667788u);
  EXPECT_EQ(node->written, 1'700'000'000u);
  EXPECT_EQ(node->address, "10.0.0.7:7500");
  EXPECT_EQ(node->release, "1.0.0");
}

TEST(NodeAnnouncementTest, AnyFlippedBitIsRefused) {
  const std::string sound = Keys().Write(Node());
  for (size_t bit = 0; bit < 8 * sound.size(); ++bit) {
    std::string flipped = sound;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    ASSERT_EQ(Refused(Keys(), flipped), "REMOTE_CORRUPT") << "bit " << bit;
  }
}

TEST(NodeAnnouncementTest, WhatNoNodeOfTheClusterWroteIsRefused) {
  const std::string sound = Keys().Write(Node());
  EXPECT_EQ(Refused(Keys("fedcba9876543210fedcba9876543210"), sound), "REMOTE_CORRUPT");
  EXPECT_EQ(Refused(Keys(kSecret, Seal::kGcm), sound), "REMOTE_CORRUPT");
  EXPECT_EQ(Refused(Keys(), sound.substr(1)), "REMOTE_CORRUPT");
  EXPECT_EQ(Refused(Keys(), sound + "x"), "REMOTE_CORRUPT");
  EXPECT_EQ(Refused(Keys(), ""), "REMOTE_CORRUPT");
  EXPECT_EQ(Refused(Keys(), sound, 6), "REMOTE_OTHER");
}

TEST(NodeAnnouncementTest, ItsAgeIsBoundedBothWays) {
  const std::string sound = Keys().Write(Node());
  EXPECT_EQ(Refused(Keys(), sound, 5, kNow + seconds(630)), "");
  EXPECT_EQ(Refused(Keys(), sound, 5, kNow + seconds(631)), "REMOTE_STALE");
  EXPECT_EQ(Refused(Keys(), sound, 5, kNow - seconds(600)), "");
  EXPECT_EQ(Refused(Keys(), sound, 5, kNow - seconds(601)), "REMOTE_STALE");
}

TEST(NodeAnnouncementTest, ACallsMacIsNoAnswersAndNoOtherCalls) {
  const HmacKey::Digest call = Keys().OfCall("body"), other = Keys().OfCall("body2");
  const HmacKey::Digest answer = Keys().OfAnswer(call, "body");
  EXPECT_NE(call, other);
  EXPECT_NE(call, answer);
  EXPECT_NE(answer, Keys().OfAnswer(other, "body"));
  EXPECT_NE(call, Keys("fedcba9876543210fedcba9876543210").OfCall("body"));
  const std::string mac(call.begin(), call.end());
  EXPECT_TRUE(NodeKeys::Equal(call, mac));
  EXPECT_FALSE(NodeKeys::Equal(call, mac.substr(1)));
  EXPECT_FALSE(NodeKeys::Equal(answer, mac));
}

}  // namespace
}  // namespace kvstrata::remote
