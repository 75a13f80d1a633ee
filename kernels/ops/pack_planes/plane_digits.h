// SPDX-License-Identifier: Apache-2.0
// Where the digits of a code lie in a group of planes, one by one, and what they count as: for
// `ref` ops (docs/spec/planes.md, "The bytes of a group").
//
// Threads: pure; any.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/pages/dtype.h"

namespace kvstrata {

inline constexpr int32_t kPlaneShift[] = {6, 4, 0};  // a plane's bits in a code: from here on,
inline constexpr int32_t kPlaneWidth[] = {2, 2, 4};  // so many

enum class PlanesSide { kKeys, kValues };

// One code of a group.
struct CodePlace {
  PlanesSide side;
  int32_t token, channel;
};

// A digit: some bits of a word.
struct DigitPlace {
  int64_t byte;  // the word's place: in the upper run for plane 0, else in the lower one
  int32_t bit;
};

// Number i's among `count` in words of `width` bits each (docs/spec/bits.md, "A sealed group").
constexpr DigitPlace PlaceInWords(int32_t count, int32_t width, int32_t i) {
  constexpr int32_t kByteOf[] = {0, 2, 1, 3};
  const int32_t run = count * width / 8;
  return {int64_t{4} * (i % run / 4), 8 * kByteOf[i % 4] + width * (i / run)};
}

constexpr DigitPlace PlaceOf(const PlanesFormat& f, int plane, CodePlace code) {
  const bool is_key = code.side == PlanesSide::kKeys;
  if (plane == 0 && !is_key) {
    const int32_t strip = code.token / kStripTokens;
    const DigitPlace place = PlaceInWords(kStripTokens, 2, code.token % kStripTokens);
    return {f.value_codes() + int64_t{4} * (strip * f.dim + code.channel), place.bit};
  }
  const DigitPlace place = PlaceInWords(f.dim, kPlaneWidth[plane], code.channel);
  if (plane == 0) return {f.key_codes() + place.byte * f.tokens + 4 * code.token, place.bit};
  const int64_t half = is_key ? 0 : f.row_bytes() / 2;
  const int64_t of_plane = plane == 1 ? 0 : f.dim / 4;
  return {code.token * f.row_bytes() + half + of_plane + place.byte, place.bit};
}

// Byte offsets of the minimum and step that a code goes by: of its channel for keys, of its token
// for values.
inline int64_t MinimumOffset(const PlanesFormat& f, CodePlace code) {
  return code.side == PlanesSide::kKeys ? 2 * code.channel : f.value_minimum() + 2 * code.token;
}
inline int64_t StepOffset(const PlanesFormat& f, CodePlace code) {
  return code.side == PlanesSide::kKeys ? f.key_step() + 2 * code.channel
                                        : f.value_step() + 2 * code.token;
}

// The number that a code counts as, by its first `planes` planes; others are not read. Float: fp32
// as rule 5 of the page rounds it, double: exactly.
template <typename Float>
Float NumberAt(const PlanesFormat& f, const std::byte* upper, const std::byte* lower, int planes,
               CodePlace code) {
  F16 minimum, step;
  std::memcpy(&minimum, upper + MinimumOffset(f, code), 2);
  std::memcpy(&step, upper + StepOffset(f, code), 2);
  uint32_t bits = 0;
  for (int plane = 0; plane < planes; ++plane) {
    const DigitPlace place = PlaceOf(f, plane, code);
    uint32_t word;
    std::memcpy(&word, (plane == 0 ? upper : lower) + place.byte, 4);
    bits |= (word >> place.bit & ((1u << kPlaneWidth[plane]) - 1)) << kPlaneShift[plane];
  }
  const auto middle = static_cast<Float>((1 << kPlaneShift[planes - 1]) - 1) / 2;
  return static_cast<Float>(ToFloat(minimum)) +
         static_cast<Float>(ToFloat(step)) * (static_cast<Float>(bits) + middle);
}

// row [dim] times the orthonormal Hadamard matrix, in place; its own inverse (rule 3).
template <typename Float>
void RotateHadamard(Float* row, int32_t dim) {
  for (int32_t stride = 1; stride < dim; stride *= 2) {
    for (int32_t i = 0; i < dim; ++i) {
      if ((i & stride) != 0) continue;
      const Float a = row[i], b = row[i + stride];
      row[i] = a + b;
      row[i + stride] = a - b;
    }
  }
  const auto size = static_cast<Float>(1 / std::sqrt(static_cast<double>(dim)));
  for (int32_t i = 0; i < dim; ++i) row[i] *= size;
}

}  // namespace kvstrata
