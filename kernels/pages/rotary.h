// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of keys that are stored before it (docs/spec/README.md;
// tests/reference/core.py, Rope and attend_pre_rope). Models without it have Rotary{}: their keys
// are stored as attention uses them.
//
// Rotary        what a model says of it: part of its geometry, hence of a page's identity
// RotaryTable   cosines and sines, from which any position's rotation is a product of few rows
//
// Ownership: values; a table is immutable. Threads: any.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace kvstrata {

// Pair i of dim / 2 is rotated by position * theta^(-2i / dim): (x, y) becomes
// (x cos - y sin, y cos + x sin).
struct Rotary {
  double theta = 0;  // base of the frequencies
  int32_t dim = 0;   // channels that are rotated, the first of a head; 0: keys are stored rotated
  bool interleaved = false;  // pairs are (2i, 2i + 1), else halves (i, i + dim / 2)

  bool operator==(const Rotary&) const = default;
  int32_t pairs() const { return dim / 2; }
};

// What a caller said, before anything is known of it.
struct RotaryFields {
  bool keys_pre_rope = false;
  double theta = 0;
  int32_t dim = 0;  // 0: the whole head
  int32_t interleaved = 0;
};

// The Rotary of a model with heads of `head_dim`. INVALID_ARGUMENT MODEL_ROPE names the field, its
// value and the allowed ones. Without keys_pre_rope all others must be 0: a value there would be
// taken for one that is used.
Result<Rotary> ReadRotary(const RotaryFields& fields, int32_t head_dim);

// OK, or MODEL_ROPE: theta from 1 to 1e12, dim even and at most head_dim, or nothing at all.
Status Validate(const Rotary& rotary, int32_t head_dim);

// Cosines and sines of position digits in base 64. The rotation of a position is the complex
// product of one row a digit, so a table serves any position (below 2^31) with 322 rows, 4 * dim
// bytes each (80 KB for dim 64), and neither grows nor depends on the order in which positions
// come.
//
// Error: rows are rounded once from double. A product of n rows is within n * 2^-24 + (n - 1) *
// 2^-22 of the true rotation: 3.6e-7 below 4096 positions (two digits), 1.6e-6 below 2^31.
// Cost: to build about 20,000 complex products in double.
class RotaryTable {
 public:
  static constexpr int kDigitBits = 6;
  static constexpr int kRadix = 1 << kDigitBits;

  // REQUIRES: Validate(rotary, ...) was OK and rotary.dim > 0.
  explicit RotaryTable(const Rotary& rotary);

  const Rotary& rotary() const { return rotary_; }
  // The rotation by digit * 64^level positions: [pairs] cosines, then [pairs] sines.
  const float* Row(int level, int32_t digit) const {
    return rows_.data() + (int64_t{level} * kRadix + digit) * rotary_.dim;
  }
  // Radians per position of pair i.
  static double Frequency(const Rotary& rotary, int32_t pair);

 private:
  Rotary rotary_;
  std::vector<float> rows_;
};

}  // namespace kvstrata
