// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/stripe_cipher.h"

#include <openssl/evp.h>
#include <sys/random.h>

#include <cerrno>

#include "base/check.h"

namespace kvstrata::remote {
namespace {

constexpr int kNonceBytes = 12;

// Looked up once, which costs more than a header's encryption does.
const EVP_CIPHER* Aes256Gcm() {
  static const EVP_CIPHER* const kCipher = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
  KVS_CHECK(kCipher != nullptr);
  return kCipher;
}

const uint8_t* Bytes(const std::byte* data) { return reinterpret_cast<const uint8_t*>(data); }
uint8_t* Bytes(std::byte* data) { return reinterpret_cast<uint8_t*>(data); }

}  // namespace

std::array<uint8_t, 32> RandomSalt() {
  std::array<uint8_t, 32> salt;
  ssize_t got = 0;
  do {
    got = getrandom(salt.data(), salt.size(), 0);
  } while (got < 0 && errno == EINTR);
  KVS_CHECK(got == static_cast<ssize_t>(salt.size()));
  return salt;
}

void StripeCipher::Freed::operator()(EVP_CIPHER_CTX* context) const {
  EVP_CIPHER_CTX_free(context);  // wipes the key
}

StripeCipher::StripeCipher(const HmacKey& tenant, std::span<const uint8_t, 32> salt)
    : context_(EVP_CIPHER_CTX_new()) {
  KVS_CHECK(context_ != nullptr);
  HmacKey::Digest key = tenant.Of({std::as_bytes(salt)});
  KVS_CHECK(EVP_CipherInit_ex(context_.get(), Aes256Gcm(), nullptr, key.data(), nullptr, 1) == 1);
  OPENSSL_cleanse(key.data(), key.size());
}

void StripeCipher::Begin(Message message, std::span<const std::byte> clear, bool encrypts) {
  const std::array<uint8_t, kNonceBytes> nonce = {static_cast<uint8_t>(message)};
  KVS_CHECK(EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(),
                              encrypts ? 1 : 0) == 1);
  int done = 0;
  KVS_CHECK(clear.empty() || EVP_CipherUpdate(context_.get(), nullptr, &done, Bytes(clear.data()),
                                              static_cast<int>(clear.size())) == 1);
}

StripeCipher::Tag StripeCipher::Encrypt(Message message, std::span<const std::byte> clear,
                                        std::span<const std::span<const std::byte>> parts,
                                        std::byte* out) {
  Begin(message, clear, true);
  int done = 0;
  for (const std::span<const std::byte> part : parts) {
    KVS_CHECK(EVP_CipherUpdate(context_.get(), Bytes(out), &done, Bytes(part.data()),
                               static_cast<int>(part.size())) == 1);
    out += part.size();
  }
  Tag tag;
  KVS_CHECK(EVP_CipherFinal_ex(context_.get(), Bytes(out), &done) == 1);
  KVS_CHECK(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, tag.size(), tag.data()) ==
            1);
  return tag;
}

bool StripeCipher::Decrypt(Message message, std::span<const std::byte> clear,
                           std::span<const std::span<std::byte>> parts, const Tag& tag) {
  Begin(message, clear, false);
  int done = 0;
  for (const std::span<std::byte> part : parts) {
    KVS_CHECK(EVP_CipherUpdate(context_.get(), Bytes(part.data()), &done, Bytes(part.data()),
                               static_cast<int>(part.size())) == 1);
  }
  KVS_CHECK(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, tag.size(),
                                const_cast<uint8_t*>(tag.data())) == 1);
  uint8_t none = 0;
  return EVP_CipherFinal_ex(context_.get(), &none, &done) == 1;
}

}  // namespace kvstrata::remote
