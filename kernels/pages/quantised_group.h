// SPDX-License-Identifier: Apache-2.0
// The bytes of a sealed group: the keys of some consecutive tokens of one (layer, KV head) in few
// bits a channel (docs/spec/bits.md, "A sealed group in memory").
//
//   minimum fp16 [dim], step fp16 [dim], then planes of codes, words of 32 bits [word][token]
#pragma once

#include <cstdint>

namespace kvstrata {

struct QuantisedGroup {
  int32_t dim = 0;      // 64, 128 or 256
  int32_t bits = 2;     // bits of a code: 2, 3 or 4
  int32_t tokens = 64;  // a multiple of 16, 16 to 256

  // What every op requires.
  constexpr bool IsValid() const {
    return (dim == 64 || dim == 128 || dim == 256) && bits >= 2 && bits <= 4 && tokens >= 16 &&
           tokens <= 256 && tokens % 16 == 0;
  }
  // Bits of a code in the first plane; those of three bits have a second plane, of the high one.
  constexpr int32_t plane_bits() const { return bits == 3 ? 2 : bits; }

  // Byte offsets in the group, whose minimum is at 0.
  constexpr int64_t step_offset() const { return int64_t{2} * dim; }
  constexpr int64_t codes_offset() const { return int64_t{4} * dim; }
  constexpr int64_t high_offset() const {  // where the plane of high bits begins
    return codes_offset() + int64_t{tokens} * dim / 4;
  }
  constexpr int64_t bytes() const {  // a multiple of 64
    return codes_offset() + int64_t{tokens} * dim * bits / 8;
  }
  bool operator==(const QuantisedGroup&) const = default;
};

// Quantised keys have no infinities: values count as at most this, in size.
inline constexpr float kQuantisedMax = 65504;

}  // namespace kvstrata
