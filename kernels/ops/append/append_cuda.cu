// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/append/append_cuda.h"
#include "kernels/ops/append/not_finite.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPiece = 8;        // elements that a thread copies at a time: 16 bytes of a page
constexpr int kRowsPerCta = 64;  // in a long append without an index

// NaN becomes 0x7FC0, as in dtype.h.
__device__ __forceinline__ void Round(float x, __nv_bfloat16& to) {
  to = isnan(x) ? __ushort_as_bfloat16(0x7FC0) : __float2bfloat16_rn(x);
}
__device__ __forceinline__ void Round(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void Round(float x, float& to) { to = x; }
__device__ __forceinline__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float Widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float Widen(float x) { return x; }

template <typename From, typename T>
__device__ __forceinline__ uint4 ConvertedPiece(const std::byte* from) {
  union {
    uint4 words[kPiece * sizeof(From) / 16];
    From x[kPiece];
  } in;
  union {
    uint4 words;
    T x[kPiece];
  } out;
  for (size_t i = 0; i < sizeof(in) / 16; ++i)
    in.words[i] = reinterpret_cast<const uint4*>(from)[i];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) Round(Widen(in.x[i]), out.x[i]);
  return out.words;
}

template <typename T>
__device__ __forceinline__ uint4 PieceOf(const std::byte* from, DType from_dtype, DType to_dtype) {
  if (from_dtype == to_dtype) return *reinterpret_cast<const uint4*>(from);
  if (from_dtype == DType::kF32) return ConvertedPiece<float, T>(from);
  if (from_dtype == DType::kBF16) return ConvertedPiece<__nv_bfloat16, T>(from);
  return ConvertedPiece<__half, T>(from);
}

// Returns NotFiniteBits of all of it.
template <typename T>
__device__ __forceinline__ uint32_t CopyPiece(const std::byte* from, DType from_dtype,
                                              DType to_dtype, T* to) {
  const uint4 piece = PieceOf<T>(from, from_dtype, to_dtype);
  *reinterpret_cast<uint4*>(to) = piece;
  return NotFiniteBits<T>(piece.x) | NotFiniteBits<T>(piece.y) | NotFiniteBits<T>(piece.z) |
         NotFiniteBits<T>(piece.w);
}

// The new tokens of a sequence.
struct NewTokens {
  int32_t row, count;  // rows of the source: the first, and how many
  int32_t position;    // position of the first token

  __device__ __forceinline__ NewTokens(const AppendBatch& w, int sequence) {
    row = w.starts == nullptr ? sequence : w.starts[sequence];
    count = w.starts == nullptr ? 1 : w.starts[sequence + 1] - row;
    const int32_t tokens = w.tokens[sequence];
    count = max(min(count, tokens), 0);
    position = tokens - count;
  }
};

__device__ __forceinline__ std::byte* KeyRow(const PagedLayer& l, int sequence, int head,
                                             int32_t position) {
  const uint64_t page = l.pages[int64_t{sequence} * l.page_stride + position / l.page_tokens];
  return reinterpret_cast<std::byte*>(page) + l.key_offset + head * l.head_stride +
         position % l.page_tokens * l.slot_stride;
}

__device__ __forceinline__ void WaitThenLetNextStart() {
  WaitForPrevious();
  LetNextStart();
}

template <typename T>
__device__ void CopyRows(const AppendBatch& w, const NewTokens& tokens, int sequence, int head) {
  const int pieces = w.layer.head_dim / kPiece;  // pieces of a key
  const int rows_at_once = kThreads / (2 * pieces);
  const int piece = threadIdx.x % pieces, field = threadIdx.x / pieces % 2;
  const DeviceSource& source = field == 0 ? w.k : w.v;
  const int64_t to_field = field == 0 ? 0 : w.layer.value_offset - w.layer.key_offset;
  const int64_t source_bytes = source.dtype == DType::kF32 ? 4 : 2;
  uint32_t not_finite = 0;
  for (int32_t i = blockIdx.z * rows_at_once + threadIdx.x / (2 * pieces); i < tokens.count;
       i += gridDim.z * rows_at_once) {
    const auto* from = static_cast<const std::byte*>(source.data) +
                       (tokens.row + i) * source.row_stride + head * source.head_stride +
                       piece * kPiece * source_bytes;
    std::byte* to = KeyRow(w.layer, sequence, head, tokens.position + i) + to_field;
    WaitThenLetNextStart();
    not_finite |=
        CopyPiece(from, source.dtype, w.layer.dtype, reinterpret_cast<T*>(to) + piece * kPiece);
  }
  if (AnyNotFinite(not_finite)) NoteNotFinite(w.not_finite, sequence);
}

template <typename Row>
__device__ __forceinline__ Row* IndexRow(const AppendBatch& w, const DeviceIndex::Level& level,
                                         int sequence, int field, int head, int32_t unit) {
  const uint64_t block =
      w.index.blocks[int64_t{sequence} * w.index.block_stride + unit / level.units_per_block];
  const int64_t rows = int64_t{field} * w.layer.kv_heads + head;
  return reinterpret_cast<Row*>(block + level.offset) +
         (rows * level.units_per_block + unit % level.units_per_block) * w.layer.head_dim;
}

// Channel c of the unit's minimum and maximum, as ref finds them: the first of equals.
template <typename T>
__device__ void StoreMinMax(const AppendBatch& w, int sequence, int head, int32_t unit, int c) {
  const DeviceIndex::Level& level = w.index.levels[0];
  const int32_t begin = unit * level.unit_tokens;
  T low, high;
  for (int32_t i = 0; i < level.unit_tokens; ++i) {
    const T x = reinterpret_cast<const T*>(KeyRow(w.layer, sequence, head, begin + i))[c];
    if (i == 0 || Widen(x) < Widen(low)) low = x;
    if (i == 0 || Widen(x) > Widen(high)) high = x;
  }
  IndexRow<T>(w, level, sequence, 0, head, unit)[c] = low;
  IndexRow<T>(w, level, sequence, 1, head, unit)[c] = high;
}

// Channel c of the unit's mean: summed in fp32 in order of position, divided once.
template <typename T, typename Row>
__device__ void StoreMean(const AppendBatch& w, int level, int sequence, int head, int32_t unit,
                          int c) {
  const DeviceIndex::Level& to = w.index.levels[level];
  const DeviceIndex::Level& finer = w.index.levels[max(level - 1, 0)];
  const int32_t count = level == 0 ? to.unit_tokens : to.unit_tokens / finer.unit_tokens;
  float sum = 0;
#pragma unroll 8
  for (int32_t i = unit * count; i < (unit + 1) * count; ++i) {
    sum += level == 0 ? Widen(reinterpret_cast<const T*>(KeyRow(w.layer, sequence, head, i))[c])
                      : Widen(IndexRow<const Row>(w, finer, sequence, 0, head, i)[c]);
  }
  Round(__fdiv_rn(sum, static_cast<float>(count)),
        IndexRow<Row>(w, to, sequence, 0, head, unit)[c]);
}

// The rows of the units that `tokens` complete. A coarser level reads what a finer one wrote.
template <typename T>
__device__ void StoreIndexRows(const AppendBatch& w, const NewTokens& tokens, int sequence,
                               int head) {
  const int dim = w.layer.head_dim;
  for (int level = 0; level < w.index.level_count; ++level) {
    __syncthreads();
    const int32_t unit_tokens = w.index.levels[level].unit_tokens;
    const int32_t first = tokens.position / unit_tokens;
    const int32_t units = (tokens.position + tokens.count) / unit_tokens - first;
    for (int32_t i = threadIdx.x; i < units * dim; i += kThreads) {
      const int32_t unit = first + i / dim, c = i % dim;
      if (w.index.kind == IndexLayout::Kind::kMinMax) {
        StoreMinMax<T>(w, sequence, head, unit, c);
      } else if (w.index.dtype == DType::kF32) {
        StoreMean<T, float>(w, level, sequence, head, unit, c);
      } else {
        StoreMean<T, __nv_bfloat16>(w, level, sequence, head, unit, c);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ AppendBatch w) {
  if (w.next_reads_ahead) LetNextStart();
  if (!w.ahead) WaitForPrevious();
  const int head = blockIdx.x, sequence = blockIdx.y;
  const NewTokens tokens(w, sequence);
  CopyRows<T>(w, tokens, sequence, head);
  WaitThenLetNextStart();
  if (tokens.count > 0) StoreIndexRows<T>(w, tokens, sequence, head);
}

bool IsValid(const AppendBatch& w) {
  const PagedLayer& l = w.layer;
  const bool index_ok = w.index.kind == IndexLayout::Kind::kNone ? w.index.level_count == 0
                        : w.index.kind == IndexLayout::Kind::kMinMax
                            ? w.index.level_count == 1 && w.index.dtype == l.dtype
                            : w.index.kind == IndexLayout::Kind::kMean &&
                                  w.index.level_count <= 3 && w.index.dtype != DType::kF16;
  return (l.head_dim == 64 || l.head_dim == 128 || l.head_dim == 256) && l.dtype != DType::kF32 &&
         l.page_tokens > 0 && l.kv_heads > 0 && l.slot_stride % 16 == 0 &&
         l.head_stride % 16 == 0 && l.key_offset % 16 == 0 && l.value_offset % 16 == 0 &&
         w.batch >= 0 && w.batch < 65536 && w.k.IsAligned() && w.v.IsAligned() && index_ok;
}

// CTAs that share a (sequence, KV head): units may lie in the rows of several, so one with an
// index.
uint32_t SharesOf(const AppendBatch& w) {
  if (w.index.kind != IndexLayout::Kind::kNone) return 1;
  const int32_t each = w.rows_max / w.batch / kRowsPerCta + 1;
  return static_cast<uint32_t>(each < 64 ? each : 64);
}

}  // namespace

int AppendCuda(const AppendBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const dim3 grid(w.layer.kv_heads, w.batch, SharesOf(w));
  return w.layer.dtype == DType::kBF16
             ? LaunchDependent(AppendKernel<__nv_bfloat16>, grid, kThreads, 0, stream, w)
             : LaunchDependent(AppendKernel<__half>, grid, kThreads, 0, stream, w);
}

}  // namespace kvstrata::cuda
