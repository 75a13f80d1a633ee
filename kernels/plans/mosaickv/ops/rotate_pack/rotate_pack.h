// SPDX-License-Identifier: Apache-2.0
// Op rotate_pack: raw rows to packed bytes (docs/spec/mosaickv.md, "Codec packed" 1 to 4).
//
// x' = R x for each row in fp32; of each x' the keep / neighbours groups of largest L1 norm among
// the channels that may be stored (norms: fp32 sums in channel order of the unrounded values; ties
// to the lower group) are written as attend_packed.h describes. `block` > 0 packs means instead: of
// `block` consecutive rotated rows each (fp32 sums in order of position, divided once), the last
// over what is there. The choice is bit-exact for equal x'; the rotation itself sums in fp32 (ref:
// double). Work items are independent. Cost: dim^2 multiply-adds a row. No allocation beyond a
// tile.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"

namespace kvstrata {

struct RotatePackWork {
  PagedRows rows;            // source
  Run run;                   // positions of the source, not empty
  const float* r = nullptr;  // [dim][dim]
  PackedRows format;         // format of the result
  int32_t block = 0;         // 0: every row; else means of so many
  std::byte* out = nullptr;  // [rows or blocks][format.stride], fully written
  // Sums over the rows (null: not wanted; not for blocks): of the squares of x', of the squares of
  // what was kept (before rounding), and of the per-row relative errors sqrt(1 - kept / all), 0 for
  // a zero row (the temporary loss, docs/spec/mosaickv.md, "Growing").
  double* energy = nullptr;
  double* kept = nullptr;
  double* relative_error = nullptr;
};

void RotatePackRef(const RotatePackWork* work, int64_t n, Executor& executor);
void RotatePackSimd(const RotatePackWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
