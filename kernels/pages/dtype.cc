// SPDX-License-Identifier: Apache-2.0
#include "kernels/pages/dtype.h"

namespace kvstrata {

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
