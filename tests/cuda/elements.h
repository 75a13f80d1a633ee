// SPDX-License-Identifier: Apache-2.0
// Elements of the rows' dtypes for GPU tests: drawn, stored, read back.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/pages/dtype.h"

namespace kvstrata::cuda {

using Rng = std::mt19937_64;

inline float Normal(Rng& rng) {
  thread_local std::normal_distribution<float> normal;
  return normal(rng);
}
inline int Below(Rng& rng, int n) { return static_cast<int>(rng() % static_cast<uint64_t>(n)); }

inline void StoreFloat(std::byte* at, DType dtype, float x) {
  if (dtype == DType::kF32) std::memcpy(at, &x, sizeof(x));
  if (dtype == DType::kF16) *reinterpret_cast<F16*>(at) = FromFloat<F16>(x);
  if (dtype == DType::kBF16) *reinterpret_cast<BF16*>(at) = FromFloat<BF16>(x);
}
inline float LoadFloat(const std::byte* at, DType dtype) {
  if (dtype == DType::kF32) return *reinterpret_cast<const float*>(at);
  return dtype == DType::kF16 ? ToFloat(*reinterpret_cast<const F16*>(at))
                              : ToFloat(*reinterpret_cast<const BF16*>(at));
}

// What was rounded to `dtype` on the way to the device, for a reference that takes floats.
inline float RoundedTo(DType dtype, float x) {
  if (dtype == DType::kF16) return ToFloat(FromFloat<F16>(x));
  return dtype == DType::kBF16 ? ToFloat(FromFloat<BF16>(x)) : x;
}

inline std::vector<std::byte> Encoded(const std::vector<float>& values, DType dtype) {
  const auto size = static_cast<size_t>(SizeOf(dtype));
  std::vector<std::byte> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) StoreFloat(&bytes[i * size], dtype, values[i]);
  return bytes;
}
inline std::vector<float> Floats(DType dtype, const std::vector<std::byte>& bytes) {
  const auto size = static_cast<size_t>(SizeOf(dtype));
  std::vector<float> out(bytes.size() / size);
  for (size_t i = 0; i < out.size(); ++i) out[i] = LoadFloat(&bytes[i * size], dtype);
  return out;
}
// `count` elements, random normal.
inline std::vector<std::byte> RandomElements(Rng& rng, DType dtype, size_t count) {
  std::vector<float> values(count);
  for (float& x : values) x = Normal(rng);
  return Encoded(values, dtype);
}

}  // namespace kvstrata::cuda
