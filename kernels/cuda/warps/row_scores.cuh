// SPDX-License-Identifier: Apache-2.0
// Scores of rows (keys, or summaries of units) by the queries of a KV head, on tensor cores: 16
// rows are the M of a product whose 8 columns are queries, so that a row is read once for its
// group.
//
// Lane 4g + t copies (cp.async) what its fragments hold of a row and nothing else: 16 bytes, dims
// [8t, 8t + 8) of every 32, of rows g and g + 8. (Whole rows by neighbouring lanes were 1 to 5 %
// slower on an H100.) A query is cut into two numbers of the rows'
// dtype, high + low, so that fp32 queries lose next to nothing; a group of up to 4 heads has both
// in one product.
//   field 0 alone        score = q . row
//   fields 0 and 1       score = min(q, 0) . row + max(q, 0) . (row + field_stride): Quest's bound
//                        sum_c max(q_c min_c, q_c max_c), for finite rows
//   the same, deviation  score = q . row + 2 sqrt(q^2 . (row + field_stride)): of a mean and a
//                        variance. Over fp16 rows squares above 65504 count as 65504
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"

namespace kvstrata::cuda {

// Queries of one KV head as right-hand fragments, in shared memory.
template <int kDim>
struct QueryFragments {
  uint4 at[2][2][kDim / 32][32];  // [field][high, low (groups above 4)][chunk of dims][lane]
};

template <typename T>
__device__ inline uint32_t PackedPair(T low, T high) {
  uint32_t bits;
  const T pair[2] = {low, high};
  memcpy(&bits, pair, sizeof(bits));
  return bits;
}

// What a column of a fragment holds of a query's element.
template <typename T, bool kDeviation>
__device__ inline T QueryPart(float x, int field, int fields, bool low) {
  if constexpr (kDeviation) {
    if (field == 1) x *= x;
    if constexpr (std::is_same_v<T, __half>) x = fminf(x, 65504.0f);
  } else if (fields == 2) {
    x = field == 0 ? fminf(x, 0.0f) : fmaxf(x, 0.0f);
  }
  const T high = Rounded<T>(x);
  return low ? Rounded<T>(x - FloatOf(high)) : high;
}

// Fills `out` with the `group` queries from element `first_element` of q on. By all threads;
// barrier afterwards.
template <typename T, bool kDeviation = false, int kDim>
__device__ void LoadQueries(QueryFragments<kDim>* out, const void* q, DType q_dtype,
                            int64_t first_element, int group, int fields) {
  constexpr int kChunks = kDim / 32;
  const bool wide = group > 4;
  const int tiles = wide ? 2 : 1;
  for (int i = threadIdx.x; i < fields * tiles * kChunks * 32; i += blockDim.x) {
    const int lane = i % 32, chunk = i / 32 % kChunks;
    const int tile = i / 32 / kChunks % tiles, field = i / 32 / kChunks / tiles;
    const int column = lane / 4;
    const int query = wide ? column : column % 4;
    const bool low = wide ? tile == 1 : column >= 4;
    float x[8] = {};
    const int64_t at = first_element + int64_t{query} * kDim + 32 * chunk + 8 * (lane % 4);
    if (query < group) LoadFloats(q, q_dtype, at, x);
    T parts[8];
    for (int e = 0; e < 8; ++e) parts[e] = QueryPart<T, kDeviation>(x[e], field, fields, low);
    out->at[field][tile][chunk][lane] = {
        PackedPair(parts[0], parts[1]), PackedPair(parts[2], parts[3]),
        PackedPair(parts[4], parts[5]), PackedPair(parts[6], parts[7])};
  }
}

// The scores of two queries (LaneQuery) that a lane holds of a tile. Groups of up to 4: lanes
// t and t + 2 hold the same.
struct LaneScores {
  float row_g[2], row_g8[2];  // by query
};

// The first of the two queries (of the group) whose scores this lane holds.
__device__ inline int LaneQuery(int lane, bool wide) { return 2 * (wide ? lane % 4 : lane % 2); }

// The largest of a row's scores over the group, in all four lanes of the row.
__device__ inline float GroupMax(const float (&scores)[2], int first_query, int group) {
  float best = -INFINITY;
  for (int i = 0; i < 2; ++i) {
    if (first_query + i < group) best = fmaxf(best, scores[i]);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  return fmaxf(best, __shfl_xor_sync(~0u, best, 2));
}

// Where row r of a head begins.
__device__ inline const char* RowAddress(const DeviceRows& rows, const uint64_t* pages,
                                         int64_t head_offset, int32_t r) {
  const int32_t page = r / rows.page_rows;
  return reinterpret_cast<const char*>(pages[page]) + head_offset +
         (r - page * rows.page_rows) * rows.row_stride;
}

// A warp's ring of rows on their way from memory, in shared memory: one field of 16 rows a stage.
// What a lane copies it alone reads, so that no barrier is needed.
template <int kDim>
struct RowRing {
  static constexpr int kStages = kDim == 64 ? 6 : kDim == 128 ? 3 : 2;
  uint4 at[kStages][kDim / 16][32];  // [stage][chunk of row g, of row g + 8, ...][lane]
};

// Scores tile after tile of 16 rows of one KV head, several stages of loads ahead. By whole warps.
// row_of(i) is the first row of the warp's tile i; rows outside [first, last) are scored as the
// nearest inside, and do not count.
template <typename T, int kDim, bool kDeviation, typename RowOf>
class TileScorer {
 public:
  // `fields` etc. as in ScoreBatch; pages: of the sequence; ring: the warp's own. Loads begin here;
  // `queries` are read by Next. once: the L2 drops rows before what else is in it.
  __device__ TileScorer(const DeviceRows& rows, int fields, int64_t field_stride, int64_t sequence,
                        int head, int first, int last, int tiles, RowOf row_of,
                        const QueryFragments<kDim>& queries, bool wide, RowRing<kDim>* ring,
                        bool once = false)
      : rows_(rows),
        pages_(rows.pages + sequence * rows.page_stride),
        head_offset_(rows.offset + head * rows.head_stride + 16 * (threadIdx.x % 4)),
        field_stride_(field_stride),
        fields_(fields),
        first_(first),
        last_(last),
        tiles_(tiles),
        wide_(wide),
        once_(once),
        row_of_(row_of),
        queries_(queries),
        ring_(ring) {
#pragma unroll
    for (int stage = 0; stage < RowRing<kDim>::kStages; ++stage) Issue(stage);
  }

  // The next tile's scores.
  __device__ LaneScores Next() {
    float high[4] = {}, low[4] = {}, mean[4];
    for (int field = 0; field < fields_; ++field) {
      if (kDeviation && field == 1) {
        Join(high, low);
        for (int i = 0; i < 4; ++i) mean[i] = high[i], high[i] = low[i] = 0;
      }
      asm volatile("cp.async.wait_group %0;" ::"n"(RowRing<kDim>::kStages - 1) : "memory");
      Multiply(field, high, low);
      Issue(stage_);
      stage_ = stage_ + 1 == RowRing<kDim>::kStages ? 0 : stage_ + 1;
    }
    Join(high, low);
    if constexpr (kDeviation) {
      for (int i = 0; i < 4; ++i) high[i] = mean[i] + 2 * sqrtf(fmaxf(high[i], 0.0f));
    }
    return {{high[0], high[1]}, {high[2], high[3]}};
  }

 private:
  static constexpr int kChunks = kDim / 32;

  // Adds the products of the queries' low parts: columns 4..7 of the same product, if not wide.
  __device__ void Join(float (&high)[4], float (&low)[4]) const {
    if (!wide_) {
      for (int i = 0; i < 4; ++i) low[i] = __shfl_xor_sync(~0u, high[i], 2);
    }
    for (int i = 0; i < 4; ++i) high[i] += low[i];
  }

  // Starts the copy of the next field of the next tile; nothing after the last, but as a group.
  __device__ void Issue(int stage) {
    if (tile_ < tiles_) {
      if (field_ == 0) FindRows();
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        Copy(&ring_->at[stage][2 * i][lane], row_g_ + 64 * i);
        Copy(&ring_->at[stage][2 * i + 1][lane], row_g8_ + 64 * i);
      }
      row_g_ += field_stride_;
      row_g8_ += field_stride_;
      if (++field_ == fields_) {
        field_ = 0;
        ++tile_;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ void FindRows() {
    const int near = row_of_(tile_) + static_cast<int>(threadIdx.x) % 32 / 4;
    row_g_ = RowAddress(rows_, pages_, head_offset_, min(max(near, first_), last_ - 1));
    row_g8_ = RowAddress(rows_, pages_, head_offset_, min(max(near + 8, first_), last_ - 1));
  }

  __device__ void Copy(uint4* to, const char* from) const {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const auto source = __cvta_generic_to_global(from);
    if (once_) {
      uint64_t policy;
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile(
          "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(at),
          "l"(source), "l"(policy)
          : "memory");
    } else if constexpr (kDim < 128) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(source)
                   : "memory");
    } else {  // the L2 fetches a row whole: 1 to 2 % faster
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(source)
                   : "memory");
    }
  }

  __device__ void Multiply(int field, float (&high)[4], float (&low)[4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 a = ring_->at[stage_][2 * i][lane], b = ring_->at[stage_][2 * i + 1][lane];
      const uint4 c = queries_.at[field][0][i][lane];
      MmaM16N8K16<T>(high, a.x, b.x, a.y, b.y, c.x, c.y);
      MmaM16N8K16<T>(high, a.z, b.z, a.w, b.w, c.z, c.w);
      if (!wide_) continue;
      const uint4 d = queries_.at[field][1][i][lane];
      MmaM16N8K16<T>(low, a.x, b.x, a.y, b.y, d.x, d.y);
      MmaM16N8K16<T>(low, a.z, b.z, a.w, b.w, d.z, d.w);
    }
  }

  const DeviceRows& rows_;
  const uint64_t* pages_;
  const int64_t head_offset_, field_stride_;
  const int fields_, first_, last_, tiles_;
  const bool wide_, once_;
  const RowOf row_of_;
  const QueryFragments<kDim>& queries_;
  RowRing<kDim>* ring_;
  int stage_ = 0;             // stage of the ring to be read next
  int tile_ = 0, field_ = 0;  // to be copied next
  const char *row_g_ = nullptr, *row_g8_ = nullptr;
};

}  // namespace kvstrata::cuda
