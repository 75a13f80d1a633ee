// SPDX-License-Identifier: Apache-2.0
// The bytes of a sealed group of planes: the keys and values of some consecutive tokens of one
// (layer, KV head) in nested bits (docs/spec/planes.md, "The bytes of a group").
//
//   upper: keys' minimum, step fp16 [dim], plane 0 [word][token];
//          values' minimum, step fp16 [tokens], plane 0 [strip][dim]
//   lower: a row a token: plane 1, then plane 2 of its key, the same of its value
//
// The two may lie apart. Words have 32 bits, little-endian.
#pragma once

#include <cstdint>

namespace kvstrata {

inline constexpr int32_t kStripTokens = 16;  // whose digits of a channel are a word of values

struct PlanesFormat {
  int32_t dim = 0;      // 64, 128 or 256
  int32_t tokens = 64;  // a multiple of 16, 16 to 256
  int32_t keep = 8;     // bits of a code that are stored: 8, or 4 without plane 2

  // What every op requires.
  constexpr bool IsValid() const {
    return (dim == 64 || dim == 128 || dim == 256) && tokens >= 16 && tokens <= 256 &&
           tokens % kStripTokens == 0 && (keep == 8 || keep == 4);
  }
  constexpr int32_t planes() const { return keep == 8 ? 3 : 2; }

  // Byte offsets in the upper run, whose keys' minimum is at 0.
  constexpr int64_t key_step() const { return int64_t{2} * dim; }
  constexpr int64_t key_codes() const { return int64_t{4} * dim; }
  constexpr int64_t value_minimum() const { return key_codes() + plane_bytes(); }
  constexpr int64_t value_step() const { return value_minimum() + int64_t{2} * tokens; }
  constexpr int64_t value_codes() const { return value_minimum() + int64_t{4} * tokens; }
  constexpr int64_t upper_bytes() const { return value_codes() + plane_bytes(); }  // 64 divides it

  // A token's row of the lower run: half of it is the key's, half the value's.
  constexpr int64_t row_bytes() const { return int64_t{dim} * (keep - 2) / 4; }  // 32 divides it
  constexpr int64_t lower_bytes() const { return tokens * row_bytes(); }

  bool operator==(const PlanesFormat&) const = default;

 private:
  constexpr int64_t plane_bytes() const { return int64_t{tokens} * dim / 4; }
};

}  // namespace kvstrata
