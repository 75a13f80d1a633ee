// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/remote_format.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "server/tier/guard.h"
#include "server/tier/remote/remote_envelope.h"
#include "server/tier/remote/stripe_cipher.h"

namespace kvstrata::remote {
namespace {

constexpr size_t kPlaceBytes = 8, kNameBytes = 16;  // first bytes of their HMACs
constexpr std::string_view kBegin = "kv1:{";
constexpr std::string_view kDigits = "0123456789abcdef";

void AppendHex(std::span<const uint8_t> bytes, std::string* out) {
  for (const uint8_t byte : bytes) {
    out->push_back(kDigits[byte >> 4]);
    out->push_back(kDigits[byte & 15]);
  }
}

Status BadValue(std::string message) { return InvalidArgument("REMOTE_VALUE", std::move(message)); }
Status Corrupt(std::string message) {
  return {Code::kDataLoss, "REMOTE_CORRUPT", std::move(message)};
}
Status Other(std::string message) { return {Code::kDataLoss, "REMOTE_OTHER", std::move(message)}; }
Status Stale(std::string message) { return {Code::kDataLoss, "REMOTE_STALE", std::move(message)}; }

uint64_t SecondsOf(WallTime time) {
  const auto since = std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch());
  return static_cast<uint64_t>(since.count());
}

// Their sizes, if a value may have such a key and such buffers.
template <typename Byte>
Result<ValueSizes> SizesOf(std::string_view key, std::span<const std::span<Byte>> buffers) {
  if (key.empty() || key.size() > kMaxValueKeyBytes) {
    return BadValue("a key has 1 to 64 bytes, this one " + std::to_string(key.size()));
  }
  if (buffers.empty() || buffers.size() > kMaxValueBuffers) {
    return BadValue("a value has 1 to 16 buffers, this one " + std::to_string(buffers.size()));
  }
  std::array<uint64_t, kMaxValueBuffers> sizes;
  for (size_t i = 0; i < buffers.size(); ++i) {
    sizes[i] = buffers[i].size();
    if (sizes[i] == 0) return BadValue("buffer " + std::to_string(i) + " has no bytes");
  }
  const std::span<const uint64_t> all = std::span(sizes).first(buffers.size());
  if (BytesOf(all) > kMaxValueBytes) {
    return BadValue("a value has at most 4 GiB, this one " + std::to_string(BytesOf(all)) +
                    " bytes");
  }
  return ValueSizes(all);
}

// The tag of a header that is not encrypted: over all but itself.
Tag TagOf(const HmacKey& key, const Envelope& envelope) {
  const HmacKey::Digest digest = key.Of({envelope.clear(), envelope.fields()});
  Tag tag;
  std::copy_n(digest.begin(), tag.size(), tag.begin());
  return tag;
}

// False: it has not the tag, and says nothing. Decrypts it where it is encrypted.
bool OpenEnvelope(const HmacKey& key, Envelope* envelope) {
  if (envelope->seal == Seal::kGcm) {
    const std::span<std::byte> fields = envelope->fields();
    StripeCipher cipher(key, envelope->salt);
    return cipher.Decrypt(Message::kHeader, envelope->clear(), {&fields, 1}, envelope->tag);
  }
  return CRYPTO_memcmp(TagOf(key, *envelope).data(), envelope->tag.data(), sizeof(Tag)) == 0;
}

Envelope EnvelopeOf(const OutgoingValue& value, uint32_t stripe, Seal seal) {
  Envelope envelope{};
  envelope.magic = Envelope::kMagic;
  envelope.version = Envelope::kVersion;
  envelope.seal = seal;
  envelope.written = value.written;
  envelope.key_bytes = static_cast<uint16_t>(value.key.size());
  envelope.buffer_count = static_cast<uint16_t>(value.buffers.size());
  envelope.stripe = stripe;
  envelope.stripes = value.stripes;
  envelope.whole = value.whole;
  std::memcpy(envelope.key, value.key.data(), value.key.size());
  std::ranges::copy(value.sizes.all(), envelope.sizes);
  return envelope;
}

}  // namespace

std::string RemoteNames::NameOf(std::string_view key, std::string_view place,
                                uint32_t stripe) const {
  const HmacKey::Digest where = place_.Of(place.empty() ? key : place);
  const HmacKey::Digest what = name_.Of(key);
  std::string name(kBegin);
  name.reserve(80);
  AppendHex(std::span(where).first(kPlaceBytes), &name);
  name += "}:";
  AppendHex(std::span(what).first(kNameBytes), &name);
  name += ':';
  name += std::to_string(stripe);
  return name;
}

RemoteFormat::RemoteFormat(const RemoteSecret& secret, std::string_view tenant,
                           const RemoteFormatOptions& options)
    : RemoteFormat(secret.Keys(tenant, options.seal), options) {}

RemoteFormat::RemoteFormat(const TenantKeys& keys, const RemoteFormatOptions& options)
    : options_(options), names_(keys), envelope_(keys.envelope) {}

Result<OutgoingValue> RemoteFormat::Prepare(std::string_view key,
                                            std::span<const std::span<const std::byte>> buffers,
                                            WallTime now) const {
  OutgoingValue value;
  KVS_ASSIGN_OR_RETURN(value.sizes, SizesOf(key, buffers));
  value.key = key;
  value.buffers.assign(buffers.begin(), buffers.end());
  value.bytes = BytesOf(value.sizes.all());
  value.stripes = StripesOf(value.bytes);
  value.written = SecondsOf(now);
  // A sealed stripe has its tag, but each has one of its own in every put of the same bytes.
  if (options_.seal == Seal::kGcm && value.stripes == 1) return value;
  for (uint32_t i = 0; i < value.stripes; ++i) {
    value.checksums.push_back(ChecksumOf(StripeParts<const std::byte>(value.buffers, i)));
  }
  if (value.stripes > 1) {
    value.whole = ChecksumOf(std::as_bytes(std::span(value.checksums)));
  }
  return value;
}

OutgoingStripe RemoteFormat::Write(const OutgoingValue& value, uint32_t stripe,
                                   std::span<std::byte> room) const {
  KVS_CHECK(stripe < value.stripes);
  OutgoingStripe out;
  out.bytes = StripeParts<const std::byte>(value.buffers, stripe);
  Envelope envelope = EnvelopeOf(value, stripe, options_.seal);
  if (options_.seal == Seal::kGcm) {
    const uint64_t bytes = StripeBytes(value.bytes, stripe);
    KVS_CHECK(room.size() >= bytes);
    envelope.salt = RandomSalt();
    StripeCipher cipher(envelope_, envelope.salt);
    envelope.check = cipher.Encrypt(Message::kBytes, {}, out.bytes, room.data());
    out.bytes = {room.first(bytes)};
    const std::span<const std::byte> fields = std::as_const(envelope).fields();
    envelope.tag =
        cipher.Encrypt(Message::kHeader, envelope.clear(), {&fields, 1}, envelope.fields().data());
  } else {
    envelope.check = value.checksums[stripe];
    envelope.tag = TagOf(envelope_, envelope);
  }
  out.header = std::bit_cast<Header>(envelope);
  return out;
}

Result<IncomingValue> RemoteFormat::Expect(std::string_view key,
                                           std::span<const std::span<std::byte>> buffers) const {
  IncomingValue value;
  KVS_ASSIGN_OR_RETURN(value.sizes_, SizesOf(key, buffers));
  value.key_ = key;
  value.buffers_.assign(buffers.begin(), buffers.end());
  value.bytes_ = BytesOf(value.sizes_.all());
  value.missing_ = StripesOf(value.bytes_);
  value.opened_.assign(value.missing_, false);
  return value;
}

Result<RemoteHead> RemoteFormat::Inspect(std::span<const std::byte> header, WallTime now) const {
  if (header.size() < kHeaderBytes) {
    return Corrupt("a header has 512 bytes, of this one came " + std::to_string(header.size()));
  }
  Envelope envelope;
  std::memcpy(&envelope, header.data(), sizeof(envelope));
  if (!Begins(envelope, options_.seal)) {
    return Corrupt("what came begins as no value of this version and remote.seal = " +
                   std::string(SealName(options_.seal)) + " does");
  }
  if (!OpenEnvelope(envelope_, &envelope) && Holds(Guard::kRemoteTag)) {
    return Corrupt("the header's tag is not that of its bytes under this tenant's key");
  }
  if (!Sound(envelope)) return Corrupt("the header says lengths that cannot be");
  KVS_RETURN_IF_ERROR(WhyStale(envelope.written, SecondsOf(now)));
  return RemoteHead{std::string(envelope.key_view()),
                    ValueSizes(envelope.sizes_view()),
                    envelope.stripe,
                    envelope.stripes,
                    envelope.written,
                    envelope.salt,
                    envelope.check,
                    envelope.whole};
}

std::optional<RemoteHead> RemoteFormat::HeadOf(std::string_view key,
                                               std::span<const std::byte> header,
                                               WallTime now) const {
  Result<RemoteHead> head = Inspect(header, now);
  if (!head.ok() || head->key != key || head->stripe != 0) return std::nullopt;
  return std::move(*head);
}

Status RemoteFormat::WhyStale(uint64_t written, uint64_t now) const {
  if (!Holds(Guard::kRemoteAge)) return OkStatus();
  if (written > now && written - now > static_cast<uint64_t>(options_.max_ahead.count())) {
    return Stale("it was written " + std::to_string(written - now) +
                 " s from now: the clocks of its writer and of this machine differ");
  }
  if (now > written && now - written > static_cast<uint64_t>(options_.max_age.count())) {
    return Stale("it was written " + std::to_string(now - written) + " s ago");
  }
  return OkStatus();
}

Status RemoteFormat::Open(IncomingValue* value, uint32_t stripe, std::span<const std::byte> header,
                          uint64_t length, WallTime now) const {
  KVS_CHECK(stripe < value->stripes());
  KVS_ASSIGN_OR_RETURN(const RemoteHead head, Inspect(header, now));
  KVS_RETURN_IF_ERROR(WhyNotThis(*value, stripe, head));
  if (length != value->length(stripe) && Holds(Guard::kRemoteLength)) {
    return Corrupt("of " + std::to_string(value->length(stripe)) + " bytes of header and stripe " +
                   std::to_string(stripe) + " came " + std::to_string(length));
  }
  if (!OpenBytes(value->parts(stripe), head) && Holds(Guard::kRemoteBytes)) {
    return Corrupt("the bytes of stripe " + std::to_string(stripe) + " fail their check");
  }
  if (!value->opened_[stripe]) --value->missing_;
  value->opened_[stripe] = true;
  value->whole_ = head.whole;
  return OkStatus();
}

Status RemoteFormat::WhyNotThis(const IncomingValue& value, uint32_t stripe,
                                const RemoteHead& head) const {
  if (head.key != value.key_ && Holds(Guard::kRemoteKey)) return Other("it is another key's value");
  if (!std::ranges::equal(head.sizes.all(), value.sizes_.all()) && Holds(Guard::kRemoteSizes)) {
    return BadValue("its buffers have other sizes than those that are asked for");
  }
  if (head.stripe != stripe && Holds(Guard::kRemoteStripe)) {
    return Other("it is stripe " + std::to_string(head.stripe) + ", not " + std::to_string(stripe));
  }
  if (value.whole_ && *value.whole_ != head.whole && Holds(Guard::kRemoteWhole)) {
    return Other("its stripes are of two versions of the value");
  }
  return OkStatus();
}

bool RemoteFormat::OpenBytes(std::span<const std::span<std::byte>> parts,
                             const RemoteHead& head) const {
  if (options_.seal == Seal::kGcm) {
    return StripeCipher(envelope_, head.salt).Decrypt(Message::kBytes, {}, parts, head.check);
  }
  const std::vector<std::span<const std::byte>> readable(parts.begin(), parts.end());
  return ChecksumOf(readable) == head.check;
}

}  // namespace kvstrata::remote
