// SPDX-License-Identifier: Apache-2.0
#include "kernels/pages/page_view.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/check.h"

namespace kvstrata {
namespace {

// Tokens an index block covers when its coarsest unit is smaller than that.
constexpr int32_t kIndexBlockTokens = 512;

constexpr float kMaxScale = 1e6f;

Status BadField(std::string_view field, int64_t value, std::string_view allowed) {
  return InvalidArgument("GEOMETRY_INVALID", std::string(field) + " is " + std::to_string(value) +
                                                 "; allowed: " + std::string(allowed));
}

// The least multiple of `unit` that is at least that.
int32_t BlockTokens(int64_t unit) {
  return static_cast<int32_t>((std::max<int64_t>(kIndexBlockTokens, unit) + unit - 1) / unit *
                              unit);
}

// Gives each level its place in the block. REQUIRES: all but units_per_block, offset and
// block_bytes is set.
void Place(IndexLayout* index) {
  for (int i = 0; i < index->level_count; ++i) {
    IndexLevel& level = index->levels[i];
    level.units_per_block = index->block_tokens / level.unit_tokens;
    level.offset = index->block_bytes;
    index->block_bytes += int64_t{index->layers} * index->fields * index->kv_heads *
                          level.units_per_block * index->row_bytes();
  }
  index->block_bytes = (index->block_bytes + 63) / 64 * 64;
}

// Numbers the fields: what the selector ranks by, then the coarse rows; a mean of keys is both.
void NumberFields(bool coarse, IndexLayout* index) {
  const bool means = index->kind == IndexLayout::Kind::kMean;
  index->fields = means ? 1 : 2;
  if (!coarse) return;
  index->key_mean = means ? 0 : index->fields++;
  index->value_mean = index->fields++;
}

}  // namespace

Status Validate(const Geometry& g) {
  if (g.layers < 1 || g.layers > 512) return BadField("layers", g.layers, "1..512");
  if (g.kv_heads < 1 || g.kv_heads > 256) return BadField("kv_heads", g.kv_heads, "1..256");
  if (g.query_heads < 1 || g.query_heads > 4096 || g.query_heads % g.kv_heads != 0) {
    return BadField("query_heads", g.query_heads,
                    "a multiple of kv_heads (" + std::to_string(g.kv_heads) + "), at most 4096");
  }
  if (g.head_dim != 64 && g.head_dim != 128 && g.head_dim != 256) {
    return BadField("head_dim", g.head_dim, "64, 128, 256");
  }
  if (g.page_tokens != 16 && g.page_tokens != 32 && g.page_tokens != 64) {
    return BadField("page_tokens", g.page_tokens, "16, 32, 64");
  }
  if (!IsDType(static_cast<int>(g.dtype))) {
    return BadField("dtype", static_cast<int>(g.dtype), AllDTypes("KVS"));
  }
  if (!(g.scale >= 0 && g.scale <= kMaxScale)) {
    return InvalidArgument("GEOMETRY_INVALID", "scale is " + std::to_string(g.scale) +
                                                   "; allowed: 0 (1 / sqrt(head_dim)), or up to " +
                                                   std::to_string(kMaxScale));
  }
  return Validate(g.rotary, g.head_dim);
}

bool IndexLayout::operator==(const IndexLayout& o) const {
  if (kind != o.kind || dtype != o.dtype || bits != o.bits || layers != o.layers ||
      kv_heads != o.kv_heads || head_dim != o.head_dim || fields != o.fields ||
      block_tokens != o.block_tokens || block_bytes != o.block_bytes ||
      level_count != o.level_count || key_mean != o.key_mean || value_mean != o.value_mean) {
    return false;
  }
  return std::equal(levels.begin(), levels.begin() + level_count, o.levels.begin(),
                    [](const IndexLevel& a, const IndexLevel& b) {
                      return a.unit_tokens == b.unit_tokens &&
                             a.units_per_block == b.units_per_block && a.offset == b.offset;
                    });
}

IndexLayout MakeIndexLayout(IndexLayout::Kind kind, const Geometry& g, const int32_t* unit_tokens,
                            int level_count, bool coarse, DType mean_dtype) {
  IndexLayout index;
  index.kind = kind;
  if (kind == IndexLayout::Kind::kNone) return index;
  KVS_CHECK(level_count >= 1 && level_count <= static_cast<int>(index.levels.size()));
  index.dtype = kind == IndexLayout::Kind::kMean ? mean_dtype : g.dtype;
  index.layers = g.layers;
  index.kv_heads = g.kv_heads;
  index.head_dim = g.head_dim;
  NumberFields(coarse, &index);
  index.level_count = level_count;

  int64_t tokens = 1;
  for (int i = 0; i < level_count; ++i) {
    KVS_CHECK(unit_tokens[i] >= 1);
    tokens *= unit_tokens[i];
    KVS_CHECK(tokens <= (int64_t{1} << 30));
    index.levels[i].unit_tokens = static_cast<int32_t>(tokens);
  }
  index.block_tokens = BlockTokens(tokens);
  Place(&index);
  return index;
}

IndexLayout MakeBitsLayout(const Geometry& g, int32_t bits, int32_t tokens) {
  IndexLayout index;
  index.kind = IndexLayout::Kind::kBits;
  index.bits = bits;
  index.layers = g.layers;
  index.kv_heads = g.kv_heads;
  index.head_dim = g.head_dim;
  index.fields = 1;
  index.level_count = 1;
  index.levels[0].unit_tokens = tokens;
  KVS_CHECK(index.group().IsValid());
  // A block is shared with the last page that it covers, which must end where it does.
  index.block_tokens = BlockTokens(std::lcm(tokens, g.page_tokens));
  Place(&index);
  return index;
}

}  // namespace kvstrata
