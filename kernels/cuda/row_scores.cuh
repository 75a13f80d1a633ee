// Scores of rows (keys, or summaries of units) by the queries of a KV head, on tensor cores: 16
// rows are the M of a product whose 8 columns are queries, so that a row is read once for its
// group.
//
// Rows go from memory straight into fragments: lane 4g + t loads 16 bytes, dims [8t, 8t + 8) of
// every 32, of rows g and g + 8. A query is cut into two numbers of the rows' dtype, high + low, so
// that fp32 queries lose nothing; a group of up to 4 heads has both in one product.
//   field 0 alone        score = q . row
//   fields 0 and 1       score = min(q, 0) . row + max(q, 0) . (row + field_stride): Quest's bound
//                        sum_c max(q_c min_c, q_c max_c), for finite rows
#ifndef KVSTRATA_KERNELS_CUDA_ROW_SCORES_CUH_
#define KVSTRATA_KERNELS_CUDA_ROW_SCORES_CUH_

#include "kernels/cuda/device_rows.h"
#include "kernels/cuda/float_bits.cuh"
#include "kernels/cuda/mma_m16n8k16.cuh"

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
template <typename T>
__device__ inline T QueryPart(float x, int field, int fields, bool low) {
  if (fields == 2) x = field == 0 ? fminf(x, 0.0f) : fmaxf(x, 0.0f);
  const T high = Rounded<T>(x);
  return low ? Rounded<T>(x - FloatOf(high)) : high;
}

// Fills `out` with the `group` queries from element `first_element` of q on. By all threads;
// barrier afterwards.
template <typename T, int kDim>
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
    for (int e = 0; e < 8; ++e) parts[e] = QueryPart<T>(x[e], field, fields, low);
    out->at[field][tile][chunk][lane] = {
        PackedPair(parts[0], parts[1]), PackedPair(parts[2], parts[3]),
        PackedPair(parts[4], parts[5]), PackedPair(parts[6], parts[7])};
  }
}

// The scores of two queries (LaneQuery) that a lane holds after ScoreRows. Groups of up to 4: lanes
// t and t + 2 hold the same.
struct LaneScores {
  float row_g[2], row_g8[2];  // by query
};

// The first of the two queries (of the group) whose scores this lane holds.
__device__ inline int LaneQuery(int lane, bool wide) { return 2 * (wide ? lane % 4 : lane % 2); }

// row_g, row_g8: this lane's two rows, field 0, at its dims (16 bytes * t). Rows that do not count
// must still be readable. By whole warps.
template <typename T, int kDim>
__device__ LaneScores ScoreRows(const QueryFragments<kDim>& q, int fields, int64_t field_stride,
                                bool wide, const char* row_g, const char* row_g8) {
  constexpr int kChunks = kDim / 32;
  const int lane = threadIdx.x % 32;
  float high[4] = {}, low[4] = {};
  for (int field = 0; field < fields; ++field) {
    uint4 a[kChunks], b[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      a[i] = LoadStreaming(row_g + field * field_stride + 64 * i);
      b[i] = LoadStreaming(row_g8 + field * field_stride + 64 * i);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 c = q.at[field][0][i][lane];
      MmaM16N8K16<T>(high, a[i].x, b[i].x, a[i].y, b[i].y, c.x, c.y);
      MmaM16N8K16<T>(high, a[i].z, b[i].z, a[i].w, b[i].w, c.z, c.w);
      if (!wide) continue;
      const uint4 d = q.at[field][1][i][lane];
      MmaM16N8K16<T>(low, a[i].x, b[i].x, a[i].y, b[i].y, d.x, d.y);
      MmaM16N8K16<T>(low, a[i].z, b[i].z, a[i].w, b[i].w, d.z, d.w);
    }
  }
  if (!wide) {  // low parts are columns 4..7 of the same product
    for (int i = 0; i < 4; ++i) low[i] = __shfl_xor_sync(~0u, high[i], 2);
  }
  return {{high[0] + low[0], high[1] + low[1]}, {high[2] + low[2], high[3] + low[3]}};
}

// Where row r of a head begins.
__device__ inline const char* RowAddress(const DeviceRows& rows, const uint64_t* pages,
                                         int64_t head_offset, int32_t r) {
  const int32_t page = r / rows.page_rows;
  return reinterpret_cast<const char*>(__ldg(pages + page)) + head_offset +
         (r - page * rows.page_rows) * rows.row_stride;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_CUDA_ROW_SCORES_CUH_
