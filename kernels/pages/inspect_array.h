// SPDX-License-Identifier: Apache-2.0
// InspectArray from the arrays of a selector or a codec. Private to selectors and
// codecs. Row-major values of `shape`, copied; without a shape: one dimension.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace kvstrata {

// An intermediate array, for kvs_inspect and the vectors. Names are tests/golden/README.md's
// without "PLAN.".
struct InspectArray {
  enum class Type : uint8_t { kF32 = 1, kU16 = 2, kI32 = 3, kU8 = 4 };
  Type type = Type::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

template <typename T>
InspectArray ArrayOf(InspectArray::Type type, std::vector<int64_t> shape,
                     const std::vector<T>& values) {
  InspectArray array;
  array.type = type;
  array.shape = std::move(shape);
  array.bytes.resize(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(array.bytes.data(), values.data(), array.bytes.size());
  return array;
}

template <typename T>
InspectArray ArrayOf(InspectArray::Type type, const std::vector<T>& values) {
  return ArrayOf(type, {static_cast<int64_t>(values.size())}, values);
}

}  // namespace kvstrata
