// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/ops/quantise_keys/half_range.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

template <typename T>
float KeyAt(const QuantiseKeysWork& w, int32_t token, int32_t channel) {
  return Counted(ToFloat(reinterpret_cast<const T*>(w.keys.Row(w.begin + token))[channel]));
}

// A code's bits from `first` on, `width` of them, into its place in a plane.
void PutCode(const QuantisedGroup& f, std::byte* plane, int32_t width, int32_t token,
             int32_t channel, uint32_t code) {
  constexpr int kByteOf[] = {0, 2, 1, 3};
  const int32_t run = f.dim * width / 8, word = channel % run / 4;
  const int32_t bit = 8 * kByteOf[channel % 4] + width * (channel / run);
  std::byte* at = plane + 4 * (int64_t{word} * f.tokens + token);
  uint32_t bits;
  std::memcpy(&bits, at, 4);
  bits |= (code & ((1u << width) - 1)) << bit;
  std::memcpy(at, &bits, 4);
}

template <typename T>
void QuantiseChannel(const QuantiseKeysWork& w, int32_t channel) {
  const QuantisedGroup& f = w.format;
  float low = KeyAt<T>(w, 0, channel), high = low;
  for (int32_t t = 1; t < f.tokens; ++t) {
    low = std::min(low, KeyAt<T>(w, t, channel));
    high = std::max(high, KeyAt<T>(w, t, channel));
  }
  const HalfRange range = HalfRange::Of(low, high, (1 << f.bits) - 1);
  std::memcpy(w.out + 2 * channel, &range.minimum, 2);
  std::memcpy(w.out + f.step_offset() + 2 * channel, &range.step, 2);
  for (int32_t t = 0; t < f.tokens; ++t) {
    const uint32_t bits = range.Code(KeyAt<T>(w, t, channel));
    PutCode(f, w.out + f.codes_offset(), f.plane_bits(), t, channel, bits);
    if (f.bits == 3) PutCode(f, w.out + f.high_offset(), 1, t, channel, bits >> 2);
  }
}

template <typename T>
void Quantise(const QuantiseKeysWork& w) {
  KVS_CHECK(w.format.IsValid() && w.keys.dim == w.format.dim);
  std::fill(w.out, w.out + w.format.bytes(), std::byte{0});
  for (int32_t c = 0; c < w.format.dim; ++c) QuantiseChannel<T>(w, c);
}

}  // namespace

void QuantiseKeysRef(const QuantiseKeysWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    WithElement(work[i].keys.dtype, [&]<typename T>() { Quantise<T>(work[i]); });
  });
}

}  // namespace kvstrata
