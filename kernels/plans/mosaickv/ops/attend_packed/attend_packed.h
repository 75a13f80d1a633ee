// SPDX-License-Identifier: Apache-2.0
// Op attend_packed: partial attention on packed bytes (docs/spec/mosaickv.md, "Codec packed";
// paper 5.3). The query comes rotated; nothing is unpacked to memory. ScorePacked gives plain dot
// products with packed rows (block keys, tokens). Rotate applies a rotation to a few vectors.
//
// Bytes of a packed vector (docs/spec/mosaickv.md 3): bitmap of `bits` bits as little-endian 32-bit
// words (bit b: channels [b * neighbours, (b + 1) * neighbours)), zero-padded to 16 bytes; then
// `keep` values in bf16 by ascending channel, zero-padded to 16 bytes. A bitmap that has other than
// keep / neighbours bits set (damage) contributes garbage, never an access beyond its row.
// Sums in fp32 (ref: double). Work items are independent. No allocation; about 90 KiB of stack.
// Cost: each packed row is decoded once for up to 16 queries of an item, into the L1.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// Rows of a slice of packed attention: long, because each slice rotates its output back.
inline constexpr int32_t kPackedSliceRows = 4096;

struct PackedRows {
  const std::byte* data = nullptr;  // row i at data + i * stride
  int64_t stride = 0;               // bytes; a multiple of 16
  int32_t dim = 0;                  // channels of an unpacked row
  int32_t bits = 0;                 // bits of the bitmap: channels that may be stored / neighbours
  int32_t keep = 0;                 // values of a row
  int32_t neighbours = 1;           // 1, 2 or 4
  int32_t value_offset = 0;         // bytes from a row's start to its values
};

// Format of rows of `dim` channels (docs/spec/mosaickv.md 2, 3); data is null.
PackedRows PackedFormat(int32_t dim, int32_t keep, int32_t neighbours, bool truncate);

struct AttendPackedWork {
  PackedRows k, v;             // the same rows
  const float* r_v = nullptr;  // [dim][dim]: o is rotated back by it, o = (sum p v') R_V
  const float* q = nullptr;    // rotated: query token i, head g at q + i*q_token + g*dim
  int64_t q_token = 0;
  int32_t queries = 1;
  int32_t group = 1;
  const Run* runs = nullptr;  // local rows, ascending, disjoint, not empty
  int32_t run_count = 0;
  float scale = 1.0f;
  float* m = nullptr;  // [queries * group]
  float* l = nullptr;
  float* o = nullptr;  // [queries * group][dim], not rotated any more
};

struct ScorePackedWork {
  PackedRows rows;
  const float* q = nullptr;  // rotated [queries][dim]
  int32_t queries = 1;
  Run units;  // rows [begin, end)
  float scale = 1.0f;
  // out_query == 0: out[u] = max over the queries; else query i's scores at out + i * out_query.
  float* out = nullptr;
  int64_t out_query = 0;
};

// out [rows][dim] = x [rows][dim] times R^T (x' = R x for each row); transposed: times R.
struct RotateWork {
  const float* r = nullptr;  // [dim][dim]
  int32_t dim = 0;
  bool transposed = false;
  const float* x = nullptr;
  int64_t x_row = 0;  // floats from a row to the next
  int32_t rows = 0;
  float* out = nullptr;  // [rows][dim]; not x
};

void AttendPackedRef(const AttendPackedWork* work, int64_t n, Executor& executor);
void AttendPackedSimd(const AttendPackedWork* work, int64_t n, Executor& executor);
void ScorePackedRef(const ScorePackedWork* work, int64_t n, Executor& executor);
void ScorePackedSimd(const ScorePackedWork* work, int64_t n, Executor& executor);
void RotateRef(const RotateWork* work, int64_t n, Executor& executor);
void RotateSimd(const RotateWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
