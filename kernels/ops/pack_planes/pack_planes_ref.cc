// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"
#include "kernels/ops/quantise_keys/half_range.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

constexpr int32_t kLastCode = 255;

void PutCode(const PackPlanesWork& w, CodePlace place, uint32_t code) {
  for (int plane = 0; plane < w.format.planes(); ++plane) {
    const DigitPlace digit = PlaceOf(w.format, plane, place);
    std::byte* at = (plane == 0 ? w.upper : w.lower) + digit.byte;
    uint32_t word;
    std::memcpy(&word, at, 4);
    word |= (code >> kPlaneShift[plane] & ((1u << kPlaneWidth[plane]) - 1)) << digit.bit;
    std::memcpy(at, &word, 4);
  }
}

// Numbers that share a minimum and step. Number i is the code at place(i).
template <typename Place>
void PutNumbers(const PackPlanesWork& w, std::span<const float> numbers, const Place& place) {
  const auto [least, largest] = std::ranges::minmax(numbers);
  const HalfRange range = HalfRange::Of(least, largest, kLastCode);
  std::memcpy(w.upper + MinimumOffset(w.format, place(0)), &range.minimum, 2);
  std::memcpy(w.upper + StepOffset(w.format, place(0)), &range.step, 2);
  for (size_t i = 0; i < numbers.size(); ++i) {
    PutCode(w, place(static_cast<int32_t>(i)), range.Code(numbers[i]));
  }
}

template <typename T>
float ElementAt(const PagedRows& rows, int32_t token, int32_t channel) {
  return Counted(ToFloat(reinterpret_cast<const T*>(rows.Row(token))[channel]));
}

template <typename T>
void Pack(const PackPlanesWork& w) {
  const PlanesFormat& f = w.format;
  std::fill(w.upper, w.upper + f.upper_bytes(), std::byte{0});
  std::fill(w.lower, w.lower + f.lower_bytes(), std::byte{0});
  std::vector<float> channel(f.tokens), row(f.dim);
  for (int32_t c = 0; c < f.dim; ++c) {
    for (int32_t t = 0; t < f.tokens; ++t) channel[t] = ElementAt<T>(w.keys, w.begin + t, c);
    PutNumbers(w, channel, [c](int32_t t) { return CodePlace{PlanesSide::kKeys, t, c}; });
  }
  for (int32_t t = 0; t < f.tokens; ++t) {
    for (int32_t c = 0; c < f.dim; ++c) row[c] = ElementAt<T>(w.values, w.begin + t, c);
    RotateHadamard(row.data(), f.dim);
    // A sum of many elements may be beyond what fp16 holds.
    for (float& x : row) x = Counted(x);
    PutNumbers(w, row, [t](int32_t c) { return CodePlace{PlanesSide::kValues, t, c}; });
  }
}

void Unpack(const UnpackPlanesWork& w) {
  const PlanesFormat& f = w.format;
  KVS_CHECK(f.IsValid());
  const auto number = [&](PlanesSide side, int32_t t, int32_t c) {
    return NumberAt<float>(f, w.upper, w.lower, f.planes(), {side, t, c});
  };
  for (int32_t t = 0; t < f.tokens; ++t) {
    float* key = w.keys + int64_t{t} * f.dim;
    float* value = w.values + int64_t{t} * f.dim;
    for (int32_t c = 0; c < f.dim; ++c) {
      key[c] = number(PlanesSide::kKeys, t, c);
      value[c] = Counted(number(PlanesSide::kValues, t, c));
    }
    RotateHadamard(value, f.dim);
  }
}

}  // namespace

void PackPlanesRef(const PackPlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    const PackPlanesWork& w = work[i];
    KVS_CHECK(w.format.IsValid() && w.keys.dim == w.format.dim && w.values.dim == w.format.dim &&
              w.keys.dtype == w.values.dtype);
    WithElement(w.keys.dtype, [&]<typename T>() { Pack<T>(w); });
  });
}

void UnpackPlanesRef(const UnpackPlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { Unpack(work[i]); });
}

}  // namespace kvstrata
