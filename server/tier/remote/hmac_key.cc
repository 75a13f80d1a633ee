// SPDX-License-Identifier: Apache-2.0
// The streaming SHA256_* calls: EVP allocates and looks up an algorithm for every message.
#define OPENSSL_API_COMPAT 0x10100000L
#include "server/tier/remote/hmac_key.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <bit>
#include <type_traits>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr size_t kBlock = 64;  // bytes of a block of SHA-256

SHA256_CTX AfterBlock(std::span<const uint8_t> key, uint8_t pad) {
  std::array<uint8_t, kBlock> block;
  for (size_t i = 0; i < kBlock; ++i) block[i] = (i < key.size() ? key[i] : 0) ^ pad;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, block.data(), block.size());
  OPENSSL_cleanse(block.data(), block.size());
  return context;
}

}  // namespace

HmacKey::HmacKey(std::span<const uint8_t> key) {
  static_assert(sizeof(SHA256_CTX) == sizeof(Midstate) && std::is_trivially_copyable_v<SHA256_CTX>);
  KVS_CHECK(key.size() <= kBlock);  // a longer one would be hashed first
  inner_ = std::bit_cast<Midstate>(AfterBlock(key, 0x36));
  outer_ = std::bit_cast<Midstate>(AfterBlock(key, 0x5C));
}

HmacKey::~HmacKey() {
  OPENSSL_cleanse(&inner_, sizeof(inner_));
  OPENSSL_cleanse(&outer_, sizeof(outer_));
}

HmacKey::Digest HmacKey::Of(std::initializer_list<std::span<const std::byte>> parts) const {
  Digest digest;
  auto context = std::bit_cast<SHA256_CTX>(inner_);
  for (const std::span<const std::byte> part : parts) {
    SHA256_Update(&context, part.data(), part.size());
  }
  SHA256_Final(digest.data(), &context);  // wipes the context
  context = std::bit_cast<SHA256_CTX>(outer_);
  SHA256_Update(&context, digest.data(), digest.size());
  SHA256_Final(digest.data(), &context);
  return digest;
}

HmacKey::Digest HmacKey::Of(std::string_view text) const {
  return Of({std::as_bytes(std::span(text))});
}

}  // namespace kvstrata
