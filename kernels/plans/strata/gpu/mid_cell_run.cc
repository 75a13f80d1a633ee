// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/gpu/mid_cell_run.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/ops/pack_planes/plane_digits.h"

namespace kvstrata {
namespace {

constexpr uint32_t kBelow = 31;  // the middle of 64 codes is between it and the next one

// The Rudin-Shapiro sequence: no row of a Hadamard matrix has much in common with it.
uint32_t IsAbove(int32_t channel) {
  const auto c = static_cast<uint32_t>(channel);
  return static_cast<uint32_t>(std::popcount(c & c >> 1)) % 2;
}

void PutDigits(const PlanesFormat& f, CodePlace code, std::byte* run) {
  const uint32_t digits = kBelow + IsAbove(code.channel);
  for (int plane = 1; plane < f.planes(); ++plane) {
    const DigitPlace place = PlaceOf(f, plane, code);
    uint32_t word;
    std::memcpy(&word, run + place.byte, sizeof(word));
    word |= (digits >> kPlaneShift[plane] & ((1u << kPlaneWidth[plane]) - 1)) << place.bit;
    std::memcpy(run + place.byte, &word, sizeof(word));
  }
}

}  // namespace

std::vector<std::byte> MidCellRun(const PlanesFormat& format) {
  std::vector<std::byte> run(static_cast<size_t>(format.lower_bytes()));
  for (const PlanesSide side : {PlanesSide::kKeys, PlanesSide::kValues}) {
    for (int32_t token = 0; token < format.tokens; ++token) {
      for (int32_t channel = 0; channel < format.dim; ++channel) {
        PutDigits(format, {side, token, channel}, run.data());
      }
    }
  }
  return run;
}

}  // namespace kvstrata
