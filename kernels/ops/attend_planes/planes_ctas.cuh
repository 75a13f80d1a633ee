// SPDX-License-Identifier: Apache-2.0
// CTAs of the op's kernels: their shape and shared memory, the item that they share with others,
// and its query.
#pragma once

#include "kernels/ops/attend_planes/planes_shares.cuh"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

// As many warps on an SM as shared memory and registers have room for. Two CTAs there are of
// different heads, of which one may have less to do than the other.
template <int kDim, int kHeads>
struct CtaShape {
  static constexpr int kCtasOfSm = kDim == 128 ? 2 : 1;
  static constexpr int kWarps = kDim == 64 ? 16 : kDim == 128 ? 6 : kHeads == 4 ? 8 : 6;
  static constexpr int kThreads = kWarps * 32;
};

// In the workspace: what kernels of a share (by_share/share_kernels.cuh) leave. tokens:
// PlanesArguments::tokens.
struct ShareBuffers {
  float* scores;        // [rows][tokens], times log2(e)
  float* masses;        // [items][tokens], of candidates, the first of them first
  int32_t* candidates;  // [batch], or kNoQuery
  int32_t* takes;       // [batch], of candidates, that are fine
  int32_t* counts;      // [items], op pick's, as the next two
  int32_t* edges;       // [2][batch]
  uint4* scratch;       // [1]
  uint64_t* bits;       // [items][groups], a bit for each token

  // [items][tokens], what was picked: scores are read no more.
  __host__ __device__ int32_t* list() const { return reinterpret_cast<int32_t*>(scores); }
};

// What all kernels of the op take.
struct PlanesArguments {
  AttendPlanesBatch work;
  float scale;      // with log2(e)
  float relative;   // what a logit loses besides L_h - log2(N), so that 2^6 is fine
  float read_from;  // ItemRule's
  // In the workspace: what CTAs leave of attention [CTAs of the grid][group], what the first kernel
  // leaves of an item.
  Partials splits;
  float4* samples;    // [ctas of an item][rows]
  float* tops;        // [items], SampledTops each
  float* references;  // [items][8], what logits of heads are relative to, times log2(e)
  float* costs;       // [items]
  uint4* queries;     // [items], a SharedQuery each
  ShareBuffers share;

  __host__ __device__ int32_t items() const { return work.batch * work.planes.kv_heads; }
  __host__ __device__ int64_t rows() const { return int64_t{items()} * work.group; }
  // That a sequence has room for.
  __host__ __device__ int32_t tokens() const {
    return work.planes.block_stride * work.planes.block_groups * kGroupTokens;
  }
};

// Where everything is fine.
template <int kDim>
struct FullShape {
  static constexpr int kCtasOfSm = 1;
  static constexpr int kWarps = kDim == 64 ? 16 : kDim == 128 ? 12 : 6;
  static constexpr int kThreads = kWarps * 32;
};

// Warp: a warp's memory.
template <int kDim, int kHeads, typename Warp = WarpMemory<kDim, kHeads>,
          typename Shape = CtaShape<kDim, kHeads>>
struct CtaMemory {
  union {
    SharedQuery<kDim> query;
    float o[kHeads][kDim];  // the item's sums, at the end
  };
  uint4 ones[2];
  float reference[kHeads];
  float m[kHeads], l[kHeads];
  int cost;
  bool is_last;
  Warp warps[Shape::kWarps];
};

// A CTA's item, and its place among those that share it.
struct CtaPlace {
  int head, sequence;
  int64_t item, first_row;
  CtaShare share;
  // Among all that share the item: first warps of all its CTAs, then second ones. So CTAs visit as
  // many groups, but for one.
  int warp, warps;

  template <int kWarps>
  __device__ static CtaPlace Of(const AttendPlanesBatch& w, const CtaShare& share) {
    const int head = share.item % w.planes.kv_heads, sequence = share.item / w.planes.kv_heads;
    return {head,
            sequence,
            share.item,
            int64_t{share.item} * w.group,
            share,
            static_cast<int>(threadIdx.x / 32 * share.ctas + share.cta),
            share.ctas * kWarps};
  }
  // In a grid (ctas, items).
  template <int kWarps>
  __device__ static CtaPlace Of(const AttendPlanesBatch& w) {
    const auto item = static_cast<int>(blockIdx.y), ctas = static_cast<int>(gridDim.x);
    return Of<kWarps>(w, {item, static_cast<int>(blockIdx.x), ctas, item * ctas});
  }
};

// Queries to shared memory, by the first warp: all of an item's CTAs read the same kilobyte of the
// L2. Barrier afterwards.
template <int kDim>
__device__ __forceinline__ void LoadQuery(const PlanesArguments& a, const CtaPlace& place,
                                          SharedQuery<kDim>& to) {
  if (threadIdx.x >= 32) return;
  const AttendPlanesBatch& w = a.work;
  const int64_t first =
      place.sequence * w.q_stride + int64_t{place.head} * w.group * kDim;  // elements
  to.Store(LaneQueryPairs<kDim, 2>::Load(w.q, w.q_dtype, first, w.group), a.scale);
}

// The same as the kernel before has left it.
template <int kDim>
struct KeptQuery {
  static constexpr int kPieces = sizeof(SharedQuery<kDim>) / 16;

  // By threads first, first + step, ..
  __device__ static void Store(const PlanesArguments& a, int64_t item,
                               const SharedQuery<kDim>& query, int first, int step) {
    for (int i = first; i < kPieces; i += step) {
      a.queries[item * kPieces + i] = reinterpret_cast<const uint4*>(&query)[i];
    }
  }
  __device__ static void Load(const PlanesArguments& a, int64_t item, SharedQuery<kDim>& query,
                              int first, int step) {
    for (int i = first; i < kPieces; i += step) {
      reinterpret_cast<uint4*>(&query)[i] = __ldcg(a.queries + item * kPieces + i);
    }
  }
};

// A warp's, to a count of the item's.
__device__ __forceinline__ void AddBytes(uint64_t* counts, int64_t item, uint64_t bytes) {
  if (counts == nullptr || threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(counts + item), bytes);
}

}  // namespace kvstrata::cuda
