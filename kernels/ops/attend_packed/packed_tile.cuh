// Tiles of 16 packed rows: from memory to shared memory, and from there to fragments of tensor
// cores. By whole warps; a tile belongs to one warp.
//
// A lane owns a run of channels of the rows that its fragments hold. Which of them are stored is a
// mask; the first stored one's place among the row's values is a population count; from there on
// each bit says whether the next 16 bits are read or a 0 is made. No channel order is needed but
// that keys and queries, or values and outputs, agree:
//   keys    lane (g, t): channels [kKeyRun t, kKeyRun (t + 1)) of rows g and g + 8
//   values  lane (g, t): channels [kValueRun g, ...) of rows 2t, 2t + 1, 2t + 8 and 2t + 9
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PACKED_PACKED_TILE_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PACKED_PACKED_TILE_CUH_

#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/mma_m16n8k16.cuh"
#include "kernels/ops/attend_packed/attend_packed_cuda.h"

namespace kvstrata::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kStages = 3;  // tiles of a warp on their way or in use
// A damaged bitmap asks for values beyond its row: this much memory behind the last one.
inline constexpr int kTileSlack = 512;

// How the rows of a segment lie, in memory as in shared memory: without gaps.
struct RowFormat {
  int32_t chunks;        // of 16 bytes
  int32_t value_offset;  // bytes
  int32_t neighbours;

  static __host__ __device__ RowFormat Of(int stored_channels, int keep, int neighbours) {
    const int value_offset = (stored_channels / neighbours + 127) / 128 * 16;
    return {value_offset / 16 + (2 * keep + 15) / 16, value_offset, neighbours};
  }
  __host__ __device__ int32_t stride() const { return chunks * 16; }
  __host__ __device__ int32_t tile_bytes() const { return kTileRows * stride(); }
};

// Starts the copy of 16 bytes; of nothing, and zeros instead, where `real` is false. A row of zeros
// stores no channel.
__device__ __forceinline__ void CopyChunk(uint32_t to, uint64_t from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest kStages - 1 copies of this warp are there.
__device__ __forceinline__ void AwaitOldestCopy() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
  __syncwarp();
}

// For what is cheap to work out: the compiler would do it again for every tile.
__device__ __forceinline__ void KeepInRegister(uint32_t& x) { asm("" : "+r"(x)); }

__device__ __forceinline__ uint32_t LoadShared(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ uint4 LoadShared128(uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
// The 16 bits at `at`, which then moves on, if `stored` is not 0; else 0.
__device__ __forceinline__ uint32_t NextValue(uint32_t stored, uint32_t& at) {
  uint32_t x;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@p ld.shared.u16 %0, [%1];\n"
      "@p add.u32 %1, %1, 2;\n"
      "}"
      : "=&r"(x), "+r"(at)
      : "r"(stored));
  return x;
}

// The low 32 / neighbours bits, each as `neighbours` equal bits.
__device__ __forceinline__ uint32_t SpreadBits(uint32_t bits, int neighbours) {
  if (neighbours == 2) {
    bits = (bits | bits << 8) & 0x00FF00FFu;
    bits = (bits | bits << 4) & 0x0F0F0F0Fu;
    bits = (bits | bits << 2) & 0x33333333u;
    bits = (bits | bits << 1) & 0x55555555u;
    return bits * 3;
  }
  bits = (bits | bits << 12) & 0x000F000Fu;
  bits = (bits | bits << 6) & 0x03030303u;
  bits = (bits | bits << 3) & 0x11111111u;
  return bits * 15;
}

// A run of kCount channels of rows of kChannels, and what of finding it is the same in all rows.
template <int kChannels, int kCount>
class ChannelRun {
  static constexpr int kWords = (kChannels + 31) / 32;

 public:
  __device__ __forceinline__ void Locate(const RowFormat& f, int first_channel) {
    const int first = first_channel / f.neighbours;
    neighbours_ = f.neighbours;
    value_offset_ = f.value_offset;
    word_at_ = first / 32 * 4;
    shift_ = first % 32;
    const int count = kCount / f.neighbours;
    within_ = count == 32 ? ~0u : (1u << count) - 1;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int bits = min(max(first - 32 * w, 0), 32);
      before_[w] = bits == 32 ? ~0u : (1u << bits) - 1;
      KeepInRegister(before_[w]);
    }
  }

  // Which bits of the row at `row` are of the run, and in `at` where its first value is.
  __device__ __forceinline__ uint32_t Find(uint32_t row, uint32_t& at) const {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 bits = LoadShared128(row + 4 * w);
      count += __popc(bits.x & before_[w]);
      if (w + 1 < kWords) count += __popc(bits.y & before_[w + 1]);
      if (w + 2 < kWords) count += __popc(bits.z & before_[w + 2]);
      if (w + 3 < kWords) count += __popc(bits.w & before_[w + 3]);
    }
    at = row + value_offset_ + 2 * count * neighbours_;
    const uint32_t low = LoadShared(row + word_at_), high = LoadShared(row + word_at_ + 4);
    return __funnelshift_r(low, high, shift_) & within_;
  }
  // A bit for every channel.
  template <int kRows>
  __device__ __forceinline__ void ToChannels(uint32_t (&bits)[kRows]) const {
    if (neighbours_ == 1) return;
#pragma unroll
    for (uint32_t& x : bits) x = SpreadBits(x, neighbours_);
  }

 private:
  uint32_t before_[kWords];  // bits of channels before the run
  uint32_t within_;
  int32_t neighbours_, value_offset_, word_at_, shift_;
};

// Keys of a tile as left-hand fragments.
template <int kChannels>
class KeyRuns {
 public:
  static constexpr int kRun = kChannels / 4;
  static constexpr int kPieces = kRun > 32 ? 2 : 1;  // a mask is 32 bits
  static constexpr int kPiece = kRun / kPieces;

  __device__ __forceinline__ void Locate(const RowFormat& f) {
    const int t = threadIdx.x % 4;
    row_ = static_cast<int>(threadIdx.x % 32 / 4) * f.stride();
    KeepInRegister(row_);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) runs_[i].Locate(f, t * kRun + i * kPiece);
  }
  // visit(product, a0, a1, a2, a3) for each 16 channels of the tile at `tile`. A loop: the code of
  // a tile that is met for the first time comes from the L2.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(uint32_t tile, int32_t stride, Visit visit) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32_t at[2], stored[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        stored[half] = runs_[i].Find(tile + row_ + 8 * half * stride, at[half]);
      }
      runs_[i].ToChannels(stored);
#pragma unroll
      for (int p = 0; p < kPiece / 4; ++p) {
        uint32_t x[2][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            x[half][e] = NextValue(stored[half] & (1u << (4 * p + e)), at[half]);
          }
        }
        visit(i * (kPiece / 4) + p, LowHalves(x[0][0], x[0][1]), LowHalves(x[1][0], x[1][1]),
              LowHalves(x[0][2], x[0][3]), LowHalves(x[1][2], x[1][3]));
      }
    }
  }

 private:
  ChannelRun<kChannels, kPiece> runs_[kPieces];
  uint32_t row_;  // where row g begins in a tile
};

// Values of a tile as left-hand fragments of their transpose.
template <int kChannels>
class ValueRuns {
 public:
  static constexpr int kRun = kChannels / 8;

  __device__ __forceinline__ void Locate(const RowFormat& f) {
    run_.Locate(f, static_cast<int>(threadIdx.x % 32 / 4) * kRun);
    row_ = static_cast<int>(threadIdx.x % 4) * 2 * f.stride();
    KeepInRegister(row_);
  }
  // visit(product, a0, a1, a2, a3): product i holds channels kRun g + 2i and kRun g + 2i + 1.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(uint32_t tile, int32_t stride, Visit visit) const {
    uint32_t at[4], stored[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      stored[r] = run_.Find(tile + row_ + ((r & 1) + 8 * (r >> 1)) * stride, at[r]);
    }
    run_.ToChannels(stored);
#pragma unroll
    for (int p = 0; p < kRun / 2; ++p) {
      uint32_t x[2][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int r = 0; r < 4; ++r) x[e][r] = NextValue(stored[r] & (1u << (2 * p + e)), at[r]);
      }
      visit(p, LowHalves(x[0][0], x[0][1]), LowHalves(x[1][0], x[1][1]),
            LowHalves(x[0][2], x[0][3]), LowHalves(x[1][2], x[1][3]));
    }
  }

 private:
  ChannelRun<kChannels, kRun> run_;
  uint32_t row_;  // where row 2t begins in a tile
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PACKED_PACKED_TILE_CUH_
