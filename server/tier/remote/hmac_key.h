// SPDX-License-Identifier: Apache-2.0
// HmacKey: HMAC-SHA256 (RFC 2104) under one key, for many short messages.
//
// The two blocks that begin every message under a key are hashed once. EVP allocates and looks up
// an algorithm for each message, which costs several times what hashing it does.
// Thread-safety: const methods from any thread. Cost: 0.2 us, and 1 us for 1.8 KB. Wiped when it
// goes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

namespace kvstrata {

class HmacKey {
 public:
  using Digest = std::array<uint8_t, 32>;

  explicit HmacKey(std::span<const uint8_t> key);
  HmacKey(const HmacKey&) = default;
  HmacKey& operator=(const HmacKey&) = default;
  ~HmacKey();

  // For the parts behind each other.
  Digest Of(std::initializer_list<std::span<const std::byte>> parts) const;
  Digest Of(std::string_view text) const;

 private:
  // SHA-256's state after the first block; OpenSSL's SHA256_CTX (checked in the source).
  struct alignas(8) Midstate {
    std::array<uint8_t, 112> bytes{};
  };
  Midstate inner_, outer_;
};

}  // namespace kvstrata
