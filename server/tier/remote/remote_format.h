// SPDX-License-Identifier: Apache-2.0
// RemoteFormat: the bytes of one tenant's values in a remote tier (docs/remote_format.md): what a
// value is called there, what is written, and how what came is checked.
//
// A value is one object of the servers' for each stripe (remote_stripes.h), named NameOf(key,
// place, stripe): a header of 512 bytes, then the stripe's bytes. All stripes of a value lie on one
// shard, as all values of a place do. It is there when all its stripes are.
//   Put   Prepare, then Write for each stripe; header and bytes go out with one writev, and stripe
//   0
//         after the others were acknowledged: its header is what a probe asks for.
//   Get   Expect, then for each stripe: read what came into a header and value.parts(stripe), and
//         Open. The value holds once Open was OK for all of them (value.complete()).
//   Probe, Walk   the first 512 bytes of stripe 0 (GETRANGE 0 511): Inspect.
//
// Copies: Seal::kNone copies nothing either way. Seal::kGcm encrypts into `room` of the caller's
// and decrypts in place, in the buffers that came. Thread-safety: const methods from any thread; an
// OutgoingValue may be read, an IncomingValue opened, by one thread at a time. Blocking: none.
// Cost: NameOf 0.5 us; Inspect 0.6 us (kGcm 1.8), a header 0.7 us (2.8); of bytes, a pass of
// XXH3-128 (of kGcm: AES-256-GCM, and XXH3-128 only when several stripes are put).
//
// Errors: INVALID_ARGUMENT REMOTE_VALUE (key, buffers, or sizes that are not those that were put).
// What came and is not what was put is DATA_LOSS and should leave: REMOTE_CORRUPT (a header or
// bytes fail their check: flipped, cut, forged, of another tenant, secret or Seal), REMOTE_OTHER
// (sound, but of another key, stripe, or version of the value), REMOTE_STALE (written longer ago
// than max_age, or in the future).
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "base/status.h"
#include "server/tier/remote/hmac_key.h"
#include "server/tier/remote/remote_secret.h"
#include "server/tier/remote/remote_stripes.h"
#include "server/tier/value_tier.h"

namespace kvstrata::remote {

// RemoteNames: what a tenant's values are called in a remote tier (docs/remote_format.md, "Names").
//
// kv1:{PLACE}:H:STRIPE, of 56 bytes and the stripe's number. PLACE and H are HMACs under keys of
// the tenant, so that neither tells anything about key, place or prompt to who has no secret.
// {PLACE} is a hash tag: what is equal there lies in one slot of a Redis Cluster. Thread-safety:
// const methods from any thread. Cost: two HMACs of a block, 0.5 us.

// For SCAN: the first stripe of every value, of all tenants.
inline constexpr std::string_view kFirstStripes = "kv1:{*}:*:0";

class RemoteNames {
 public:
  explicit RemoteNames(const TenantKeys& keys) : place_(keys.place), name_(keys.name) {}

  // `place` empty: the key takes its place.
  std::string NameOf(std::string_view key, std::string_view place, uint32_t stripe) const;

 private:
  HmacKey place_, name_;
};

inline constexpr size_t kHeaderBytes = 512;
using Header = std::array<std::byte, kHeaderBytes>;
using WallTime = std::chrono::system_clock::time_point;

struct RemoteFormatOptions {
  Seal seal = Seal::kNone;
  // Older values are refused; the servers' TTL should be no longer.
  std::chrono::seconds max_age = std::chrono::hours(24 * 7);
  // How far a writer's clock may be ahead.
  std::chrono::seconds max_ahead = std::chrono::minutes(10);
};

// A value on its way out. `buffers` stay the caller's and must not change until the last Write.
struct OutgoingValue {
  std::string key;
  std::vector<std::span<const std::byte>> buffers;
  ValueSizes sizes;
  uint64_t bytes = 0;
  uint32_t stripes = 1;
  uint64_t written = 0;             // seconds since 1970
  std::vector<Checksum> checksums;  // a checksum a stripe; none: nothing asks for them
  Checksum whole{};                 // over `checksums`, where there are several stripes
};

// One stripe as it is sent: the header, then `bytes`.
struct OutgoingStripe {
  Header header;
  std::vector<std::span<const std::byte>> bytes;  // in the value's buffers, or in `room`
};

// A value that is asked for, and how much of it has come.
class IncomingValue {
 public:
  uint32_t stripes() const { return static_cast<uint32_t>(opened_.size()); }
  // Where the bytes behind the header of that stripe go.
  std::vector<std::span<std::byte>> parts(uint32_t stripe) const {
    return StripeParts<std::byte>(buffers_, stripe);
  }
  // For header and bytes: what the servers must say of that stripe.
  uint64_t length(uint32_t stripe) const { return kHeaderBytes + StripeBytes(bytes_, stripe); }
  // Every stripe was opened, and all are of one put, or of puts of equal bytes.
  bool complete() const { return missing_ == 0; }

 private:
  friend class RemoteFormat;
  std::string key_;
  std::vector<std::span<std::byte>> buffers_;
  ValueSizes sizes_;
  uint64_t bytes_ = 0;
  std::vector<bool> opened_;
  uint32_t missing_ = 0;
  std::optional<Checksum> whole_;  // as the first stripe that was opened says
};

// What a header says, once its tag holds.
struct RemoteHead {
  std::string key;
  ValueSizes sizes;
  uint32_t stripe = 0, stripes = 1;
  uint64_t written = 0;            // seconds since 1970
  std::array<uint8_t, 32> salt{};  // kGcm: of the stripe's key
  Checksum check{};                // kNone: XXH3-128 of the stripe's bytes; kGcm: their tag
  Checksum whole{};                // equal in all stripes of a put; zeros where there is one
};

class RemoteFormat {
 public:
  RemoteFormat(const RemoteSecret& secret, std::string_view tenant,
               const RemoteFormatOptions& options = {});

  // The servers' key of a stripe. `place`: what TierPut::place says; "": the value has its own.
  std::string NameOf(std::string_view key, std::string_view place, uint32_t stripe = 0) const {
    return names_.NameOf(key, place, stripe);
  }
  const RemoteFormatOptions& options() const { return options_; }
  // What Write needs `room` for: a stripe's bytes, or none.
  bool needs_room() const { return options_.seal == Seal::kGcm; }

  // Checks key and buffers, and reads the bytes once if their checksums are needed.
  Result<OutgoingValue> Prepare(std::string_view key,
                                std::span<const std::span<const std::byte>> buffers,
                                WallTime now) const;
  // REQUIRES: stripe < value.stripes; where needs_room(), room of at least the stripe's bytes,
  // which stays as it is until they were sent.
  OutgoingStripe Write(const OutgoingValue& value, uint32_t stripe,
                       std::span<std::byte> room = {}) const;

  Result<IncomingValue> Expect(std::string_view key,
                               std::span<const std::span<std::byte>> buffers) const;
  // `header`: the first bytes that came, 512 or all of fewer. `length`: of all that came, header
  // and bytes. Where it is not value.length(stripe), value.parts(stripe) need not have been filled
  // and are left alone: then this says why it is not. REQUIRES: stripe < value->stripes().
  Status Open(IncomingValue* value, uint32_t stripe, std::span<const std::byte> header,
              uint64_t length, WallTime now) const;

  // Opens a header alone. Its bytes may still be cut or flipped: Open finds that.
  Result<RemoteHead> Inspect(std::span<const std::byte> header, WallTime now) const;
  // The same, of a value's first stripe; nothing: it is no such header, or another key's.
  std::optional<RemoteHead> HeadOf(std::string_view key, std::span<const std::byte> header,
                                   WallTime now) const;

 private:
  RemoteFormat(const TenantKeys& keys, const RemoteFormatOptions& options);
  Status WhyStale(uint64_t written, uint64_t now) const;
  Status WhyNotThis(const IncomingValue& value, uint32_t stripe, const RemoteHead& head) const;
  bool OpenBytes(std::span<const std::span<std::byte>> parts, const RemoteHead& head) const;

  RemoteFormatOptions options_;
  RemoteNames names_;
  HmacKey envelope_;
};

}  // namespace kvstrata::remote
