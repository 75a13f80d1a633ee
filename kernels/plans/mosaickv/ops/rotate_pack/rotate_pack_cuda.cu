// SPDX-License-Identifier: Apache-2.0
// A CTA packs a chunk of an item's rows; a warp takes strips of them, 16 rows at a time, from
// memory to registers and from there into tensor cores, as attend_raw does. The rotation lies in
// shared memory in the order of its fragments, each element as a high and a low part of the rows'
// type. Sums of blocks go through the warp's shared memory; eight blocks are packed together.
//
// Floor and prediction on an H100, 64K rows of 512 heads x 128, keep 32 of 96, blocks of 8: 8.6 GB
// read and 2.9 written are 3.8 ms at 3.0 TB/s; tensor cores 2.9 ms, the rotation's fragments from
// shared memory 3.6, instructions (some ten rounds of counting 24 norms a lane) 6.5. Predicted 7.5
// ms. A flush of 32 rows, 16 items: a launch 2 us, R from memory 2, one tile 3: 7 us.
// Measured: 15.9 ms and 12.1 us (docs/results.md).
#include <algorithm>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"
#include "kernels/plans/mosaickv/ops/rotate_pack/channel_choice.cuh"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kTileRows = 16;
constexpr int kPackedAtOnce = 8;             // rows
constexpr int32_t kFirstGuess = 0x3F800000;  // as choose-inl.h

template <int kDim, int kChannels>
struct Shape {
  static constexpr bool kResident = kDim <= 128;               // R fits shared memory
  static constexpr int kThreadsMax = kDim == 256 ? 256 : 384;  // 512 spill
  static constexpr int kRotation = kResident ? 2 * kChannels * kDim * 2 : 0;  // bytes
  // Floats of a row of a tile: the rows that a warp writes together begin in different banks.
  static constexpr int kStride = kChannels + 8;
  static constexpr int kWarpBytes = (kTileRows + kPackedAtOnce) * kStride * 4;

  static int Warps(int shared_bytes) {
    return std::min((shared_bytes - kRotation) / kWarpBytes, kThreadsMax / 32);
  }
};

// Elements of the rotation as right-hand fragments: of columns [8 n, 8 n + 8) of x', channels
// [32 c, 32 c + 32); lane (g, t) has column g, channels 8t .. 8t + 7, as rows' lanes do.
struct RotationPiece {
  uint4 high, low;
};

template <typename T>
__device__ __forceinline__ RotationPiece SplitPiece(const float* r) {
  const auto* from = reinterpret_cast<const float4*>(r);
  const float4 a = from[0], b = from[1];
  const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float p = x[2 * i], q = x[2 * i + 1];
    high[i] = Element<T>::Pack(p, q);
    low[i] = Element<T>::Pack(p - FloatOf(Rounded<T>(p)), q - FloatOf(Rounded<T>(q)));
  }
  return {{high[0], high[1], high[2], high[3]}, {low[0], low[1], low[2], low[3]}};
}

template <typename T, int kDim, int kChannels>
class Rotation {
 public:
  // Barrier afterwards.
  __device__ __forceinline__ Rotation(const float* r, uint4* shared) : r_(r), shared_(shared) {
    if constexpr (Shape<kDim, kChannels>::kResident) {
#pragma unroll 4
      for (int i = threadIdx.x; i < kPieces * 32; i += blockDim.x) {
        const RotationPiece piece = SplitPiece<T>(r + Offset(i / 32, i % 32));
        shared[i] = piece.high;
        shared[kPieces * 32 + i] = piece.low;
      }
    }
  }
  __device__ __forceinline__ RotationPiece Piece(int n, int c) const {
    const int piece = n * kChunks + c, lane = threadIdx.x % 32;
    if constexpr (!Shape<kDim, kChannels>::kResident) {
      return SplitPiece<T>(r_ + Offset(piece, lane));
    }
    return {shared_[piece * 32 + lane], shared_[(kPieces + piece) * 32 + lane]};
  }

 private:
  static constexpr int kChunks = kDim / 32, kPieces = kChannels / 8 * kChunks;

  static __device__ __forceinline__ int Offset(int piece, int lane) {
    return (piece / kChunks * 8 + lane / 4) * kDim + piece % kChunks * 32 + lane % 4 * 8;
  }

  const float* r_;
  const uint4* shared_;
};

// Volatile, or the compiler would load the next tile before it has room for it.
__device__ __forceinline__ uint4 LoadRow(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

// Rows g and g + 8 of a tile as left-hand fragments.
template <int kDim>
struct RawTile {
  uint4 x[2][kDim / 32];

  // Rows [t, t + 16); those outside [t, end) are the last one again.
  __device__ __forceinline__ void Load(const HeadRowShape& shape, const HeadRows& rows, int32_t t,
                                       int32_t end) {
    const auto* pages = reinterpret_cast<const uint64_t*>(rows.pages);
    const int shift = 31 - __clz(shape.page_tokens);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t at = min(t + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4), end - 1);
      const uint64_t row = pages[at >> shift] + rows.offset +
                           (at & (shape.page_tokens - 1)) * shape.slot_stride +
                           threadIdx.x % 4 * 16;
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) x[half][c] = LoadRow(row + 64 * c);
    }
  }
  // x[half][c]: registers have no index that is known only in a loop.
  __device__ __forceinline__ uint4 Chunk(int half, int c) const {
    uint4 chunk = x[half][0];
#pragma unroll
    for (int i = 1; i < kDim / 32; ++i) {
      if (i == c) chunk = x[half][i];
    }
    return chunk;
  }
  // The sum of the squares of this lane's elements of a row.
  template <typename T>
  __device__ __forceinline__ float Energy(int half) const {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      const uint4 v = x[half][c];
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t pair : pairs) {
        const float a = FloatOf(BitsAs<T>(static_cast<uint16_t>(pair)));
        const float b = FloatOf(BitsAs<T>(static_cast<uint16_t>(pair >> 16)));
        sum += a * a + b * b;
      }
    }
    return sum;
  }

 private:
  template <typename T>
  static __device__ __forceinline__ T BitsAs(uint16_t bits) {
    if constexpr (sizeof(T) == sizeof(bits)) return *reinterpret_cast<const T*>(&bits);
  }
};

// x' of a tile, as products are left: [columns 8 n ..][row g, columns 2t, 2t + 1; row g + 8]. Where
// R comes from memory, a loop: its code is long.
template <typename T, int kDim, int kChannels>
__device__ __forceinline__ void Rotate(const RawTile<kDim>& tile,
                                       const Rotation<T, kDim, kChannels>& rotation,
                                       float (&out)[kChannels / 8][4]) {
  constexpr int kUnrolled = Shape<kDim, kChannels>::kResident ? kDim / 32 : 1;
#pragma unroll
  for (auto& sums : out) sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll kUnrolled
  for (int c = 0; c < kDim / 32; ++c) {
    const uint4 a = tile.Chunk(0, c), b = tile.Chunk(1, c);
#pragma unroll
    for (int n = 0; n < kChannels / 8; ++n) {
      const RotationPiece r = rotation.Piece(n, c);
      MmaM16N8K16<T>(out[n], a.x, b.x, a.y, b.y, r.high.x, r.high.y);
      MmaM16N8K16<T>(out[n], a.z, b.z, a.w, b.w, r.high.z, r.high.w);
      MmaM16N8K16<T>(out[n], a.x, b.x, a.y, b.y, r.low.x, r.low.y);
      MmaM16N8K16<T>(out[n], a.z, b.z, a.w, b.w, r.low.z, r.low.w);
    }
  }
}

// Sums of a lane over its rows.
struct LossSums {
  float energy = 0, kept = 0, relative_error = 0;

  // A row's, in its first lane.
  __device__ __forceinline__ void Add(float all, float part) {
    energy += all;
    kept += part;
    if (all != 0) relative_error += sqrtf(fmaxf(0.0f, 1 - part / all));
  }
};

// What a warp does with its strips.
template <typename T, int kDim, int kChannels>
class StripPacker {
  using S = Shape<kDim, kChannels>;

 public:
  __device__ __forceinline__ StripPacker(const RotatePackBatch& w, const RotatePackItem& item,
                                         float* shared)
      : shape_(w.shape),
        item_(item),
        format_(PackFormat::Of(kChannels, item.keep, item.neighbours)),
        tile_(shared),
        means_(shared + kTileRows * S::kStride) {}

  // Rows [begin, end): at most eight blocks.
  __device__ __forceinline__ void Pack(const Rotation<T, kDim, kChannels>& rotation, int32_t begin,
                                       int32_t end, RawTile<kDim>& raw, int32_t next) {
#pragma unroll 1
    for (int32_t t = begin; t < end; t += kTileRows) {
      const int rows = min(kTileRows, end - t);
      float energies[2];
      if (item_.losses != 0) {
        energies[0] = raw.template Energy<T>(0);
        energies[1] = raw.template Energy<T>(1);
      }
      float x[kChannels / 8][4];
      Rotate(raw, rotation, x);
      if (item_.blocks != 0) SumBlocks(x, rows, (t - begin) / item_.block);
      PackTile(x, energies, rows, t - item_.source.begin);
      const int32_t following = t + kTileRows < end ? t + kTileRows : next;
      if (following >= 0) raw.Load(shape_, item_.source, following, item_.source.end);
    }
    if (item_.blocks != 0) PackBlocks(begin, end);
  }
  __device__ __forceinline__ const LossSums& losses() const { return losses_; }

 private:
  // Means of the blocks of a tile, from block `first` of the strip on.
  __device__ __forceinline__ void SumBlocks(const float (&x)[kChannels / 8][4], int rows,
                                            int first) {
    const int lane = threadIdx.x % 32;
    float* to = tile_ + lane / 4 * S::kStride + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kChannels / 8; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) = {x[n][0], x[n][1]};
      *reinterpret_cast<float2*>(to + 8 * S::kStride + 8 * n) = {x[n][2], x[n][3]};
    }
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < rows; row += item_.block, ++first) {
      const int count = min(item_.block, rows - row);
      const float* from = tile_ + row * S::kStride;
#pragma unroll
      for (int c = lane; c < kChannels; c += 32) {
        float sum = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) sum += from[i * S::kStride + c];
        means_[first * S::kStride + c] = sum / static_cast<float>(count);
      }
    }
    __syncwarp();
  }

  // first: row of the item. Packed rows lie where the tile was.
  __device__ __forceinline__ void PackTile(const float (&x)[kChannels / 8][4],
                                           const float (&energies)[2], int rows, int64_t first) {
    const int lane = threadIdx.x % 32;
    auto* packed = reinterpret_cast<char*>(tile_);
#pragma unroll 1
    for (int half = 0; half < 2 && half * kPackedAtOnce < rows; ++half) {
      const int row = half * kPackedAtOnce + lane / 4;
      float own[kChannels / 4];
#pragma unroll
      for (int i = 0; i < kChannels / 4; ++i) {
        own[i] = half == 0 ? x[i / 2][i % 2] : x[i / 2][2 + i % 2];
      }
      const float kept =
          PackRow<kChannels>(own, format_, row_guess_, packed + row * format_.stride);
      if (item_.losses == 0) continue;
      const float all = SumOfFour(half == 0 ? energies[0] : energies[1]);
      const float part = SumOfFour(kept);
      if (lane % 4 == 0 && row < rows) losses_.Add(all, part);
    }
    CopyOut(rows, item_.rows + first * format_.stride);
  }

  __device__ __forceinline__ void PackBlocks(int32_t begin, int32_t end) {
    const int lane = threadIdx.x % 32;
    const int count = (end - begin + item_.block - 1) / item_.block;
    const float* from = means_ + min(lane / 4, count - 1) * S::kStride + 2 * (lane % 4);
    float own[kChannels / 4];
#pragma unroll
    for (int n = 0; n < kChannels / 8; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
      own[2 * n] = pair.x;
      own[2 * n + 1] = pair.y;
    }
    PackRow<kChannels>(own, format_, block_guess_,
                       reinterpret_cast<char*>(tile_) + lane / 4 * format_.stride);
    const int64_t first = (begin - item_.source.begin) / item_.block;
    CopyOut(count, item_.blocks + first * format_.stride);
  }

  // Packed rows from where the tile was.
  __device__ __forceinline__ void CopyOut(int rows, uint64_t to) {
    __syncwarp();
    for (int i = threadIdx.x % 32; i < rows * format_.stride / 16; i += 32) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(tile_)[i];
    }
    __syncwarp();
  }

  const HeadRowShape& shape_;
  const RotatePackItem& item_;
  const PackFormat format_;
  float* tile_;   // [16][kStride]
  float* means_;  // [8][kStride], of the strip's blocks
  int32_t row_guess_ = kFirstGuess, block_guess_ = kFirstGuess;
  LossSums losses_;
};

// Rows of a strip: eight blocks, or fewer where there are more warps than such strips; whole
// blocks.
__device__ __forceinline__ int32_t StripRows(const RotatePackItem& item, int32_t rows, int warps) {
  const int32_t most = item.blocks != 0 ? kPackedAtOnce * item.block : 64;
  const int32_t unit = item.blocks != 0 ? max(item.block, kPackedAtOnce) : kPackedAtOnce;
  const int32_t even = (rows + warps - 1) / warps;
  return min(most, (even + unit - 1) / unit * unit);
}

// The CTA's sums, in order. In shared memory that warps used.
__device__ __forceinline__ void WriteLoss(const LossSums& own, double* scratch, PackLoss* out) {
  double sums[3] = {own.energy, own.kept, own.relative_error};
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    for (int step = 16; step > 0; step /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step);
    if (threadIdx.x % 32 == 0) scratch[i * warps + threadIdx.x / 32] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x >= 3) return;
  double sum = 0;
  for (int w = 0; w < warps; ++w) sum += scratch[threadIdx.x * warps + w];
  (&out->energy)[threadIdx.x] = sum;
}

// Grid (chunks, items).
template <typename T, int kDim, int kChannels>
__global__ void __launch_bounds__(Shape<kDim, kChannels>::kThreadsMax, 1)
    RotatePackKernel(const __grid_constant__ RotatePackBatch w) {
  extern __shared__ uint4 dynamic[];
  __shared__ RotatePackItem item;
  using S = Shape<kDim, kChannels>;
  WaitForPrevious();
  LetNextStart();
  if (threadIdx.x < sizeof(item) / 8) {
    reinterpret_cast<uint64_t*>(&item)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(w.items + blockIdx.y)[threadIdx.x];
  }
  __syncthreads();
  const int32_t begin = item.source.begin + static_cast<int32_t>(blockIdx.x) * kPackChunkRows;
  const int32_t end = min(begin + kPackChunkRows, item.source.end);
  if (begin >= end) return;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t strip = StripRows(item, end - begin, warps);
  int32_t t = begin + warp * strip;
  RawTile<kDim> raw;
  if (t < end) raw.Load(w.shape, item.source, t, item.source.end);
  const Rotation<T, kDim, kChannels> rotation(reinterpret_cast<const float*>(item.r), dynamic);
  __syncthreads();
  auto* own = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + S::kRotation +
                                       warp * S::kWarpBytes);
  StripPacker<T, kDim, kChannels> packer(w, item, own);
#pragma unroll 1
  for (; t < end; t += warps * strip) {
    const int32_t next = t + warps * strip;
    packer.Pack(rotation, t, min(t + strip, end), raw, next < end ? next : -1);
  }
  if (item.losses == 0) return;
  WriteLoss(packer.losses(), reinterpret_cast<double*>(dynamic),
            reinterpret_cast<PackLoss*>(item.losses) + blockIdx.x);
}

template <typename T, int kDim, int kChannels>
int Launch(const RotatePackBatch& w, Stream stream) {
  using S = Shape<kDim, kChannels>;
  const auto kernel = RotatePackKernel<T, kDim, kChannels>;
  // What the driver keeps of it, and the item.
  const int most = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024;
  const int warps = S::Warps(most);
  if (warps < 1) return cudaErrorInvalidValue;
  const int bytes = S::kRotation + warps * S::kWarpBytes;
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  const int32_t chunks = (w.rows_max + kPackChunkRows - 1) / kPackChunkRows;
  return LaunchDependent(kernel, dim3(chunks, w.count), warps * 32, bytes, stream, w);
}

}  // namespace

int RotatePackCuda(const RotatePackBatch& w, Stream stream) {
  if (!w.shape.IsValid() || w.count < 0 || w.rows_max < 0) return cudaErrorInvalidValue;
  return ForRows(w.shape.dtype, w.shape.head_dim, [&]<typename T, int kDim>() -> int {
    if (w.count == 0 || w.rows_max == 0) return cudaSuccess;
    return w.truncated ? Launch<T, kDim, kDim - kDim / 4>(w, stream)
                       : Launch<T, kDim, kDim>(w, stream);
  });
}

}  // namespace kvstrata::cuda
