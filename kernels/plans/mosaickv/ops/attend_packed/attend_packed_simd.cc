// SPDX-License-Identifier: Apache-2.0
// On a 2.4 GHz AVX-512 core without VBMI2 (Cascade Lake), G = 4, dim 128, keep 32 of 96, per row
// and KV head. Predicted: vector operations on two ports, an expand 2 and a mask move 1 of them on
// the second: 12 chunks * (3 + 4 products), sums over lanes 12, stage 8, softmax 8: 112, or 56
// cycles. Measured: 105 cycles, 44 ns, from the L2 as from memory (rows are prefetched between the
// products); staging takes 8 ns of it, scores 18, weights 3, sums 14. With expanded rows stored and
// loaded again it was 55 ns from the L2 and 65 from memory. A hyperthread of others on the core
// doubles all of these. attend_raw reads 512 bytes, 85 ns of each of two cores on the machine of
// bench/results.
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/plans/mosaickv/ops/attend_packed/attend_packed_simd.cc"
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_coarse/weighted_rows-inl.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "kernels/plans/mosaickv/ops/attend_packed/packed_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kPackedQueries = 16;    // that share one decoding of a row
inline constexpr int kDenseChannels = 4096;  // a tile of fp32 rows is 16 KiB, half of an L1
inline constexpr int kDenseRowsMax = 32;

// Rows of which some will be read next: first and last byte name every cache line of a run.
struct RowsAhead {
  const std::byte* const* rows = nullptr;
  int count = 0;
  int64_t stride = 0;

  HWY_INLINE void Prefetch(int i) const {
    if (i >= count) return;
    __builtin_prefetch(rows[i]);
    __builtin_prefetch(rows[i] + stride - 1);
  }
};

// Fp32 rows of a tile in the L1, decoded once for all states of a pass.
class DenseTile {
 public:
  static HWY_INLINE int RowsMax(int channels) {
    return channels * kDenseRowsMax <= kDenseChannels ? kDenseRowsMax : kDenseRowsMax / 2;
  }

  HWY_INLINE void Fill(const std::byte* const* packed, int count, const RowsAhead& ahead,
                       PackedDecoder& decoder) {
    for (int i = 0; i < ahead.count; ++i) ahead.Prefetch(i);
    count_ = count;
    channels_ = decoder.channels();
    decoder.Decode(packed, count, values_);
    for (int i = 0; i < count; ++i) {
      rows_[i] = reinterpret_cast<const std::byte*>(values_ + i * channels_);
    }
  }

  template <int H>
  HWY_INLINE void Score(const float* q, DecodeState& st) const {
    ScoreRows<float, H>(rows_, count_, q, channels_, channels_, st);
  }
  template <int H>
  HWY_INLINE void Add(int dim, DecodeState& st) const {
    AddRows<float, H>({rows_, count_, st.s[0], st.alpha, dim, st.o}, channels_);
  }

 private:
  alignas(64) float values_[kDenseChannels];
  const std::byte* rows_[kDenseRowsMax];
  int count_ = 0, channels_ = 0;
};

#if HWY_TARGET == HWY_AVX3
// Staged rows of a tile, expanded in registers by the only state that needs them: no dense row is
// stored and loaded again.
class StagedTile {
 public:
  static HWY_INLINE int RowsMax(int channels) {
    return channels * kStageRowsMax <= kStageChannels ? kStageRowsMax : kStageRowsMax / 2;
  }

  HWY_INLINE void Fill(const std::byte* const* packed, int count, const RowsAhead& ahead,
                       PackedDecoder& decoder) {
    count_ = count;
    ahead_ = ahead;
    decoder_ = &decoder;
    decoder.StageRows(packed, count);
  }

  template <int H>
  HWY_NOINLINE void Score(const float* q, DecodeState& st) const {
    const int channels = decoder_->channels();
    for (int i = 0; i < count_; i += kRows) {
      for (int r = 0; r < kRows; ++r) ahead_.Prefetch(i + r);
      hn::Store(Dot<H>(i, channels, q), DF(), st.s[i / kRows]);
      HideRows<H>(count_ - i, st.s[i / kRows]);
    }
  }
  template <int H>
  HWY_INLINE void Add(int dim, DecodeState& st) const {
    AddRowsOf<H>(*this, {nullptr, count_, st.s[0], st.alpha, dim, st.o}, decoder_->channels());
  }

  // For AddRowsOf.
  HWY_INLINE StagedRow At(int i, int c) const {
    if (c == 0) ahead_.Prefetch(i);
    return decoder_->At(i, c);
  }

 private:
  // As DotRows, of rows from i on; the last stands for those beyond it.
  template <int H>
  HWY_INLINE VF Dot(int i, int channels, const float* q) const {
    StagedRow rows[] = {Clamped(i), Clamped(i + 1), Clamped(i + 2), Clamped(i + 3)};
    static_assert(std::size(rows) == kRows);
    VF acc[kN];
#pragma GCC unroll 16
    for (size_t k = 0; k < kN; ++k) acc[k] = hn::Zero(DF());
    for (int c = 0; c < channels; c += 2 * static_cast<int>(kN)) {
      VF a[kRows], b[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) rows[r].NextPair(a[r], b[r]);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF qa = hn::LoadU(DF(), q + h * channels + c);
        const VF qb = hn::LoadU(DF(), q + h * channels + c + kN);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          acc[h * kRows + r] = hn::MulAdd(qb, b[r], hn::MulAdd(qa, a[r], acc[h * kRows + r]));
        }
      }
    }
    return SumEach(acc);
  }
  HWY_INLINE StagedRow Clamped(int i) const { return decoder_->At(std::min(i, count_ - 1), 0); }

  int count_ = 0;
  RowsAhead ahead_;
  PackedDecoder* decoder_ = nullptr;
};
#endif

// Calls fn.template operator()<Tile>() for the tile that suits `queries`.
template <typename F>
HWY_INLINE void WithTile(int queries, const F& fn) {
#if HWY_TARGET == HWY_AVX3
  if (queries <= kHeads) return fn.template operator()<StagedTile>();
#endif
  (void)queries;
  fn.template operator()<DenseTile>();
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

template <typename Tile>
HWY_NOINLINE void ScorePackedTile(const Tile& tile, int count, PackedPass& pass) {
  for (int s = 0; s * kHeads < pass.count; ++s) {
    DecodeState& st = pass.states[s];
    WithHeads(pass.Heads(s), [&]<int H>() HWY_ATTR {
      tile.template Score<H>(st.q, st);
      WeighTile(count, st);
    });
  }
}

template <typename Tile>
HWY_NOINLINE void AddPackedTile(const Tile& tile, int dim, PackedPass& pass) {
  for (int s = 0; s * kHeads < pass.count; ++s) {
    DecodeState& st = pass.states[s];
    WithHeads(pass.Heads(s), [&]<int H>() HWY_ATTR { tile.template Add<H>(dim, st); });
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

template <typename Tile>
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
  const int tile_rows = Tile::RowsMax(std::max(keys.channels(), values.channels()));
  RowTile tiles[2];
  Tile dense;
  cursor.Next(tile_rows, &tiles[0]);
  for (int t = 0; tiles[t].count > 0; t = 1 - t) {
    const RowTile& tile = tiles[t];
    const RowTile& next = tiles[1 - t];
    cursor.Next(tile_rows, &tiles[1 - t]);
    dense.Fill(tile.k, tile.count, {tile.v, tile.count, w.v.stride}, keys);
    ScorePackedTile(dense, tile.count, pass);
    dense.Fill(tile.v, tile.count, {next.k, next.count, w.k.stride}, values);
    AddPackedTile(dense, w.v.dim, pass);
  }
  ClosePass(w, values.channels(), pass);
}

void AttendPackedItem(const AttendPackedWork& w) {
  PackedPass pass;
  const int queries = w.queries * w.group;
  for (pass.first = 0; pass.first < queries; pass.first += kPackedQueries) {
    pass.count = std::min(kPackedQueries, queries - pass.first);
    WithTile(pass.count, [&]<typename Tile>() HWY_ATTR { AttendPass<Tile>(w, pass); });
  }
}

// Scores of `heads` queries, lane h * kRows + r of st.s, into the item's output.
HWY_INLINE void PutScores(const ScorePackedWork& w, const DecodeState& st, int first_query,
                          int heads, int64_t first_row, int count) {
  const hn::CappedTag<float, kRows> d;
  for (int i = 0; i < count; i += kRows) {
    const float* s = st.s[i / kRows];
    const int rows = std::min(kRows, count - i);
    float* out = w.out + first_row + i;
    if (w.out_query != 0) {
      for (int h = 0; h < heads; ++h) {
        std::copy_n(s + h * kRows, rows, out + (first_query + h) * w.out_query);
      }
      continue;
    }
    alignas(64) float largest[kRows];
    std::fill(largest, largest + kRows, -std::numeric_limits<float>::infinity());
    if (first_query > 0) std::copy_n(out, rows, largest);
    auto best = hn::Load(d, largest);
    // The second operand is what x86 returns for a NaN.
    for (int h = 0; h < heads; ++h) best = hn::Max(hn::LoadU(d, s + h * kRows), best);
    hn::Store(best, d, largest);
    std::copy_n(largest, rows, out);
  }
}

template <typename Tile>
HWY_NOINLINE void ScorePackedPass(const ScorePackedWork& w, int first, int count,
                                  PackedDecoder& decoder) {
  const int channels = decoder.channels();
  alignas(64) float q[kPackedQueries * kHeadDimMax];
  for (int i = 0; i < count; ++i) {
    const float* from = w.q + int64_t{first + i} * w.rows.dim;
    for (int c = 0; c < channels; ++c) q[i * channels + c] = from[c] * w.scale;
  }
  Tile dense;
  DecodeState st;
  const std::byte* packed[2][kStageRowsMax];
  const auto list = [&](int32_t u, const std::byte** rows) HWY_ATTR {
    const int n = std::clamp(w.units.end - u, 0, Tile::RowsMax(channels));
    for (int i = 0; i < n; ++i) rows[i] = w.rows.data + (int64_t{u} + i) * w.rows.stride;
    return n;
  };
  int rows = list(w.units.begin, packed[0]);
  for (int32_t u = w.units.begin, t = 0; rows > 0; t = 1 - t) {
    const int next = list(u + rows, packed[1 - t]);
    dense.Fill(packed[t], rows, {packed[1 - t], next, w.rows.stride}, decoder);
    for (int h = 0; h < count; h += kHeads) {
      const int heads = std::min(kHeads, count - h);
      WithHeads(heads, [&]<int H>() HWY_ATTR { dense.template Score<H>(q + h * channels, st); });
      PutScores(w, st, first + h, heads, u - w.units.begin, rows);
    }
    u += rows;
    rows = next;
  }
}

void ScorePackedItem(const ScorePackedWork& w) {
  PackedDecoder decoder(w.rows);
  for (int first = 0; first < w.queries; first += kPackedQueries) {
    const int count = std::min(kPackedQueries, w.queries - first);
    WithTile(count,
             [&]<typename Tile>() HWY_ATTR { ScorePackedPass<Tile>(w, first, count, decoder); });
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

}  // namespace kvstrata::HWY_NAMESPACE
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
