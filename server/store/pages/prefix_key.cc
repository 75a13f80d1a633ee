// SPDX-License-Identifier: Apache-2.0
// The streaming SHA256_* calls: EVP allocates and looks up an algorithm for every page.
#define OPENSSL_API_COMPAT 0x10100000L
#include "server/store/pages/prefix_key.h"

#include <openssl/sha.h>
#include <sys/random.h>

#include <bit>
#include <type_traits>

#include "base/check.h"
#include "server/store/options/session_types.h"

namespace kvstrata {
namespace {

enum class Tag : uint8_t {
  kTenant = 1,
  kDigest,
  kLayout,
  kGeometry,
  kDType,
  kAdapter,
  kRank,
  kParent,
  kTokens,
  kIndexOf,
  kIndexLayout,
  kRotary,
  kScale,
  kIndexBits,
  kPrivate,
  kRows,
};

// What is known of the rows under a key: 2, they were finite when they became a page. Those of
// earlier versions may hold anything, on a disk or in a remote tier, and have other keys.
constexpr int64_t kRowsVersion = 2;

void Add(SHA256_CTX* context, Tag tag, const void* data, uint64_t bytes) {
  uint8_t head[9] = {static_cast<uint8_t>(tag)};
  std::memcpy(head + 1, &bytes, sizeof(bytes));
  SHA256_Update(context, head, sizeof(head));
  SHA256_Update(context, data, bytes);
}
void Add(SHA256_CTX* context, Tag tag, std::string_view text) {
  Add(context, tag, text.data(), text.size());
}
template <size_t N>
void Add(SHA256_CTX* context, Tag tag, const std::array<int64_t, N>& numbers) {
  Add(context, tag, numbers.data(), sizeof(numbers));
}

PageKey Finish(SHA256_CTX* context) {
  PageKey key;
  SHA256_Final(key.data(), context);
  return key;
}

}  // namespace

KeyChain::KeyChain(std::string_view tenant, const ModelDesc& model)
    : page_tokens_(model.geometry.page_tokens) {
  static_assert(sizeof(SHA256_CTX) == sizeof(Midstate) && std::is_trivially_copyable_v<SHA256_CTX>);
  const Geometry& g = model.geometry;
  SHA256_CTX context;
  SHA256_Init(&context);
  Add(&context, Tag::kTenant, tenant);
  Add(&context, Tag::kDigest, model.digest);
  Add(&context, Tag::kLayout, model.layout);
  Add(&context, Tag::kGeometry,
      std::array<int64_t, 6>{g.layers, g.query_heads, g.kv_heads, g.head_dim, g.page_tokens,
                             g.pre_rope()});
  if (g.pre_rope()) {
    Add(&context, Tag::kRotary,
        std::array<int64_t, 3>{std::bit_cast<int64_t>(g.rotary.theta), g.rotary.dim,
                               g.rotary.interleaved});
  }
  // What is made of queries and stored beside keys depends on it.
  if (g.scale > 0)
    Add(&context, Tag::kScale, std::array<int64_t, 1>{std::bit_cast<int32_t>(g.scale)});
  Add(&context, Tag::kDType, std::array<int64_t, 1>{static_cast<int64_t>(g.dtype)});
  Add(&context, Tag::kAdapter, model.adapter);
  Add(&context, Tag::kRank, std::array<int64_t, 2>{model.rank, model.ranks});
  Add(&context, Tag::kRows, std::array<int64_t, 1>{kRowsVersion});
  std::memcpy(midstate_.bytes.data(), &context, sizeof(context));
}

KeyChain KeyChain::Private() const {
  std::array<uint8_t, 32> number;
  KVS_CHECK(getrandom(number.data(), number.size(), 0) == static_cast<ssize_t>(number.size()));
  KeyChain chain = *this;
  SHA256_CTX context;
  std::memcpy(&context, midstate_.bytes.data(), sizeof(context));
  Add(&context, Tag::kPrivate, number.data(), number.size());
  std::memcpy(chain.midstate_.bytes.data(), &context, sizeof(context));
  chain.private_ = true;
  return chain;
}

PageKey KeyChain::Next(const PageKey& parent, std::span<const int32_t> tokens) const {
  SHA256_CTX context;
  std::memcpy(&context, midstate_.bytes.data(), sizeof(context));
  Add(&context, Tag::kParent, parent.data(), parent.size());
  Add(&context, Tag::kTokens, tokens.data(), tokens.size_bytes());
  return Finish(&context);
}

std::vector<PageKey> KeyChain::Pages(PageKey parent, std::span<const int32_t> tokens) const {
  KVS_CHECK(page_tokens_ > 0);
  const size_t step = static_cast<size_t>(page_tokens_);
  std::vector<PageKey> keys;
  keys.reserve(tokens.size() / step);
  for (size_t at = 0; at + step <= tokens.size(); at += step) {
    parent = Next(parent, tokens.subspan(at, step));
    keys.push_back(parent);
  }
  return keys;
}

PageKey IndexBlockKey(const PageKey& last_page, const IndexLayout& layout) {
  SHA256_CTX context;
  SHA256_Init(&context);
  Add(&context, Tag::kIndexOf, last_page.data(), last_page.size());
  std::array<int64_t, 9 + 3 * 3> numbers = {static_cast<int64_t>(layout.kind),
                                            static_cast<int64_t>(layout.dtype),
                                            layout.layers,
                                            layout.kv_heads,
                                            layout.head_dim,
                                            layout.fields,
                                            layout.block_tokens,
                                            layout.block_bytes,
                                            layout.level_count};
  for (size_t i = 0; i < layout.levels.size(); ++i) {
    const IndexLevel& level = layout.levels[i];
    numbers[9 + 3 * i] = level.unit_tokens;
    numbers[10 + 3 * i] = level.units_per_block;
    numbers[11 + 3 * i] = level.offset;
  }
  Add(&context, Tag::kIndexLayout, numbers);
  if (layout.kind == IndexLayout::Kind::kBits) {
    Add(&context, Tag::kIndexBits, std::array<int64_t, 1>{layout.bits});
  }
  return Finish(&context);
}

}  // namespace kvstrata
