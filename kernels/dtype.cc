// SPDX-License-Identifier: Apache-2.0
#include "kernels/dtype.h"

namespace kvstrata {

float LargestOf(DType t) {
  if (t == DType::kF16) return ToFloat(F16{kNotFinite<F16> - 1});
  if (t == DType::kBF16) return ToFloat(BF16{kNotFinite<BF16> - 1});
  return std::bit_cast<float>(kNotFinite<float> - 1);
}

std::string AllDTypes(std::string_view prefix) {
  std::string all;
  for (int v = 1; IsDType(v); ++v) {
    if (v > 1) all += ", ";
    all += prefix;
    all += '_';
    for (const char c : NameOf(static_cast<DType>(v))) {
      all += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    }
    all += " (" + std::to_string(v) + ")";
  }
  return all;
}

}  // namespace kvstrata
