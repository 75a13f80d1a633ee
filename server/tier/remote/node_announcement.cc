// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/node_announcement.h"

#include <openssl/crypto.h>

#include <bit>
#include <cstring>
#include <span>

#include "base/check.h"

namespace kvstrata::remote {
namespace {

static_assert(std::endian::native == std::endian::little);

// No tenant has this name: the keys are those of the nodes.
constexpr std::string_view kNodesTenant;
constexpr std::string_view kPlace = "nodes", kCall = "KVSCALL1", kAnswer = "KVSANSW1";
constexpr size_t kSeatPlaceBytes = 8;

struct Announcement {
  static constexpr uint64_t kMagic = 0x3145444F'4E53564B;  // "KVSNODE1"
  static constexpr uint32_t kVersion = 1;

  std::span<const std::byte> tagged() const { return std::as_bytes(std::span(this, 1)).first(352); }

  uint64_t magic;
  uint32_t version;
  Seal seal;
  uint64_t node;
  uint64_t written;
  uint32_t seat;
  uint16_t address_bytes;
  uint16_t release_bytes;
  char address[256];
  char release[kMaxNodeReleaseBytes];
  HmacKey::Digest tag;
};
static_assert(sizeof(Announcement) == kAnnouncementBytes && offsetof(Announcement, node) == 16 &&
              offsetof(Announcement, seat) == 32 && offsetof(Announcement, address) == 40 &&
              offsetof(Announcement, release) == 296 && offsetof(Announcement, tag) == 352);

std::span<const std::byte> AsBytes(std::string_view text) { return std::as_bytes(std::span(text)); }

Status Damaged(std::string_view reason, std::string what) {
  return {Code::kDataLoss, reason, "a node's announcement " + std::move(what)};
}

uint64_t Seconds(std::chrono::system_clock::duration time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(time).count());
}

}  // namespace

NodeKeys::NodeKeys(const RemoteSecret& secret, Seal seal)
    : seal_(seal), tag_(secret.Keys(kNodesTenant, seal).envelope) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const HmacKey::Digest place = HmacKey(secret.Keys(kNodesTenant, seal).place).Of(kPlace);
  place_ = "kv1:{";
  for (size_t i = 0; i < kSeatPlaceBytes; ++i) {
    place_ += kDigits[place[i] >> 4];
    place_ += kDigits[place[i] & 15];
  }
  place_ += "}:node.";
}

std::string NodeKeys::NameOf(uint32_t seat) const { return place_ + std::to_string(seat); }

std::string NodeKeys::Write(const NodeAnnouncement& node) const {
  KVS_CHECK(!node.address.empty() && node.address.size() <= kMaxNodeAddressBytes);
  KVS_CHECK(node.release.size() <= kMaxNodeReleaseBytes);
  Announcement a{};
  a.magic = Announcement::kMagic;
  a.version = Announcement::kVersion;
  a.seal = seal_;
  a.node = node.node;
  a.written = node.written;
  a.seat = node.seat;
  a.address_bytes = static_cast<uint16_t>(node.address.size());
  a.release_bytes = static_cast<uint16_t>(node.release.size());
  std::memcpy(a.address, node.address.data(), node.address.size());
  std::memcpy(a.release, node.release.data(), node.release.size());
  a.tag = tag_.Of({a.tagged()});
  return {reinterpret_cast<const char*>(&a), sizeof(a)};
}

Result<NodeAnnouncement> NodeKeys::Read(std::string_view bytes, uint32_t seat,
                                        std::chrono::system_clock::time_point now,
                                        std::chrono::seconds age) const {
  if (bytes.size() != sizeof(Announcement)) {
    return Damaged("REMOTE_CORRUPT", "has " + std::to_string(bytes.size()) + " bytes; it has 384");
  }
  Announcement a;
  std::memcpy(&a, bytes.data(), sizeof(a));
  const HmacKey::Digest tag = tag_.Of({a.tagged()});
  if (CRYPTO_memcmp(tag.data(), a.tag.data(), tag.size()) != 0) {
    return Damaged("REMOTE_CORRUPT", "has another tag than this cluster's secret gives it");
  }
  const bool sound = a.magic == Announcement::kMagic && a.version == Announcement::kVersion &&
                     a.seal == seal_ && a.address_bytes > 0 &&
                     a.address_bytes <= kMaxNodeAddressBytes &&
                     a.release_bytes <= kMaxNodeReleaseBytes;
  if (!sound) return Damaged("REMOTE_CORRUPT", "is of another version, or its lengths cannot be");
  if (a.seat != seat) return Damaged("REMOTE_OTHER", "lies at another's place");
  const uint64_t then = Seconds(now.time_since_epoch());
  const uint64_t skew = Seconds(kMaxNodeSkew);
  if (a.written > then + skew || then > a.written + skew + Seconds(age)) {
    return Damaged("REMOTE_STALE", "was written at " + std::to_string(a.written) +
                                       " by its node's clock, and now it is " +
                                       std::to_string(then) + "; clocks may be 10 minutes apart");
  }
  return NodeAnnouncement{
      a.seat, a.node, a.written, {a.address, a.address_bytes}, {a.release, a.release_bytes}};
}

HmacKey::Digest NodeKeys::OfCall(std::string_view body) const {
  return tag_.Of({AsBytes(kCall), AsBytes(body)});
}

HmacKey::Digest NodeKeys::OfAnswer(const HmacKey::Digest& call, std::string_view body) const {
  return tag_.Of({AsBytes(kAnswer), std::as_bytes(std::span(call)), AsBytes(body)});
}

bool NodeKeys::Equal(const HmacKey::Digest& digest, std::string_view claimed) {
  return claimed.size() == digest.size() &&
         CRYPTO_memcmp(digest.data(), claimed.data(), digest.size()) == 0;
}

}  // namespace kvstrata::remote
