// SPDX-License-Identifier: Apache-2.0
// Bytes of a kPackedSegment extent, and one such extent read back (docs/extents.md). Private to
// mosaickv.
//
//     0    ExtentHeader; flags: kPackedFinal, kPackedTruncated
//     64   PackedInfo
//     128  PackedEntry [layers][kv_heads]
//     then in a temporary extent: f64 [(end - begin) / buffer], the loss of each flush
//     then, for each (layer, KV head), at offsets of its entry, each at a multiple of 64:
//          R_K, R_V       f32 [head_dim][head_dim]    \ only where begin == plan_begin
//          eigenvalues    f32 [head_dim]              /
//          keys, values   rows of the stride of attend_packed.h, one a token
//          blocks         rows of the same format, one a block of `block` tokens; the last may be
//                         short
//     then 64 zero bytes
//
// A segment may consist of several extents that follow each other. A final segment's first extent
// holds the rotations (begin == plan_begin), and all name its end (plan_end). Those of a temporary
// one name the final segment whose rotations and strategies they use.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codec/extent_bytes.h"
#include "kernels/plans/mosaickv/packed.h"

namespace kvstrata {

inline constexpr uint64_t kPackedInfoAt = 64;
inline constexpr uint64_t kPackedEntriesAt = 128;

inline constexpr uint32_t kPackedFinal = 1;
inline constexpr uint32_t kPackedTruncated = 2;

struct PackedInfo {
  int32_t plan_begin;  // where the segment with the rotations begins
  int32_t plan_end;    // final: where the segment ends, which later extents may fill
  int32_t buffer;      // temporary: tokens of a flush
  int32_t reserved0;
  // Sum over the segment's tokens up to `end` of the relative error of a token, mean over layers,
  // KV heads, keys and values.
  double loss;
  double recent;     // temporary: mean relative error of the segment's last kRecentTokens
  uint64_t flushes;  // temporary: where the losses of the flushes are
  // Over the extent's rows, the largest mean error of kLossRun tokens that follow each other, 0
  // where the plan has no max_loss; and the same by the strategy that was to be taken, where that
  // was too much, else 0.
  double worst_loss, refused_loss;
  uint64_t reserved;
};
static_assert(sizeof(PackedInfo) == kPackedEntriesAt - kPackedInfoAt);

struct PackedEntry {
  uint64_t r_k, r_v, eigenvalues;  // 0 where begin != plan_begin
  uint64_t keys, values, blocks;
  int32_t keep, neighbours, block;  // the strategy
  int32_t reserved;
};
static_assert(sizeof(PackedEntry) == 64);

// What max_loss is held against is a mean over so many tokens that follow each other.
inline constexpr int32_t kLossRun = 16;

// Tokens over which closing by drift takes its mean (docs/spec/beyond.md 6).
inline constexpr int32_t kRecentTokens = 512;

// One extent. Rotations are null unless it holds them.
struct PackedExtent {
  Run tokens;
  bool final = false, truncated = false;
  PackedInfo info = {};
  int64_t bytes = 0;
  std::vector<PackedHead> heads;  // [layers][kv_heads]
  // Temporary: [rows / info.buffer].
  const double* flushes = nullptr;

  int32_t rows() const { return tokens.end - tokens.begin; }
  bool has_rotations() const { return info.plan_begin == tokens.begin; }
};

// What Due needs: header and info of an extent alone, in constant time.
struct PackedStub {
  Run tokens;
  bool final = false;
  PackedInfo info = {};
};
Result<PackedStub> ReadPackedStub(const ExtentView& extent, const Geometry& geometry);

Result<PackedExtent> ReadPackedExtent(const ExtentView& extent, const Geometry& geometry);

}  // namespace kvstrata
