// SPDX-License-Identifier: Apache-2.0
// Where a key or a value lies: geometry, page layout, index-block layout. One set of offset
// functions for all backends, the daemon and the client.
//
// A page holds P tokens of all layers and KV heads, keys and values together:
//     [layer][K|V][kv_head][slot][dim]
// An index block holds the summaries of a run of tokens, made by a plan's segmenter:
//     level by level, each [layer][field][kv_head][unit][dim]
// so that one (layer, field, head) of a block is one contiguous run of rows for the scoring op.
// Units of keys in few bits are sealed groups instead, [layer][kv_head][group] (docs/spec/bits.md).
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/pages/dtype.h"
#include "kernels/pages/quantised_group.h"
#include "kernels/pages/rotary.h"

namespace kvstrata {

// What a model's cache looks like. Only the layers that kvstrata serves are counted.
struct Geometry {
  int32_t layers = 0;        // L, 1..512
  int32_t query_heads = 0;   // Hq, a multiple of kv_heads
  int32_t kv_heads = 0;      // Hkv, 1..256
  int32_t head_dim = 0;      // d: 64, 128 or 256
  int32_t page_tokens = 16;  // P: 16, 32 or 64
  DType dtype = DType::kBF16;
  Rotary rotary;    // what keys are stored before; {}: they are stored after it
  float scale = 0;  // for a query's products with keys, before the softmax; 0: 1 / sqrt(head_dim)

  bool pre_rope() const { return rotary.dim > 0; }
  int32_t group() const { return query_heads / kv_heads; }  // G
  float logit_scale() const {
    return scale > 0 ? scale : 1.0f / std::sqrt(static_cast<float>(head_dim));
  }
  int64_t row_bytes() const { return head_dim * SizeOf(dtype); }
  int64_t page_bytes() const { return int64_t{2} * layers * kv_heads * page_tokens * row_bytes(); }
  bool operator==(const Geometry&) const = default;
};

// OK, or INVALID_ARGUMENT that names the field, its value and the allowed ones.
Status Validate(const Geometry& g);

// Byte strides inside a page (or inside an engine's own paged tensors).
struct PageLayout {
  DType dtype = DType::kBF16;
  int32_t page_tokens = 0, kv_heads = 0, head_dim = 0;
  int64_t layer_stride = 0;  // from a layer to the next
  int64_t value_offset = 0;  // from a layer's keys to its values
  int64_t head_stride = 0;   // from a KV head to the next
  int64_t slot_stride = 0;   // from a token to the next

  static PageLayout Of(const Geometry& g) {
    const int64_t head = g.page_tokens * g.row_bytes();
    const int64_t keys = g.kv_heads * head;
    return {g.dtype, g.page_tokens, g.kv_heads, g.head_dim, 2 * keys, keys, head, g.row_bytes()};
  }
  int64_t KeyOffset(int layer, int head, int slot) const {
    return layer * layer_stride + head * head_stride + slot * slot_stride;
  }
  int64_t ValueOffset(int layer, int head, int slot) const {
    return KeyOffset(layer, head, slot) + value_offset;
  }
};

// Half-open range of token positions.
struct Run {
  int32_t begin = 0, end = 0;
  bool operator==(const Run&) const = default;
};

// The keys or the values of one layer and KV head of one sequence. Position t lies at
// pages[t / page_tokens] + offset + (t % page_tokens) * slot_stride.
struct PagedRows {
  std::byte* const* pages = nullptr;  // [ceil(tokens / page_tokens)]
  int64_t offset = 0;                 // bytes
  int64_t slot_stride = 0;            // bytes
  int32_t page_tokens = 0;
  int32_t dim = 0;
  DType dtype = DType::kBF16;

  std::byte* Row(int32_t t) const {
    return pages[t / page_tokens] + offset + (t % page_tokens) * slot_stride;
  }
};

inline PagedRows KeysOf(std::byte* const* pages, const PageLayout& p, int layer, int head) {
  return {pages, p.KeyOffset(layer, head, 0), p.slot_stride, p.page_tokens, p.head_dim, p.dtype};
}
inline PagedRows ValuesOf(std::byte* const* pages, const PageLayout& p, int layer, int head) {
  return {pages, p.ValueOffset(layer, head, 0), p.slot_stride, p.page_tokens, p.head_dim, p.dtype};
}

// One resolution of an index: units of `unit_tokens` consecutive tokens.
struct IndexLevel {
  int32_t unit_tokens = 0;
  int32_t units_per_block = 0;
  int64_t offset = 0;  // bytes from the block's start
};

// The index of a plan: none, min/max rows (Quest), rows of mean and variance, means at one or more
// levels (CHESS), or the keys themselves in few bits, a group of tokens a unit.
// Level 0 summarises tokens; level i > 0 summarises the rows of level i - 1.
struct IndexLayout {
  enum class Kind : uint8_t { kNone = 0, kMinMax = 1, kMean = 2, kBits = 3, kDeviation = 4 };

  Kind kind = Kind::kNone;
  DType dtype = DType::kBF16;  // the rows': kMean bf16 or f32, else the keys' own
  int32_t bits = 0;            // kBits: of a channel's code
  int32_t layers = 0, kv_heads = 0, head_dim = 0;
  int32_t fields = 0;        // rows a unit has: kMinMax 2 (min, then max), kDeviation 2 (mean, then
                             // variance), else 1; coarse rows
  int32_t block_tokens = 0;  // tokens a block covers
  int64_t block_bytes = 0;   // a multiple of 64
  int32_t level_count = 0;
  std::array<IndexLevel, 3> levels{};
  // Fields that serve as coarse rows of what is not selected (docs/spec/beyond.md 1): means of keys
  // and of values. -1: the index has none.
  int32_t key_mean = -1, value_mean = -1;

  bool operator==(const IndexLayout& o) const;

  int32_t BlocksFor(int32_t tokens) const {
    return kind == Kind::kNone ? 0 : (tokens + block_tokens - 1) / block_tokens;
  }
  // Complete units of a level in a sequence of `tokens`.
  int32_t UnitsFor(int level, int32_t tokens) const { return tokens / levels[level].unit_tokens; }

  // kBits: a unit's bytes.
  QuantisedGroup group() const { return {head_dim, bits, levels[0].unit_tokens}; }
  // Bytes of a unit's row of one field.
  int64_t row_bytes() const {
    return kind == Kind::kBits ? group().bytes() : head_dim * SizeOf(dtype);
  }
  // Byte offset, inside its block, of row `unit` (counted from the block's first unit).
  int64_t RowOffset(int level, int layer, int field, int head, int unit_in_block) const {
    const int64_t rows = (int64_t{layer} * fields + field) * kv_heads + head;
    return levels[level].offset +
           (rows * levels[level].units_per_block + unit_in_block) * row_bytes();
  }
  // Bytes from a unit's row of one field of the finest level to that of the next.
  int64_t field_stride() const {
    return int64_t{kv_heads} * levels[0].units_per_block * row_bytes();
  }
  // Bytes from a unit's row of one layer to that of the next.
  int64_t layer_stride(int level) const {
    return RowOffset(level, 1, 0, 0, 0) - RowOffset(level, 0, 0, 0, 0);
  }
  // The dtype of the coarse rows, which lie in slots of `dtype`: bf16, unless the slots are fp32.
  DType coarse_dtype() const { return dtype == DType::kF32 ? DType::kF32 : DType::kBF16; }
  // All rows of one field, dressed as pages: row u is unit u of the level. Not of kBits.
  PagedRows Rows(std::byte* const* blocks, int level, int layer, int field, int head) const {
    return {blocks,
            RowOffset(level, layer, field, head, 0),
            head_dim * SizeOf(dtype),
            levels[level].units_per_block,
            head_dim,
            IsCoarse(field) ? coarse_dtype() : dtype};
  }
  bool IsCoarse(int field) const { return field == key_mean || field == value_mean; }
  std::byte* Row(std::byte* const* blocks, int level, int layer, int field, int head,
                 int32_t unit) const {
    const int32_t n = levels[level].units_per_block;
    return blocks[unit / n] + RowOffset(level, layer, field, head, unit % n);
  }
};

// Lays out an index of `kind` over units of units[0] tokens, units[1] units of level 0, ...
// A block covers whole units of every level, and about 512 tokens if it can choose. coarse: with
// rows for what is not selected (docs/spec/beyond.md 1), means of keys and of values. mean_dtype:
// of the rows of kMean.
IndexLayout MakeIndexLayout(IndexLayout::Kind kind, const Geometry& g, const int32_t* unit_tokens,
                            int level_count, bool coarse = false, DType mean_dtype = DType::kBF16);

// Lays out an index of kBits over groups of `tokens`. A block covers whole groups and whole pages,
// and about 512 tokens if it can. REQUIRES: the group is valid (QuantisedGroup::IsValid).
IndexLayout MakeBitsLayout(const Geometry& g, int32_t bits, int32_t tokens);

}  // namespace kvstrata
