// SPDX-License-Identifier: Apache-2.0
// Spans of a batch as the CUDA ops of plan sekv find them: where the extents of codec lowrank lie
// (docs/extents.md), as a POD of device addresses. The ops read spans, means, norms, entries,
// factors and raw rows in the extents themselves; only this table is made for them.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

inline constexpr int32_t kSpanPartsMax = 1536;  // parts of a sequence
inline constexpr int32_t kSpanTileRows = 16;    // spans, or raw rows, that a warp takes at once
// A long span is read by several warps: one for every 32 tokens, at most this many. So many entries
// a list has for each span.
inline constexpr int32_t kSpanPieces = 4;

// One part of a sequence: three extents, all layers. Addresses are multiples of 16.
struct SpanPart {
  uint64_t spans;           // i32 [span_count][2]: begin and end
  uint64_t k_mean, v_mean;  // bf16 [layers][kv_heads][span_count][head_dim]
  uint64_t inverse_norms;   // f32 [layers][query_heads][span_count]; not read without routers
  uint64_t entries;         // SpanFactors [layers][kv_heads][span_count]
  uint64_t factors;         // what entries count from
  uint64_t raw_rows;  // the model's dtype [layers][keys, values][kv_heads][raw_count][head_dim]
  int32_t span_count, raw_count;
  // In this part and those before (PutBehind): spans, tiles of spans, tiles of raw rows. No tile is
  // of two parts.
  int32_t end_span, end_tile, end_raw_tile, reserved;

  // Makes this the part behind `before`; null: the first one.
  void PutBehind(const SpanPart* before) {
    const auto tiles = [](int32_t rows) { return (rows + kSpanTileRows - 1) / kSpanTileRows; };
    end_span = span_count + (before == nullptr ? 0 : before->end_span);
    end_tile = tiles(span_count) + (before == nullptr ? 0 : before->end_tile);
    end_raw_tile = tiles(raw_count) + (before == nullptr ? 0 : before->end_raw_tile);
  }
};
static_assert(sizeof(SpanPart) == 80);

// An entry of kind 3: where factors begin, at multiples of 64. rank >= 1: A bf16 [n][rank], then at
// the next multiple of 64 B bf16 [rank][head_dim]; rank -1: the rows, bf16 [n][head_dim].
struct SpanFactors {
  uint64_t k, v;
  int32_t k_rank, v_rank;
  uint64_t reserved;
};
static_assert(sizeof(SpanFactors) == 32);

// How a sequence's queries are routed.
struct SpanRouter {
  uint64_t w;       // f32 [layers][query_heads][d_route][head_dim]
  uint64_t tau;     // f32 [layers][query_heads]
  int32_t routers;  // query_heads; or 0: no w, relevance is the coarse row's logit
  int32_t d_route;
};
static_assert(sizeof(SpanRouter) == 24);

// One layer of a batch.
struct SpanLayer {
  const SpanPart* parts = nullptr;      // device [batch][part_stride]
  const int32_t* counts = nullptr;      // device [batch], parts of each sequence; 0: no spans
  const SpanRouter* routers = nullptr;  // device [batch], not read where there are no spans
  int32_t part_stride = 0;              // at most kSpanPartsMax
  int32_t span_stride = 0;              // spans a sequence may have, a multiple of 32, < 2^24
  int32_t layer = 0;
  int32_t kv_heads = 0, group = 0, head_dim = 0;  // group 1..8; head_dim 64, 128 or 256
  DType dtype = DType::kBF16;                     // queries and raw rows: bf16 or fp16
};

// Queries of one token a sequence: [batch][kv_heads * group][head_dim], 16-byte aligned.
struct SpanQueries {
  const void* q = nullptr;  // device, SpanLayer.dtype
  int64_t stride = 0;       // bytes from a sequence's queries to the next's, a multiple of 16
  int32_t batch = 0;
  float scale = 1.0f;  // factor of the logits
};

inline bool IsValid(const SpanLayer& l, const SpanQueries& q) {
  return l.kv_heads >= 1 && l.group >= 1 && l.group <= 8 && l.part_stride >= 0 &&
         l.part_stride <= kSpanPartsMax && l.span_stride % 32 == 0 && l.span_stride < 1 << 24 &&
         q.batch >= 0 && q.stride % 16 == 0;
}

}  // namespace kvstrata::cuda
