// SPDX-License-Identifier: Apache-2.0
// Envelope: the header before the bytes of every stripe (docs/remote_format.md, "Header"), and
// whether what one says can be.
//
// Pure functions, any thread. Bytes 64 to 512 are encrypted where `seal` is kGcm; what is here is
// what they are before.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/checksum.h"
#include "server/tier/remote/remote_secret.h"
#include "server/tier/value_tier.h"

namespace kvstrata::remote {

static_assert(std::endian::native == std::endian::little);

using Tag = std::array<uint8_t, 16>;
using Salt = std::array<uint8_t, 32>;

struct Envelope {
  static constexpr uint64_t kMagic = 0x3130544D'5253564B;  // "KVSRMT01"
  static constexpr uint32_t kVersion = 1;
  static constexpr size_t kTagAt = 48, kFieldsAt = 64;

  // Before the tag, in clear; and behind it.
  std::span<const std::byte> clear() const { return bytes().first(kTagAt); }
  std::span<const std::byte> fields() const { return bytes().subspan(kFieldsAt); }
  std::span<std::byte> fields() { return std::as_writable_bytes(std::span(this, 1)).subspan(64); }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(this, 1)); }
  std::string_view key_view() const { return {key, key_bytes}; }
  std::span<const uint64_t> sizes_view() const { return {sizes, buffer_count}; }

  uint64_t magic;
  uint32_t version;
  Seal seal;
  Salt salt;
  Tag tag;
  uint64_t written;
  uint16_t key_bytes;
  uint16_t buffer_count;
  uint32_t stripe;
  uint32_t stripes;
  uint32_t zero0;
  Checksum check;
  Checksum whole;
  char key[kMaxValueKeyBytes];
  uint64_t sizes[kMaxValueBuffers];
  uint8_t zero[200];
};
static_assert(sizeof(Envelope) == 512 && offsetof(Envelope, salt) == 16 &&
              offsetof(Envelope, tag) == Envelope::kTagAt &&
              offsetof(Envelope, written) == Envelope::kFieldsAt &&
              offsetof(Envelope, stripe) == 76 && offsetof(Envelope, check) == 88 &&
              offsetof(Envelope, whole) == 104 && offsetof(Envelope, key) == 120 &&
              offsetof(Envelope, sizes) == 184 && offsetof(Envelope, zero) == 312);

// Whether it begins as one of this version and `seal` does.
bool Begins(const Envelope& envelope, Seal seal);

// Whether lengths and stripe can be: nothing is read beyond what they say. For what has its tag.
bool Sound(const Envelope& envelope);

}  // namespace kvstrata::remote
