// SPDX-License-Identifier: Apache-2.0
// Bytes of the extents of codec lowrank (docs/extents.md): kSpanSummary, kSpanFactors and kRawRows
// of one range, three in this order. Private to sekv.
//
// Each begins with ExtentHeader and one of the structs below at byte 64; arrays follow, each at a
// multiple of 64, and 64 zero bytes.
#pragma once

#include <cstdint>

#include "kernels/codec/extent_bytes.h"

namespace kvstrata {

inline constexpr uint64_t kSpanInfoAt = sizeof(ExtentHeader);
inline constexpr int32_t kExtentsPerPart = 3;

// Flag of kSpanSummary: W, tau and the gates are trained.
inline constexpr uint32_t kSpansTrained = 1;

struct SpanInfo {
  int32_t span_count;
  int32_t anchor_count;
  int32_t d_route;
  // W's per layer: query_heads where they are trained, in the first part, which holds W and tau for
  // all; else 0. An untrained part may name kv_heads and hold W and norms, which nobody reads.
  int32_t routers;
  uint64_t spans;           // i32 [span_count][2], begin and end, ascending
  uint64_t anchors;         // i32 [anchor_count], ascending
  uint64_t k_mean, v_mean;  // bf16 [layers][kv_heads][span_count][head_dim]
  uint64_t router;          // f32 [layers][routers][d_route][head_dim]
  uint64_t tau;             // f32 [layers][query_heads]
  uint64_t inverse_norms;   // f32 [layers][query_heads][span_count], of what is trained
  uint64_t reserved[7];
};
static_assert(sizeof(SpanInfo) == 128);

struct FactorsInfo {
  int32_t span_count;
  int32_t refused;  // rows of entries, keys and values apart, whose factors lost more than max_loss
  uint64_t entries;  // FactorEntry [layers][kv_heads][span_count]
  uint64_t reserved[6];
};
static_assert(sizeof(FactorsInfo) == 64);

// The factors of a span of n tokens. rank >= 1: A bf16 [n][rank], then, at the next multiple of 64,
// B bf16 [rank][head_dim]. rank -1: the rows, bf16 [n][head_dim].
struct FactorEntry {
  uint64_t k, v;
  int32_t k_rank, v_rank;
  uint64_t reserved;
};
static_assert(sizeof(FactorEntry) == 32);

// Where B is, with A at `left`.
inline constexpr uint64_t RightFactorAt(uint64_t left, int32_t n, int32_t rank) {
  return static_cast<uint64_t>(AlignExtent(static_cast<int64_t>(left) + int64_t{n} * rank * 2));
}

struct RawRowsInfo {
  int32_t raw_count;
  int32_t reserved0;
  uint64_t positions;  // i32 [raw_count], ascending: all of the range that are in no span
  uint64_t rows;       // the model's dtype, [layers][K|V][kv_heads][raw_count][head_dim]
  uint64_t reserved[5];
};
static_assert(sizeof(RawRowsInfo) == 64);

}  // namespace kvstrata
