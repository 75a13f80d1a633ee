// SPDX-License-Identifier: Apache-2.0
// Op rotate_pack on the GPU (contract: rotate_pack.h; bytes: attend_packed.h): raw rows of many
// heads to packed rows and, from the same rotation, packed block keys.
//
// Rotations are in tensor cores, elements of R as two numbers of the rows' type, sums in fp32: x'
// within 3e-5 of |x| of the exact one. The choice is exact for that x'; so where two groups' norms
// differ by less than that, the other one may be kept than `ref` keeps, and a stored value may be
// the other neighbour in bf16. Energies are of the raw rows: no rotation changes them. NaNs are
// chosen first and stored as some NaN.
// Cost: each row is read once, R once a chunk; d = 256 reads R from the L2 for every 16 rows.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/head_rows.h"

namespace kvstrata::cuda {

inline constexpr int32_t kPackChunkRows = 4096;  // rows of a CTA, at most

// Sums over the rows of a chunk, as RotatePackWork has them over all.
struct PackLoss {
  double energy, kept, relative_error;
};

struct RotatePackItem {
  HeadRows source;     // may be empty
  uint64_t r;          // f32 [head_dim][head_dim], 16-aligned
  uint64_t rows;       // packed rows, 16-aligned, fully written
  uint64_t blocks;     // packed means of `block` rotated rows each, or 0
  uint64_t losses;     // PackLoss [a chunk of kPackChunkRows each], or 0
  int32_t keep;        // up to the channels that may be stored, a multiple of neighbours
  int32_t neighbours;  // 1, 2 or 4
  int32_t block;       // 4, 8 or 16, where there are `blocks`
  int32_t reserved;
};

struct RotatePackBatch {
  HeadRowShape shape;
  const RotatePackItem* items = nullptr;  // device [count]
  int32_t count = 0;                      // up to 65535
  int32_t rows_max = 0;                   // at least the rows of any item
  bool truncated = false;                 // the lowest quarter of the channels is dropped
};

// One kernel. cudaErrorInvalidValue: a shape outside the ranges above.
int RotatePackCuda(const RotatePackBatch& work, Stream stream);

}  // namespace kvstrata::cuda
