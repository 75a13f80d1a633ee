// Predicted on a 2.5 to 3 GHz AVX-512 core without VBMI2 (Cascade Lake), G = 4, dim 128, keep 32 of
// 96, per row and KV head: stage and expand K and V 2 * 50 instructions, products 2 * 34, sums of
// lanes 11, softmax 10; at 4 a cycle about 50 cycles or 17 to 20 ns. The shuffle port, with 6
// expands of 2 and 6 mask moves each, needs 40, both multiplier ports together 2 * 24 for the
// products and all else that is 512 bits wide: about the same. Memory: 160 bytes, 16 ns of a core
// that has half of 20 GB/s. attend_raw reads 512 bytes in about 51 ns: 2x or better is expected.
#include "kernels/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/attend_packed/attend_packed_simd.cc"
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_packed/attend_packed.h"
#include "kernels/ops/attend_packed/packed_rows-inl.h"
#include "kernels/ops/attend_packed/weighted_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {

inline constexpr int kPackedQueries = 16;    // that share one decoding of a row
inline constexpr int kPackedTileRows = 32;   // of rows up to kNarrowChannels; half of it beyond
inline constexpr int kNarrowChannels = 128;  // a tile of fp32 rows is 16 KiB, half of an L1

HWY_INLINE int TileRowsOf(const PackedDecoder& decoder) {
  return decoder.channels() <= kNarrowChannels ? kPackedTileRows : kPackedTileRows / 2;
}

// Fp32 rows of a tile.
struct DenseTile {
  alignas(64) float values[kPackedTileRows * kNarrowChannels];
  const std::byte* rows[kPackedTileRows];

  HWY_INLINE void Fill(const std::byte* const* packed, int count, PackedDecoder& decoder) {
    decoder.Decode(packed, count, values);
    for (int i = 0; i < count; ++i) {
      rows[i] = reinterpret_cast<const std::byte*>(values + i * decoder.channels());
    }
  }
};

// Rows follow each other, so first and last byte name every cache line.
HWY_INLINE void PrefetchPacked(const std::byte* const* rows, int count, int64_t stride) {
  for (int i = 0; i < count; ++i) {
    __builtin_prefetch(rows[i]);
    __builtin_prefetch(rows[i] + stride - 1);
  }
}

// All rows as one page, which is how RowCursor walks runs.
HWY_INLINE PagedRows OnePage(std::byte* const* data, const PackedRows& rows) {
  return {data, 0, rows.stride, std::numeric_limits<int32_t>::max(), rows.dim, DType::kBF16};
}

// The queries of one pass over the rows: [first, first + count) of the item's.
struct PackedPass {
  static constexpr int kStates = kPackedQueries / kHeads;
  int first, count;
  alignas(64) float q[kPackedQueries * kHeadDimMax];  // [count][channels], scaled
  DecodeState states[kStates];

  HWY_INLINE int Heads(int s) const { return std::min(count - s * kHeads, kHeads); }
};

HWY_INLINE void OpenPass(const AttendPackedWork& w, int channels, PackedPass& pass) {
  for (int i = 0; i < pass.count; ++i) {
    const int at = pass.first + i;
    const float* from = w.q + at / w.group * w.q_token + int64_t{at % w.group} * w.k.dim;
    for (int c = 0; c < channels; ++c) pass.q[i * channels + c] = from[c] * w.scale;
  }
  for (int s = 0; s * kHeads < pass.count; ++s) {
    pass.states[s].q = pass.q + s * kHeads * channels;
    pass.states[s].o = w.o + int64_t{pass.first + s * kHeads} * w.v.dim;
    ClearState(pass.Heads(s), w.v.dim, pass.states[s]);
  }
}

HWY_NOINLINE void ScorePackedTile(const DenseTile& tile, int count, int channels,
                                  PackedPass& pass) {
  for (int s = 0; s * kHeads < pass.count; ++s) {
    DecodeState& st = pass.states[s];
    WithHeads(pass.Heads(s), [&]<int H>() HWY_ATTR {
      ScoreRows<float, H>(tile.rows, count, st.q, channels, channels, st);
      WeighTile<H>(count, st);
    });
  }
}

HWY_NOINLINE void AddPackedTile(const DenseTile& tile, int count, int channels, int dim,
                                PackedPass& pass) {
  for (int s = 0; s * kHeads < pass.count; ++s) {
    DecodeState& st = pass.states[s];
    WithHeads(pass.Heads(s), [&]<int H>() HWY_ATTR {
      AddRows<float, H>({tile.rows, count, st.s[0], st.alpha, dim, st.o}, channels);
    });
  }
}

// Writes m and l, and rotates the sums back.
HWY_NOINLINE void ClosePass(const AttendPackedWork& w, int channels, PackedPass& pass) {
  const int dim = w.v.dim;
  alignas(64) float sums[kHeads * kHeadDimMax];
  for (int s = 0; s * kHeads < pass.count; ++s) {
    DecodeState& st = pass.states[s];
    const int heads = pass.Heads(s);
    for (int h = 0; h < heads; ++h) {
      w.m[pass.first + s * kHeads + h] = st.m[h * kRows];
      w.l[pass.first + s * kHeads + h] = SumOfWeights(st, h);
    }
    if (w.run_count == 0) continue;  // o is 0
    std::fill(sums, sums + heads * dim, 0.0f);
    WithHeads(heads, [&]<int H>() HWY_ATTR {
      AddMatrixRows<float, H>(w.r_v, channels, dim, st.o, dim, dim, sums);
    });
    std::copy(sums, sums + heads * dim, st.o);
  }
}

HWY_NOINLINE void AttendPass(const AttendPackedWork& w, PackedPass& pass) {
  PackedDecoder keys(w.k), values(w.v);
  OpenPass(w, keys.channels(), pass);
  std::byte* const pages[] = {const_cast<std::byte*>(w.k.data), const_cast<std::byte*>(w.v.data)};
  AttendWork rows;
  rows.k = OnePage(pages, w.k);
  rows.v = OnePage(pages + 1, w.v);
  rows.runs = w.runs;
  rows.run_count = w.run_count;
  rows.position = std::numeric_limits<int32_t>::max() - 1;  // sees every row
  RowCursor cursor(rows);
  const int tile_rows = std::min(TileRowsOf(keys), TileRowsOf(values));
  RowTile tiles[2];
  DenseTile dense;
  cursor.Next(tile_rows, &tiles[0]);
  for (int t = 0; tiles[t].count > 0; t = 1 - t) {
    const RowTile& tile = tiles[t];
    cursor.Next(tile_rows, &tiles[1 - t]);
    PrefetchPacked(tile.v, tile.count, w.v.stride);
    dense.Fill(tile.k, tile.count, keys);
    ScorePackedTile(dense, tile.count, keys.channels(), pass);
    PrefetchPacked(tiles[1 - t].k, tiles[1 - t].count, w.k.stride);
    dense.Fill(tile.v, tile.count, values);
    AddPackedTile(dense, tile.count, values.channels(), w.v.dim, pass);
  }
  ClosePass(w, values.channels(), pass);
}

void AttendPackedItem(const AttendPackedWork& w) {
  PackedPass pass;
  const int queries = w.queries * w.group;
  for (pass.first = 0; pass.first < queries; pass.first += kPackedQueries) {
    pass.count = std::min(kPackedQueries, queries - pass.first);
    AttendPass(w, pass);
  }
}

// Scores of H queries, lane h * kRows + r of st.s, into the item's output.
HWY_INLINE void PutScores(const ScorePackedWork& w, const DecodeState& st, int first_query,
                          int heads, int64_t first_row, int count) {
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < count; ++i) {
      const float score = st.s[i / kRows][h * kRows + i % kRows];
      if (w.out_query != 0) {
        w.out[(first_query + h) * w.out_query + first_row + i] = score;
      } else {
        float& best = w.out[first_row + i];
        // The first query overwrites; std::max keeps the first where the second is a NaN.
        best =
            std::max(first_query + h == 0 ? -std::numeric_limits<float>::infinity() : best, score);
      }
    }
  }
}

HWY_NOINLINE void ScorePackedPass(const ScorePackedWork& w, int first, int count,
                                  PackedDecoder& decoder) {
  const int channels = decoder.channels();
  alignas(64) float q[kPackedQueries * kHeadDimMax];
  for (int i = 0; i < count; ++i) {
    const float* from = w.q + int64_t{first + i} * w.rows.dim;
    for (int c = 0; c < channels; ++c) q[i * channels + c] = from[c] * w.scale;
  }
  DenseTile dense;
  DecodeState st;
  const std::byte* packed[kPackedTileRows];
  for (int32_t u = w.units.begin; u < w.units.end; u += TileRowsOf(decoder)) {
    const int rows = std::min(TileRowsOf(decoder), w.units.end - u);
    for (int i = 0; i < rows; ++i) packed[i] = w.rows.data + (int64_t{u} + i) * w.rows.stride;
    dense.Fill(packed, rows, decoder);
    for (int h = 0; h < count; h += kHeads) {
      const int heads = std::min(kHeads, count - h);
      WithHeads(heads, [&]<int H>() HWY_ATTR {
        ScoreRows<float, H>(dense.rows, rows, q + h * channels, channels, channels, st);
      });
      PutScores(w, st, first + h, heads, u - w.units.begin, rows);
    }
  }
}

void ScorePackedItem(const ScorePackedWork& w) {
  PackedDecoder decoder(w.rows);
  for (int first = 0; first < w.queries; first += kPackedQueries) {
    ScorePackedPass(w, first, std::min(kPackedQueries, w.queries - first), decoder);
  }
}

template <int H>
HWY_INLINE void RotateForward(const RotateWork& w, const float* x, float* out) {
  for (int c = 0; c < w.dim; c += kRows) {
    const std::byte* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      rows[r] = reinterpret_cast<const std::byte*>(w.r + int64_t{c + r} * w.dim);
    }
    alignas(64) float lanes[kN];
    hn::Store(DotRows<float, kRows, H>(rows, x, static_cast<int>(w.x_row), w.dim), DF(), lanes);
    for (int h = 0; h < H; ++h) std::copy_n(lanes + h * kRows, kRows, out + h * w.dim + c);
  }
}

void RotateItem(const RotateWork& w) {
  KVS_CHECK(w.dim % 64 == 0 && w.dim <= kHeadDimMax);
  for (int first = 0; first < w.rows; first += kHeads) {
    const int heads = std::min(kHeads, w.rows - first);
    const float* x = w.x + first * w.x_row;
    float* out = w.out + int64_t{first} * w.dim;
    WithHeads(heads, [&]<int H>() HWY_ATTR {
      if (!w.transposed) return RotateForward<H>(w, x, out);
      std::fill(out, out + H * w.dim, 0.0f);
      AddMatrixRows<float, H>(w.r, w.dim, w.dim, x, w.x_row, w.dim, out);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AttendPackedItem);
KVS_SIMD_TABLE(ScorePackedItem);
KVS_SIMD_TABLE(RotateItem);

void AttendPackedSimd(const AttendPackedWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(AttendPackedItem)(work[i]); });
}

void ScorePackedSimd(const ScorePackedWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(ScorePackedItem)(work[i]); });
}

void RotateSimd(const RotateWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(RotateItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
