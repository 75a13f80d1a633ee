// SPDX-License-Identifier: Apache-2.0
// Matrices of 16-bit elements in shared memory, as tensor cores want them: rows of kDim elements in
// 16-byte pieces, piece p of row r at place p ^ (r % 8), so that 8 rows of a piece, or a row's
// pieces, meet all banks. Filled by cp.async, read by ldmatrix. sm_80 and later.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Starts a copy of 16 bytes from global memory, past the L1; of zeros where `present` is false.
__device__ __forceinline__ void CopyPiece(uint32_t to, uint64_t from, bool present = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(reinterpret_cast<const void*>(from))),
               "r"(present ? 16 : 0)
               : "memory");
}
// Waits until all copies that this thread has started are done.
__device__ __forceinline__ void AwaitCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8x8 matrices, lane l giving the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ uint4 LoadMatrices(uint32_t address) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}
__device__ __forceinline__ uint4 LoadTransposed(uint32_t address) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}

// Addresses in a matrix whose first byte is a multiple of 128 and of a row.
template <int kDim>
struct SharedMatrix {
  static constexpr int kPieces = kDim / 8;  // pieces of a row
  static constexpr uint32_t kRowBytes = kDim * 2;

  static __device__ __forceinline__ uint32_t Piece(int row, int piece) {
    return static_cast<uint32_t>(row) * kRowBytes + static_cast<uint32_t>(piece ^ (row % 8)) * 16;
  }
  // Piece(row, piece) for piece 2 * pair (+ 1) and row (+ a multiple of 8), made of that for pair
  // 0.
  static __device__ __forceinline__ uint32_t Pair(uint32_t first, int pair) {
    return first ^ static_cast<uint32_t>(pair * 32);
  }
};

}  // namespace kvstrata::cuda
