// SPDX-License-Identifier: Apache-2.0
// The bytes of values in a remote tier: round trips, and that nothing else than what was put is
// accepted. Which guard refuses what, and that each is needed, is remote_controls_test's.
#include "server/tier/remote/remote_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "server/tier/remote/remote_envelope.h"
#include "server/tier/remote/stripe_cipher.h"
#include "tests/server/tier/remote_attacks.h"

namespace kvstrata::remote {
namespace {

constexpr std::string_view kKey = "the key of a page, 32 bytes of it";

std::string RandomText(std::mt19937_64* random, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text.push_back(static_cast<char>((*random)()));
  return text;
}

std::span<const std::byte> BytesIn(std::string_view text) { return std::as_bytes(std::span(text)); }
class RemoteFormatTest : public ::testing::TestWithParam<Seal> {
 protected:
  std::mt19937_64 random_{TestSeed()};
  RemoteFormat format_ = TestFormat(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Seals, RemoteFormatTest, ::testing::Values(Seal::kNone, Seal::kGcm),
                         [](const auto& seal) { return std::string(SealName(seal.param)); });

TEST_P(RemoteFormatTest, ValuesOfAnySizesComeBack) {
  for (int i = 0; i < 60; ++i) {
    std::vector<uint64_t> sizes(1 + random_() % kMaxValueBuffers);
    const uint64_t most = i % 20 == 0 ? uint64_t{1} << 21 : 1 + random_() % 5000;
    for (uint64_t& size : sizes) size = 1 + random_() % most;
    const std::string key = RandomText(&random_, 1 + random_() % kMaxValueKeyBytes);
    const Buffers buffers = RandomBuffers(&random_, sizes);
    const std::vector<Object> objects = Put(format_, key, buffers);
    Buffers got;
    const Status status = Get(format_, key, sizes, objects, &got);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(got == buffers);
    const RemoteHead head = format_.Inspect(objects.back(), kNow).value();
    EXPECT_EQ(head.key, key);
    EXPECT_TRUE(std::ranges::equal(head.sizes.all(), sizes));
    EXPECT_EQ(head.stripe + 1, head.stripes);
    EXPECT_EQ(head.stripes, objects.size());
  }
}

TEST_P(RemoteFormatTest, AStripeIsOf4MiB) {
  for (const auto& [sizes, stripes] : std::map<std::vector<uint64_t>, std::vector<uint64_t>>{
           {{kStripeBytes}, {kStripeBytes}},
           {{kStripeBytes, 1}, {kStripeBytes, 1}},
           {{kStripeBytes - 1, 3, kStripeBytes}, {kStripeBytes, kStripeBytes, 2}}}) {
    const Buffers buffers = RandomBuffers(&random_, sizes);
    const std::vector<Object> objects = Put(format_, kKey, buffers);
    ASSERT_EQ(objects.size(), stripes.size());
    for (size_t i = 0; i < stripes.size(); ++i) {
      EXPECT_EQ(objects[i].size(), kHeaderBytes + stripes[i]);
    }
    Buffers got;
    EXPECT_TRUE(Get(format_, kKey, sizes, objects, &got).ok());
    EXPECT_TRUE(got == buffers);
    const std::span<const Object> some = std::span(objects).first(objects.size() - 1);
    EXPECT_FALSE(Get(format_, kKey, sizes, some, &got).ok()) << "a stripe is missing";
  }
}

TEST_P(RemoteFormatTest, StripesOfTwoPutsOfEqualBytesMakeAValue) {
  const Buffers buffers = RandomBuffers(&random_, {2 * kStripeBytes + 5});
  std::vector<Object> objects = Put(format_, kKey, buffers);
  objects[1] = Put(format_, kKey, buffers, kNow + std::chrono::seconds(3))[1];
  Buffers got;
  EXPECT_TRUE(Get(format_, kKey, {2 * kStripeBytes + 5}, objects, &got).ok());
  EXPECT_TRUE(got == buffers);
}

TEST_P(RemoteFormatTest, NoBitOfAHeaderMayBeFlipped) {
  const Object object = Put(format_, kKey, RandomBuffers(&random_, {100, 30}))[0];
  Buffers got;
  for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    Object flipped = object;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_EQ(format_.Inspect(flipped, kNow).status().code(), Code::kDataLoss) << bit;
    ASSERT_EQ(Get(format_, kKey, {100, 30}, {&flipped, 1}, &got).code(), Code::kDataLoss) << bit;
  }
}

TEST_P(RemoteFormatTest, NoBitOfTheBytesMayBeFlipped) {
  const Object object = Put(format_, kKey, RandomBuffers(&random_, {100, 30}))[0];
  Buffers got;
  for (size_t bit = 8 * kHeaderBytes; bit < 8 * object.size(); ++bit) {
    Object flipped = object;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_EQ(Get(format_, kKey, {100, 30}, {&flipped, 1}, &got).reason(), "REMOTE_CORRUPT") << bit;
  }
}

TEST_P(RemoteFormatTest, AValueThatIsCutIsRefused) {
  const Object object = Put(format_, kKey, RandomBuffers(&random_, {100, 30}))[0];
  Buffers got;
  for (size_t bytes = 0; bytes < object.size(); ++bytes) {
    const Object cut(object.begin(), object.begin() + static_cast<ptrdiff_t>(bytes));
    ASSERT_EQ(Get(format_, kKey, {100, 30}, {&cut, 1}, &got).reason(), "REMOTE_CORRUPT") << bytes;
  }
}

TEST_P(RemoteFormatTest, NoAttackSucceeds) {
  for (const Attack& attack : Attacks()) {
    const Status status = attack.of(GetParam(), &random_);
    EXPECT_EQ(status.reason(), attack.reason) << attack.name;
    EXPECT_TRUE(status.code() == Code::kDataLoss || status.reason() == "REMOTE_VALUE");
  }
}

TEST_P(RemoteFormatTest, TheOtherSealsValuesAreRefused) {
  const Seal other = GetParam() == Seal::kNone ? Seal::kGcm : Seal::kNone;
  const Object object = Put(TestFormat(other), kKey, RandomBuffers(&random_, {100}))[0];
  Buffers got;
  EXPECT_EQ(Get(format_, kKey, {100}, {&object, 1}, &got).reason(), "REMOTE_CORRUPT");
  EXPECT_NE(TestFormat(other).NameOf(kKey, ""), format_.NameOf(kKey, ""));
}

// Anything at all, and sound values with runs of bytes changed, moved and cut.
TEST_P(RemoteFormatTest, RandomBytesAreRefused) {
  const Object sound = Put(format_, kKey, RandomBuffers(&random_, {1000, 24}))[0];
  Buffers got;
  for (int i = 0; i < 20000; ++i) {
    Object object = sound;
    if (i % 4 == 0) object = RandomBuffers(&random_, {random_() % 2048})[0];
    if (i % 4 == 1) std::memcpy(object.data(), sound.data(), 16);
    const size_t from = random_() % (object.size() + 1), to = random_() % (object.size() + 1);
    const size_t bytes = std::min({object.size() - from, object.size() - to, random_() % 300});
    std::memmove(object.data() + to, object.data() + from, bytes);
    if (i % 7 == 0) object.resize(random_() % (object.size() + 1));
    if (object == sound) continue;
    const Status status = Get(format_, kKey, {1000, 24}, {&object, 1}, &got);
    ASSERT_EQ(status.code(), Code::kDataLoss) << i;
  }
}

TEST_P(RemoteFormatTest, NothingIsCopiedThatNeedNotBe) {
  Buffers buffers = RandomBuffers(&random_, {kStripeBytes - 10, 30});
  const std::vector<std::span<const std::byte>> from(buffers.begin(), buffers.end());
  const OutgoingValue value = format_.Prepare(kKey, from, kNow).value();
  std::vector<std::byte> room(kStripeBytes);
  const OutgoingStripe stripe = format_.Write(value, 0, room);
  const std::vector<std::span<std::byte>> into(buffers.begin(), buffers.end());
  const IncomingValue incoming = format_.Expect(kKey, into).value();
  if (GetParam() == Seal::kNone) {
    ASSERT_EQ(stripe.bytes.size(), 2u);
    EXPECT_EQ(stripe.bytes[0].data(), buffers[0].data());
    EXPECT_EQ(stripe.bytes[1].data(), buffers[1].data());
  } else {
    ASSERT_EQ(stripe.bytes.size(), 1u);
    EXPECT_EQ(stripe.bytes[0].data(), room.data());
  }
  ASSERT_EQ(incoming.parts(0).size(), 2u);
  EXPECT_EQ(incoming.parts(0)[1].data(), buffers[1].data());
  EXPECT_EQ(incoming.parts(0)[1].size(), 10u);
  ASSERT_EQ(incoming.parts(1).size(), 1u);
  EXPECT_EQ(incoming.parts(1)[0].data(), buffers[1].data() + 10);
  EXPECT_EQ(incoming.length(1), kHeaderBytes + 20);
}

TEST_P(RemoteFormatTest, WhatIsNoValueIsRefusedWithItsField) {
  const std::vector<std::byte> byte(1);
  const auto refused = [&](std::string_view key, size_t buffers) {
    const std::vector<std::span<const std::byte>> all(buffers, byte);
    return format_.Prepare(key, all, kNow).status().reason() == "REMOTE_VALUE";
  };
  EXPECT_TRUE(refused("", 1));
  EXPECT_TRUE(refused(std::string(65, 'k'), 1));
  EXPECT_TRUE(refused("k", 0));
  EXPECT_TRUE(refused("k", 17));
  EXPECT_FALSE(refused(std::string(64, 'k'), 16));
  const std::span<const std::byte> none, big(byte.data(), kMaxValueBytes + 1);
  EXPECT_EQ(format_.Prepare("k", {&none, 1}, kNow).status().reason(), "REMOTE_VALUE");
  EXPECT_EQ(format_.Prepare("k", {&big, 1}, kNow).status().reason(), "REMOTE_VALUE");
}

TEST_P(RemoteFormatTest, TimesJustWithinTheLimitsAreTaken) {
  const Object object = Put(format_, kKey, RandomBuffers(&random_, {9}))[0];
  EXPECT_TRUE(format_.Inspect(object, kNow + format_.options().max_age).ok());
  EXPECT_TRUE(format_.Inspect(object, kNow - format_.options().max_ahead).ok());
}

// --- what a stolen dump of the servers' memory shows

// Whether any 8 bytes of `secret` are in `dump`.
bool Shows(std::string_view dump, std::string_view secret) {
  for (size_t i = 0; i + 8 <= secret.size(); ++i) {
    if (dump.find(secret.substr(i, 8)) != dump.npos) return true;
  }
  return false;
}

TEST(RemoteDump, SealedValuesShowNeitherKeyNorBytes) {
  std::mt19937_64 random(TestSeed());
  const std::string key = RandomText(&random, 32), place = RandomText(&random, 32);
  const Buffers buffers = RandomBuffers(&random, {300, 40});
  for (const Seal seal : {Seal::kNone, Seal::kGcm}) {
    const RemoteFormat format = TestFormat(seal);
    const Object object = Put(format, key, buffers)[0];
    const std::string dump =
        format.NameOf(key, place) +
        std::string(reinterpret_cast<const char*>(object.data()), object.size());
    for (const std::vector<std::byte>& buffer : buffers) {
      const std::string_view bytes(reinterpret_cast<const char*>(buffer.data()), buffer.size());
      EXPECT_EQ(Shows(dump, bytes), seal == Seal::kNone);
    }
    EXPECT_EQ(Shows(dump, key), seal == Seal::kNone);
    EXPECT_FALSE(Shows(dump, place));
    EXPECT_FALSE(Shows(dump, kTestSecret));
    EXPECT_FALSE(Shows(dump, "uid:1000"));
  }
}

TEST(RemoteDump, NamesShowNeitherKeyNorPlace) {
  std::mt19937_64 random(TestSeed());
  const RemoteFormat format = TestFormat(Seal::kNone);
  const std::string key = RandomText(&random, 32), place = RandomText(&random, 32);
  const std::string name = format.NameOf(key, place, 7);
  EXPECT_EQ(name.size(), 57u);
  EXPECT_FALSE(Shows(name, ToHex(key)));
  EXPECT_FALSE(Shows(name, ToHex(place)));
  const auto tag = [](std::string_view n) { return n.substr(0, n.find('}')); };
  EXPECT_EQ(tag(format.NameOf("another", place)), tag(name));
  EXPECT_EQ(tag(format.NameOf(place, "")), tag(name)) << "without a place the key is one";
  EXPECT_EQ(format.NameOf(key, place, 8), name.substr(0, 56) + "8");
  // The place of one value is the key of another: neither HMAC is in the other's name.
  const std::string first = format.NameOf(place, place);
  EXPECT_EQ(first.find(first.substr(5, 16), 21), first.npos);
  EXPECT_NE(TestFormat(Seal::kNone, "uid:1001").NameOf(key, place), name);
  EXPECT_NE(TestFormat(Seal::kNone, "uid:1000", std::string(32, 'x')).NameOf(key, place), name);
}

TEST(RemoteDump, EqualBytesAreSealedInAnotherWayEachTime) {
  std::mt19937_64 random(TestSeed());
  const RemoteFormat format = TestFormat(Seal::kGcm);
  const Buffers buffers = RandomBuffers(&random, {64});
  std::set<Object> salts, bytes;
  for (int i = 0; i < 2000; ++i) {
    const Object object = Put(format, kKey, buffers)[0];
    salts.insert(Object(object.begin() + 16, object.begin() + 48));
    bytes.insert(Object(object.begin() + 48, object.end()));
  }
  EXPECT_EQ(salts.size(), 2000u);
  EXPECT_EQ(bytes.size(), 2000u);
}

// --- the parts

TEST(HmacKeyTest, Rfc4231) {
  const std::string twenty(20, '\x0b');
  const auto key = [](std::string_view text) {
    return HmacKey(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  };
  EXPECT_EQ(ToHex(key(twenty).Of("Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(
      ToHex(key("Jefe").Of({BytesIn("what do ya want "), BytesIn(""), BytesIn("for nothing?")})),
      "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(ChecksumTest, DoesNotDependOnWhereBytesAreCut) {
  std::mt19937_64 random(TestSeed());
  const std::vector<std::byte> all = RandomBuffers(&random, {5000})[0];
  const std::span<const std::byte> whole(all);
  for (int i = 0; i < 500; ++i) {
    std::vector<std::span<const std::byte>> parts;
    for (size_t at = 0; at < all.size();) {
      const size_t bytes = std::min<size_t>(1 + random() % (1 + random() % 3000), all.size() - at);
      parts.push_back(whole.subspan(at, bytes));
      at += bytes;
    }
    ASSERT_EQ(ChecksumOf(parts), ChecksumOf(whole));
  }
}

}  // namespace
}  // namespace kvstrata::remote
