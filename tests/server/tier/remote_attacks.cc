// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/remote_attacks.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "server/tier/remote/remote_envelope.h"

namespace kvstrata::remote {
namespace {

using Random = std::mt19937_64;
constexpr std::string_view kKey = "the key of a page, 32 bytes of it";
const std::vector<Seal> kBoth = {Seal::kNone, Seal::kGcm};

Status GetOf(const RemoteFormat& format, const std::vector<uint64_t>& sizes,
             std::span<const Object> objects, WallTime now = kNow) {
  Buffers got;
  return Get(format, kKey, sizes, objects, &got, now);
}

// What lies in the header where nothing is said.
Status FlippedHeader(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100}));
  objects[0][offsetof(Envelope, zero) + (*random)() % 200] ^= std::byte{1};
  return GetOf(format, {100}, objects);
}

Status AnotherTenant(Seal seal, Random* random) {
  const Buffers theirs = RandomBuffers(random, {100});
  return GetOf(TestFormat(seal), {100}, Put(TestFormat(seal, "uid:1001"), kKey, theirs));
}

Status AnotherSecret(Seal seal, Random* random) {
  const RemoteFormat other = TestFormat(seal, "uid:1000", std::string(32, '~'));
  return GetOf(TestFormat(seal), {100}, Put(other, kKey, RandomBuffers(random, {100})));
}

// A header that somebody wrote who has no secret, from one that says another key.
Status ForgedKey(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, "another key", RandomBuffers(random, {100}));
  Envelope envelope;
  std::memcpy(&envelope, objects[0].data(), sizeof(envelope));
  envelope.key_bytes = kKey.size();
  std::memcpy(envelope.key, kKey.data(), kKey.size());
  std::memcpy(objects[0].data(), &envelope, sizeof(envelope));
  return GetOf(format, {100}, objects);
}

Status OldValue(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  const std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100}));
  return GetOf(format, {100}, objects, kNow + format.options().max_age + std::chrono::seconds(1));
}

Status FromTheFuture(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  const std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100}));
  return GetOf(format, {100}, objects, kNow - format.options().max_ahead - std::chrono::seconds(1));
}

Status AnotherKey(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  return GetOf(format, {100}, Put(format, "another key", RandomBuffers(random, {100})));
}

// As many bytes, cut into buffers elsewhere.
Status OtherSizes(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  return GetOf(format, {200, 100}, Put(format, kKey, RandomBuffers(random, {100, 200})));
}

Status SwappedStripes(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {2 * kStripeBytes}));
  std::swap(objects[0], objects[1]);
  return GetOf(format, {2 * kStripeBytes}, objects);
}

Status MixedVersions(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {kStripeBytes + 100}));
  objects[1] = Put(format, kKey, RandomBuffers(random, {kStripeBytes + 100}))[1];
  return GetOf(format, {kStripeBytes + 100}, objects);
}

Status Padded(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100}));
  objects[0].push_back(std::byte{0});
  return GetOf(format, {100}, objects);
}

Status FlippedBytes(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100, 1000}));
  objects[0][kHeaderBytes + (*random)() % 1100] ^= std::byte{1} << ((*random)() % 8);
  return GetOf(format, {100, 1000}, objects);
}

Status AnotherValuesBytes(Seal seal, Random* random) {
  const RemoteFormat format = TestFormat(seal);
  std::vector<Object> objects = Put(format, kKey, RandomBuffers(random, {100}));
  const Object other = Put(format, "another key", RandomBuffers(random, {100}))[0];
  std::copy(other.begin() + kHeaderBytes, other.end(), objects[0].begin() + kHeaderBytes);
  return GetOf(format, {100}, objects);
}

}  // namespace

uint32_t TestSeed() {
  const char* given = std::getenv("KVS_TEST_SEED");
  const auto seed = given ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                          : static_cast<uint32_t>(std::random_device()());
  std::printf("KVS_TEST_SEED=%u\n", seed);
  return seed;
}

RemoteFormat TestFormat(Seal seal, std::string_view tenant, std::string_view secret) {
  return {RemoteSecret::Of(secret).value(), tenant, {seal}};
}

Buffers RandomBuffers(Random* random, const std::vector<uint64_t>& sizes) {
  Buffers buffers;
  for (const uint64_t size : sizes) {
    std::vector<std::byte>& buffer = buffers.emplace_back(size);
    for (size_t i = 0; i < size; i += 8) {
      const uint64_t word = (*random)();
      std::memcpy(&buffer[i], &word, std::min<size_t>(8, size - i));
    }
  }
  return buffers;
}

std::vector<Object> Put(const RemoteFormat& format, std::string_view key, const Buffers& buffers,
                        WallTime now) {
  const std::vector<std::span<const std::byte>> spans(buffers.begin(), buffers.end());
  const OutgoingValue value = format.Prepare(key, spans, now).value();
  std::vector<std::byte> room(format.needs_room() ? std::min(value.bytes, kStripeBytes) : 0);
  std::vector<Object> objects;
  for (uint32_t i = 0; i < value.stripes; ++i) {
    const OutgoingStripe stripe = format.Write(value, i, room);
    Object& object = objects.emplace_back(stripe.header.begin(), stripe.header.end());
    for (const std::span<const std::byte> part : stripe.bytes) {
      object.insert(object.end(), part.begin(), part.end());
    }
  }
  return objects;
}

Status Get(const RemoteFormat& format, std::string_view key, const std::vector<uint64_t>& sizes,
           std::span<const Object> objects, Buffers* got, WallTime now) {
  got->clear();
  for (const uint64_t size : sizes) got->emplace_back(size, std::byte{0xEE});
  const std::vector<std::span<std::byte>> spans(got->begin(), got->end());
  KVS_ASSIGN_OR_RETURN(IncomingValue value, format.Expect(key, spans));
  for (uint32_t i = 0; i < value.stripes() && i < objects.size(); ++i) {
    const std::span<const std::byte> all = objects[i];
    const size_t head = std::min(all.size(), kHeaderBytes);
    std::span<const std::byte> rest = all.subspan(head);
    for (const std::span<std::byte> part : value.parts(i)) {
      const size_t some = std::min(part.size(), rest.size());
      std::copy_n(rest.begin(), some, part.begin());
      rest = rest.subspan(some);
    }
    KVS_RETURN_IF_ERROR(format.Open(&value, i, all.first(head), all.size(), now));
  }
  return value.complete() ? OkStatus() : NotFound("REMOTE_MISS", "a stripe is missing");
}

std::span<const Attack> Attacks() {
  static const std::vector<Attack> attacks = {
      {"a flipped bit of a header", Guard::kRemoteTag, "REMOTE_CORRUPT", kBoth, FlippedHeader},
      {"another tenant's value", Guard::kRemoteTag, "REMOTE_CORRUPT", {Seal::kNone}, AnotherTenant},
      {"another secret's", Guard::kRemoteTag, "REMOTE_CORRUPT", {Seal::kNone}, AnotherSecret},
      {"a forged key", Guard::kRemoteTag, "REMOTE_CORRUPT", {Seal::kNone}, ForgedKey},
      {"an old value", Guard::kRemoteAge, "REMOTE_STALE", kBoth, OldValue},
      {"a value from the future", Guard::kRemoteAge, "REMOTE_STALE", kBoth, FromTheFuture},
      {"another key's value", Guard::kRemoteKey, "REMOTE_OTHER", kBoth, AnotherKey},
      {"buffers of other sizes", Guard::kRemoteSizes, "REMOTE_VALUE", kBoth, OtherSizes},
      {"swapped stripes", Guard::kRemoteStripe, "REMOTE_OTHER", kBoth, SwappedStripes},
      {"stripes of two versions", Guard::kRemoteWhole, "REMOTE_OTHER", kBoth, MixedVersions},
      {"a byte too many", Guard::kRemoteLength, "REMOTE_CORRUPT", kBoth, Padded},
      {"a flipped bit of bytes", Guard::kRemoteBytes, "REMOTE_CORRUPT", kBoth, FlippedBytes},
      {"another value's bytes", Guard::kRemoteBytes, "REMOTE_CORRUPT", kBoth, AnotherValuesBytes},
  };
  return attacks;
}

}  // namespace kvstrata::remote
