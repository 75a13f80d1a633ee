// SPDX-License-Identifier: Apache-2.0
// PageKey and KeyChain: the identity of a page (docs/design.md, "The life of a page").
//
// A key is SHA-256 over a tagged, length-prefixed encoding of tenant (cluster_tenants.h), model
// digest, layout, geometry, rotary parameters of keys stored before it, softmax scale if it is not
// the usual one, dtype, adapter, rank, what is known of the rows (docs/disk_format.md, "Values"),
// parent key and token ids. Equal keys mean equal bytes; the whole key is stored with the page and
// compared. Nobody without the tenant can make a tenant's key.
//
// Thread-safety: values; const methods from any thread. Cost: about 0.3 us a key of 16 tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/pages/page_view.h"
#include "server/store/options/store_fwd.h"

namespace kvstrata {

using PageKey = std::array<uint8_t, 32>;

// A hash for tables by key: a key's first bytes are uniform already.
struct PageKeyHash {
  using is_avalanching = void;
  size_t operator()(const PageKey& key) const {
    size_t h;
    std::memcpy(&h, key.data(), sizeof(h));
    return h;
  }
};

class KeyChain {
 public:
  KeyChain() = default;
  KeyChain(std::string_view tenant, const ModelDesc& model);

  // The same, but for a random number in every key: no key of it is ever made again, by nobody.
  KeyChain Private() const;
  bool is_private() const { return private_; }

  // The key of the page that holds `tokens` and follows the page of key `parent` (zeros: none).
  PageKey Next(const PageKey& parent, std::span<const int32_t> tokens) const;

  // Keys of all whole pages of `tokens`, the first of which follows `parent`.
  std::vector<PageKey> Pages(PageKey parent, std::span<const int32_t> tokens) const;

 private:
  // SHA-256's state after the fields that all pages of a model share: copying it is cheaper than
  // hashing them again. The layout is OpenSSL's SHA256_CTX (checked in the source).
  struct alignas(8) Midstate {
    std::array<uint8_t, 112> bytes{};
  };
  Midstate midstate_;
  int32_t page_tokens_ = 0;
  bool private_ = false;
};

// The key of the index block that ends where the page of key `last_page` ends.
PageKey IndexBlockKey(const PageKey& last_page, const IndexLayout& layout);

}  // namespace kvstrata
