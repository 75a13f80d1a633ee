// SPDX-License-Identifier: Apache-2.0
// Attention of a CTA over some of a tile's rows. They are gathered into shared memory by cp.async,
// a block of 64 (32 with head_dim 256) ahead; a warp has 32 (16) query rows against a whole block:
//
//   scores   S[queries][rows] = Q K^T. A is Q, B is K, both by ldmatrix.
//   weights  P = 2^(S - m), in the registers where S was: they are the A of the next product.
//   output   O[queries][channels] += P V. B is V, transposed by ldmatrix.
//
// 32 query rows a warp, because what ldmatrix reads of a block then serves two products: with one,
// shared memory would be the limit. A lane holds columns {2t, 2t + 1} of rows g and g + 8.
#pragma once

#include <climits>

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/cuda/warps/shared_matrix.cuh"
#include "kernels/ops/attend_chunk/attend_chunk_cuda.h"
#include "kernels/ops/attend_raw/attended_rows.cuh"
#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {

inline constexpr int kTileWarps = 4;
inline constexpr int kTileThreads = 32 * kTileWarps;

template <int kDim>
struct TileShape {
  static constexpr int kWarpProducts = kDim == 256 ? 1 : 2;  // 16 query rows each
  static constexpr int kWarpRows = 16 * kWarpProducts;
  static constexpr int kRows = kWarpRows * kTileWarps;  // query rows of a tile
  static constexpr int kKeys = kDim == 256 ? 32 : 64;   // rows of a block
  static constexpr int kBlockStrips = kKeys / kStripRows;
  static constexpr int kCopied = kKeys / kTileWarps;  // rows of a block that a warp copies
  static constexpr int kCtasPerSm = kDim == 64 ? 3 : 2;
};

// A chunk, cut into tiles.
struct QueryTiles : RowSource {
  int32_t rows, group;       // new tokens; query heads of each
  int32_t tile_rows, tiles;  // query rows of a tile; of each KV head

  __device__ __forceinline__ int32_t FirstToken(int tile) const {
    return static_cast<int32_t>(static_cast<uint32_t>(tile * tile_rows) / group);
  }
  __device__ __forceinline__ int32_t LastToken(int tile) const {
    return min(static_cast<int32_t>(static_cast<uint32_t>((tile + 1) * tile_rows - 1) / group),
               rows - 1);
  }
};

// Some strips of what the last token of a tile attends; its other tokens see fewer of them.
struct TilePart {
  AttendedRows rows;
  int32_t tile, head;
  int32_t begin, end;  // strips
  // Partials of the tile: slots first_slot, first_slot + slot_step, ...
  int32_t first_slot, slot_step, parts;
};

struct TileArguments {
  QueryTiles tiles;
  const std::byte* q;
  int64_t q_stride;
  float scale;  // with log2(e)
  AttentionOutput to;
  uint32_t* counters;
  float2* partial_ml;  // [slots][query rows of a tile], m in powers of two
  float4* partial_o;   // [slots][float4s of a thread][threads]
};

template <int kDim>
struct TileShared {
  using S = TileShape<kDim>;
  static constexpr int kPieces = kDim / 8;
  uint4 q[S::kRows][kPieces];
  uint4 k[2][S::kKeys][kPieces], v[2][S::kKeys][kPieces];
  int32_t position[2][S::kKeys];  // where a block's rows stand; kNone: no row
  uint32_t masked[2];             // by warp, a byte each: some query of the tile does not see all
  TilePart part;
  bool is_last;
};

template <typename T, int kDim>
class TileAttention {
  using S = TileShape<kDim>;
  using Matrix = SharedMatrix<kDim>;
  static constexpr int32_t kNone = INT_MAX;
  static constexpr float kSlack = 8;
  static constexpr int kProducts = S::kWarpProducts;
  static constexpr int kPieces = Matrix::kPieces;
  static constexpr uint32_t kBlockBytes = S::kKeys * Matrix::kRowBytes;

 public:
  static constexpr int kFloat4s = kProducts * kDim / 8;  // float4s of a thread's output

  __device__ __forceinline__ TileAttention(const TileArguments& a, TileShared<kDim>& shared)
      : a_(a),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        tile_(shared.part.tile),
        head_(shared.part.head) {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m_[p][h] = -INFINITY;
        l_[p][h] = 0;
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[p][j][i] = 0;
      }
    }
  }

  // Afterwards l is summed over lanes. A barrier must come before the next part.
  __device__ __forceinline__ void Run() {
    const TilePart& part = shared_.part;
    if (part.rows.tokens == 0) return;
    const int32_t blocks = CeilDivide(part.end - part.begin, S::kBlockStrips);
    const int first_strip = warp_ * S::kCopied / kStripRows;  // the warp's first strip in a block
    RowStream stream(a_.tiles, part.rows, 0, head_, part.begin + first_strip, S::kBlockStrips,
                     part.end);
    const int32_t all_see = a_.tiles.tokens[a_.tiles.FirstToken(tile_)];
    CopyQueries();
    CopyBlock(stream, all_see, 0);
#pragma unroll 1
    for (int32_t i = 0; i < blocks; ++i) {
      const int stage = i & 1;
      AwaitCopies();
      __syncthreads();  // every warp's copies are there; block i - 1 is done with
      stream.Advance();
      if (i + 1 < blocks) CopyBlock(stream, all_see, stage ^ 1);
      float s[kProducts][S::kKeys / 8][4];
      Score(stage, s);
      if (shared_.masked[stage] != 0) Mask(stage, s);
      RaiseMaxima(s);
      AddValues(stage, s);
    }
    SumWeights();
  }

  __device__ __forceinline__ void StorePartial(int64_t slot) const {
    float4* o = a_.partial_o + slot * kFloat4s * kTileThreads + threadIdx.x;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const auto& x = o_[p][j];
        o[(p * (kDim / 8) + j) * kTileThreads] = {x[0], x[1], x[2], x[3]};
      }
      if (lane_ % 4 != 0) continue;
      for (int h = 0; h < 2; ++h) {
        a_.partial_ml[slot * S::kRows + RowOf(p, h)] = {m_[p][h] * a_.scale, l_[p][h]};
      }
    }
  }

  // Takes the sums of all parts of the tile, in their order, for its own.
  __device__ __forceinline__ void Merge() {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) MergeProduct(p);
  }

  // m is now in powers of two.
  __device__ __forceinline__ void ScaleMaxima() {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      for (int h = 0; h < 2; ++h) m_[p][h] *= a_.scale;
    }
  }

  // REQUIRES: ScaleMaxima or Merge was called.
  __device__ __forceinline__ void StoreOutput() const {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) StoreRow(p, h);
    }
  }

 private:
  // Query row of the tile in which this lane holds two columns.
  __device__ __forceinline__ int RowOf(int product, int half) const {
    return warp_ * S::kWarpRows + product * 16 + half * 8 + lane_ / 4;
  }
  // The new token of a query row of the tile, and the query's head of its group; rows beyond the
  // chunk have tokens beyond it.
  __device__ __forceinline__ int TokenOf(int row, int& query) const {
    const int at = tile_ * S::kRows + row;
    const auto token = static_cast<int>(static_cast<uint32_t>(at) / a_.tiles.group);
    query = at - token * a_.tiles.group;
    return token;
  }

  // A warp's share; zeros for rows beyond the chunk.
  __device__ __forceinline__ void CopyQueries() const {
    constexpr int kRowsAtOnce = 32 / kPieces;
    const uint32_t to = SharedAddress(shared_.q);
#pragma unroll 1
    for (int i = 0; i < S::kWarpRows; i += kRowsAtOnce) {
      const int row = warp_ * S::kWarpRows + i + lane_ / kPieces, piece = lane_ % kPieces;
      int query;
      const int token = TokenOf(row, query);
      const bool present = token < a_.tiles.rows;
      const std::byte* from = a_.q + (present ? token : 0) * a_.q_stride +
                              int64_t{head_ * a_.tiles.group + query} * Matrix::kRowBytes +
                              piece * 16;
      CopyPiece(to + Matrix::Piece(row, piece), reinterpret_cast<uint64_t>(from), present);
    }
  }
  // Starts the copy of the warp's rows of a block; of zeros for a strip without rows.
  __device__ __forceinline__ void CopyBlock(const RowStream& stream, int32_t all_see,
                                            int stage) const {
    constexpr int kRowsAtOnce = 32 / kPieces;
    const int row = warp_ * S::kCopied + lane_ / kPieces, piece = lane_ % kPieces;
    const uint32_t k = SharedAddress(shared_.k) + stage * kBlockBytes;
    const uint32_t v = SharedAddress(shared_.v) + stage * kBlockBytes;
    const int64_t values = a_.tiles.layer.value_offset - a_.tiles.layer.key_offset;
    const bool present = stream.present != 0;
#pragma unroll
    for (int i = 0; i < S::kCopied; i += kRowsAtOnce) {
      const uint64_t from = __shfl_sync(kAllLanes, stream.key, (row + i) % kStripRows) + piece * 16;
      const uint32_t to = Matrix::Piece(row + i, piece);
      CopyPiece(k + to, from, present);
      CopyPiece(v + to, from + values, present);
    }
    KeepPositions(stream.position, all_see, stage);
  }
  __device__ __forceinline__ void KeepPositions(int32_t position, int32_t all_see,
                                                int stage) const {
    const int i = lane_ - warp_ * S::kCopied % kStripRows;  // index among the warp's rows
    const bool own = i >= 0 && i < S::kCopied;
    if (own) shared_.position[stage][warp_ * S::kCopied + i] = position < 0 ? kNone : position;
    const bool masked = own && (position < 0 || position >= all_see);
    const bool any = __any_sync(kAllLanes, masked);
    if (lane_ == 0) reinterpret_cast<uint8_t*>(&shared_.masked[stage])[warp_] = any ? 1 : 0;
  }

  __device__ __forceinline__ void Score(int stage, float (&s)[kProducts][S::kKeys / 8][4]) const {
    const uint32_t q =
        SharedAddress(shared_.q) + Matrix::Piece(warp_ * S::kWarpRows + lane_ % 16, lane_ / 16);
    const uint32_t k = SharedAddress(shared_.k) + stage * kBlockBytes +
                       Matrix::Piece(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[p][j][i] = 0;
      }
    }
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
      uint4 a[kProducts];
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        a[p] = LoadMatrices(Matrix::Pair(q, c) + p * 16 * Matrix::kRowBytes);
      }
#pragma unroll
      for (int j = 0; j < S::kKeys / 16; ++j) {
        const uint4 b = LoadMatrices(Matrix::Pair(k, c) + j * 16 * Matrix::kRowBytes);
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          MmaM16N8K16<T>(s[p][2 * j], a[p].x, a[p].y, a[p].z, a[p].w, b.x, b.y);
          MmaM16N8K16<T>(s[p][2 * j + 1], a[p].x, a[p].y, a[p].z, a[p].w, b.z, b.w);
        }
      }
    }
  }

  __device__ __forceinline__ void Mask(int stage, float (&s)[kProducts][S::kKeys / 8][4]) const {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int query;
        const int token = TokenOf(RowOf(p, h), query);
        const int32_t sees = a_.tiles.tokens[min(token, a_.tiles.rows - 1)];
#pragma unroll
        for (int j = 0; j < S::kKeys / 8; ++j) {
          const int2 at =
              *reinterpret_cast<const int2*>(&shared_.position[stage][8 * j + lane_ % 4 * 2]);
          if (at.x >= sees) s[p][j][2 * h] = -INFINITY;
          if (at.y >= sees) s[p][j][2 * h + 1] = -INFINITY;
        }
      }
    }
  }

  // Maxima rise only where a weight would be above 2^kSlack: sums are relative to them in any case.
  __device__ __forceinline__ void RaiseMaxima(const float (&s)[kProducts][S::kKeys / 8][4]) {
    float top[kProducts][2];
    bool rises = false;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[p][h] = m_[p][h];
#pragma unroll
        for (int j = 0; j < S::kKeys / 8; ++j) {
          top[p][h] = fmaxf(top[p][h], fmaxf(s[p][j][2 * h], s[p][j][2 * h + 1]));
        }
        rises |= (top[p][h] - m_[p][h]) * a_.scale > kSlack;
      }
    }
    if (!__any_sync(kAllLanes, rises)) return;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) Raise(p, h, top[p][h]);
    }
  }
  __device__ __forceinline__ void Raise(int p, int h, float top) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float weight = m_[p][h] == -INFINITY ? 0.0f : Exp2((m_[p][h] - top) * a_.scale);
    m_[p][h] = top;
    l_[p][h] *= weight;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      o_[p][j][2 * h] *= weight;
      o_[p][j][2 * h + 1] *= weight;
    }
  }

  // Weights of 16 rows of the block from r on at a time, while tensor cores have those before.
  __device__ __forceinline__ void AddValues(int stage, float (&s)[kProducts][S::kKeys / 8][4]) {
    const uint32_t v =
        SharedAddress(shared_.v) + stage * kBlockBytes + Matrix::Piece(lane_ % 16, lane_ / 16);
    float shift[kProducts][2];
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shift[p][h] = m_[p][h] == -INFINITY ? 0.0f : m_[p][h] * a_.scale;
      }
    }
#pragma unroll
    for (int r = 0; r < S::kKeys / 16; ++r) {
      uint4 a[kProducts];
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        auto &x = s[p][2 * r], &y = s[p][2 * r + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = Exp2(x[i] * a_.scale - shift[p][i / 2]);
          y[i] = Exp2(y[i] * a_.scale - shift[p][i / 2]);
          l_[p][i / 2] += x[i] + y[i];
        }
        a[p] = {Element<T>::Pack(x[0], x[1]), Element<T>::Pack(x[2], x[3]),
                Element<T>::Pack(y[0], y[1]), Element<T>::Pack(y[2], y[3])};
      }
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        const uint4 b = LoadTransposed(Matrix::Pair(v, c) + r * 16 * Matrix::kRowBytes);
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          MmaM16N8K16<T>(o_[p][2 * c], a[p].x, a[p].y, a[p].z, a[p].w, b.x, b.y);
          MmaM16N8K16<T>(o_[p][2 * c + 1], a[p].x, a[p].y, a[p].z, a[p].w, b.z, b.w);
        }
      }
    }
  }

  __device__ __forceinline__ void SumWeights() {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        l_[p][h] += __shfl_xor_sync(kAllLanes, l_[p][h], 1);
        l_[p][h] += __shfl_xor_sync(kAllLanes, l_[p][h], 2);
      }
    }
  }

  __device__ __forceinline__ void MergeProduct(int p) {
    const TilePart& part = shared_.part;
#pragma unroll
    for (int h = 0; h < 2; ++h) m_[p][h] = -INFINITY, l_[p][h] = 0;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[p][j][i] = 0;
    }
#pragma unroll 1
    for (int32_t i = 0; i < part.parts; ++i) {
      const int64_t slot = part.first_slot + i * part.slot_step;
      float old[2], added[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 ml = __ldcg(&a_.partial_ml[slot * S::kRows + RowOf(p, h)]);
        const float top = fmaxf(m_[p][h], ml.x);
        old[h] = WeightOf(m_[p][h], top);
        added[h] = WeightOf(ml.x, top);
        m_[p][h] = top;
        l_[p][h] = old[h] * l_[p][h] + added[h] * ml.y;
      }
      const float4* o =
          a_.partial_o + (slot * kFloat4s + p * (kDim / 8)) * kTileThreads + threadIdx.x;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float4 x = __ldcg(o + j * kTileThreads);
        auto& sum = o_[p][j];
        sum[0] = old[0] * sum[0] + added[0] * x.x;
        sum[1] = old[0] * sum[1] + added[0] * x.y;
        sum[2] = old[1] * sum[2] + added[1] * x.z;
        sum[3] = old[1] * sum[3] + added[1] * x.w;
      }
    }
  }

  __device__ __forceinline__ void StoreRow(int p, int h) const {
    int query;
    const int token = TokenOf(RowOf(p, h), query);
    if (token >= a_.tiles.rows) return;
    const int heads = a_.tiles.layer.kv_heads * a_.tiles.group;
    const int64_t row = int64_t{token} * heads + head_ * a_.tiles.group + query;
    const float l = l_[p][h], scale = l == 0 ? 0.0f : 1.0f / l;
    if (a_.to.lse != nullptr && lane_ % 4 == 0) {
      a_.to.lse[row] = l == 0 ? -INFINITY : (m_[p][h] + log2f(l)) * kLn2;
    }
    const int64_t pair = row * (kDim / 2) + lane_ % 4;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float x = o_[p][j][2 * h] * scale, y = o_[p][j][2 * h + 1] * scale;
      if (a_.to.dtype == DType::kF32) {
        static_cast<float2*>(a_.to.rows)[pair + 4 * j] = {x, y};
      } else {
        static_cast<uint32_t*>(a_.to.rows)[pair + 4 * j] = a_.to.dtype == DType::kBF16
                                                               ? Element<__nv_bfloat16>::Pack(x, y)
                                                               : Element<__half>::Pack(x, y);
      }
    }
  }

  const TileArguments& a_;
  TileShared<kDim>& shared_;
  const int lane_, warp_, tile_, head_;
  float m_[kProducts][2], l_[kProducts][2];  // m: of products q . k, until ScaleMaxima
  float o_[kProducts][kDim / 8][4];
};

}  // namespace kvstrata::cuda
