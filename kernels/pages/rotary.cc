// SPDX-License-Identifier: Apache-2.0
#include "kernels/pages/rotary.h"

#include <charconv>
#include <cmath>
#include <complex>
#include <string>
#include <string_view>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr int kPositionBits = 31;
constexpr double kMaxTheta = 1e12;

std::string Text(double x) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr};
}

Status Refused(std::string_view field, const std::string& value, const std::string& allowed) {
  return InvalidArgument("MODEL_ROPE", std::string(field) + " " + value + "; " + allowed);
}

Status CheckUnused(const RotaryFields& f) {
  const std::string allowed =
      "with keys_pre_rope 0 it must be 0: keys are stored after rotary embedding. For keys before "
      "it pass keys_pre_rope 1";
  if (f.theta != 0) return Refused("rope_theta", Text(f.theta), allowed);
  if (f.dim != 0) return Refused("rope_dim", std::to_string(f.dim), allowed);
  if (f.interleaved != 0) {
    return Refused("rope_interleaved", std::to_string(f.interleaved), allowed);
  }
  return OkStatus();
}

}  // namespace

Status Validate(const Rotary& rotary, int32_t head_dim) {
  if (rotary == Rotary{}) return OkStatus();
  if (!(rotary.theta >= 1 && rotary.theta <= kMaxTheta)) {
    return Refused("rope_theta", Text(rotary.theta),
                   "allowed: 1 to 1e12, the base of the model's rotary frequencies (often 10000)");
  }
  if (rotary.dim < 2 || rotary.dim > head_dim || rotary.dim % 2 != 0) {
    return Refused("rope_dim", std::to_string(rotary.dim),
                   "allowed: 0 (the whole head), or an even number from 2 to head_dim " +
                       std::to_string(head_dim));
  }
  return OkStatus();
}

Result<Rotary> ReadRotary(const RotaryFields& fields, int32_t head_dim) {
  if (!fields.keys_pre_rope) {
    KVS_RETURN_IF_ERROR(CheckUnused(fields));
    return Rotary{};
  }
  if (fields.interleaved != 0 && fields.interleaved != 1) {
    return Refused("rope_interleaved", std::to_string(fields.interleaved),
                   "allowed: 0 (pairs i, i + dim/2), 1 (pairs 2i, 2i + 1)");
  }
  const Rotary rotary{fields.theta, fields.dim == 0 ? head_dim : fields.dim,
                      fields.interleaved == 1};
  KVS_RETURN_IF_ERROR(Validate(rotary, head_dim));
  return rotary;
}

double RotaryTable::Frequency(const Rotary& rotary, int32_t pair) {
  return std::pow(rotary.theta, -2.0 * pair / rotary.dim);
}

RotaryTable::RotaryTable(const Rotary& rotary) : rotary_(rotary) {
  KVS_CHECK(rotary.dim > 0);
  const int32_t pairs = rotary.pairs();
  const int64_t whole = kPositionBits / kDigitBits;
  const int64_t rest = int64_t{1} << (kPositionBits % kDigitBits);
  rows_.resize((whole * kRadix + rest) * rotary.dim);
  const int64_t rows = whole * kRadix + rest;
  for (int32_t i = 0; i < pairs; ++i) {
    const double frequency = Frequency(rotary, i);
    std::complex<double> rotation;
    std::complex<double> unit;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t level = row / kRadix;
      if (row % kRadix == 0) {
        rotation = 1;
        unit = std::polar(1.0, frequency * std::exp2(kDigitBits * level));
      }
      // At most 63 products in double from an exact start: far below fp32's rounding.
      rows_[row * rotary.dim + i] = static_cast<float>(rotation.real());
      rows_[row * rotary.dim + pairs + i] = static_cast<float>(rotation.imag());
      rotation *= unit;
    }
  }
}

}  // namespace kvstrata
