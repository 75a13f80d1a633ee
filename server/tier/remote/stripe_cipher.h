// SPDX-License-Identifier: Apache-2.0
// StripeCipher: AES-256-GCM under the key of one stripe (docs/remote_format.md, "Sealing").
//
// A key seals two messages, its header and its bytes, and never another: it comes of 32 random
// bytes, so that no two stripes have one. Hence the nonce is which of the two it is.
// Thread-safety: one thread at a time. Cost: 1 us to make, then 4 to 5 GB/s.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "server/tier/remote/hmac_key.h"

struct evp_cipher_ctx_st;

namespace kvstrata::remote {

enum class Message : uint8_t { kHeader = 0, kBytes = 1 };

// From the kernel: a process's own generator would repeat itself in a copy of its machine.
std::array<uint8_t, 32> RandomSalt();

class StripeCipher {
 public:
  using Tag = std::array<uint8_t, 16>;

  StripeCipher(const HmacKey& tenant, std::span<const uint8_t, 32> salt);

  // Encrypts `parts` behind each other into `out`, of as many bytes. `clear` is authenticated, too.
  // Each part may be what it is written to.
  Tag Encrypt(Message message, std::span<const std::byte> clear,
              std::span<const std::span<const std::byte>> parts, std::byte* out);
  // Decrypts in place. False: `tag` is not theirs, and their bytes mean nothing.
  bool Decrypt(Message message, std::span<const std::byte> clear,
               std::span<const std::span<std::byte>> parts, const Tag& tag);

 private:
  struct Freed {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  void Begin(Message message, std::span<const std::byte> clear, bool encrypts);

  std::unique_ptr<evp_cipher_ctx_st, Freed> context_;
};

}  // namespace kvstrata::remote
