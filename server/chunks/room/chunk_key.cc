// SPDX-License-Identifier: Apache-2.0
// The streaming SHA256_* calls: EVP allocates and looks up an algorithm for every key.
#define OPENSSL_API_COMPAT 0x10100000L
#include <openssl/sha.h>

#include "server/chunks/room/chunk.h"

namespace kvstrata {
namespace {

constexpr std::string_view kPurpose = "kvstrata chunk 1";

}  // namespace

ChunkKey ChunkKeyOf(const ChunkScope& scope, const chunks::AskedKey& asked) {
  std::array<uint8_t, 16 + 4 + 32 + 32 + 4 + 8> bytes;
  uint8_t* at = bytes.data();
  const auto add = [&at](const void* from, size_t n) {
    std::memcpy(at, from, n);
    at += n;
  };
  static_assert(kPurpose.size() == 16);
  add(kPurpose.data(), kPurpose.size());
  add(&scope.user, sizeof(scope.user));
  add(scope.space.data(), scope.space.size());
  add(asked.hash.data(), asked.hash.size());
  add(&asked.group, sizeof(asked.group));
  add(&scope.row_bytes, sizeof(scope.row_bytes));
  ChunkKey key;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, bytes.data(), bytes.size());
  SHA256_Final(key.data(), &context);
  return key;
}

std::string TierKeyOf(const ChunkKey& key) {
  std::string name(chunks::kKeyPrefix);
  name.append(reinterpret_cast<const char*>(key.data()), key.size());
  return name;
}

std::optional<ChunkKey> ChunkKeyFrom(std::string_view tier_key) {
  if (tier_key.size() != chunks::kTierKeyBytes || !tier_key.starts_with(chunks::kKeyPrefix)) {
    return std::nullopt;
  }
  ChunkKey key;
  std::memcpy(key.data(), tier_key.data() + chunks::kKeyPrefix.size(), key.size());
  return key;
}

}  // namespace kvstrata
