// Numbers as an InspectArray. Private to kernels/codec.
#ifndef KVSTRATA_KERNELS_CODEC_INSPECT_ARRAY_H_
#define KVSTRATA_KERNELS_CODEC_INSPECT_ARRAY_H_

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

// Row-major values of `shape`.
template <typename T>
InspectArray MakeInspectArray(InspectArray::Type type, std::vector<int64_t> shape,
                              const std::vector<T>& values) {
  InspectArray array{type, std::move(shape), {}};
  array.bytes.resize(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(array.bytes.data(), values.data(), array.bytes.size());
  return array;
}

inline InspectArray FloatArray(std::vector<int64_t> shape, const std::vector<float>& values) {
  return MakeInspectArray(InspectArray::Type::kF32, std::move(shape), values);
}
inline InspectArray IntArray(std::vector<int64_t> shape, const std::vector<int32_t>& values) {
  return MakeInspectArray(InspectArray::Type::kI32, std::move(shape), values);
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_INSPECT_ARRAY_H_
