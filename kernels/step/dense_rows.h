// Rows of any dtype and stride to and from the dense fp32 rows that the ops read and write. Private
// to kernels/step. Threads: pure functions; any.
#ifndef KVSTRATA_KERNELS_STEP_DENSE_ROWS_H_
#define KVSTRATA_KERNELS_STEP_DENSE_ROWS_H_

#include "kernels/dtype.h"
#include "kernels/executor.h"

namespace kvstrata {

// Rows [tokens x heads] from which on converting is worth a ParallelFor.
inline constexpr int64_t kParallelRows = 512;

template <typename T>
void LoadRow(const std::byte* from, int32_t n, float* to) {
  const T* row = reinterpret_cast<const T*>(from);
  for (int32_t i = 0; i < n; ++i) to[i] = ToFloat(row[i]);
}

template <typename T>
void StoreRow(const float* from, int32_t n, std::byte* to) {
  T* row = reinterpret_cast<T*>(to);
  for (int32_t i = 0; i < n; ++i) row[i] = FromFloat<T>(from[i]);
}

inline void Load(DType dtype, const std::byte* from, int32_t n, float* to) {
  switch (dtype) {
    case DType::kF32:
      return LoadRow<float>(from, n, to);
    case DType::kF16:
      return LoadRow<F16>(from, n, to);
    case DType::kBF16:
      return LoadRow<BF16>(from, n, to);
  }
}

inline void Store(DType dtype, const float* from, int32_t n, std::byte* to) {
  switch (dtype) {
    case DType::kF32:
      return StoreRow<float>(from, n, to);
    case DType::kF16:
      return StoreRow<F16>(from, n, to);
    case DType::kBF16:
      return StoreRow<BF16>(from, n, to);
  }
}

// Whether the ops can use the rows where they are: fp32 with the heads of a token side by side.
inline bool IsDense(DType dtype, const std::byte* data, int64_t token_stride, int64_t head_stride,
                    int32_t dim) {
  constexpr int64_t kFloat = sizeof(float);
  return dtype == DType::kF32 && head_stride == dim * kFloat && token_stride % kFloat == 0 &&
         reinterpret_cast<uintptr_t>(data) % alignof(float) == 0;
}

template <typename Fn>
void ForRows(Executor& executor, int64_t tokens, int32_t heads, const Fn& fn) {
  if (tokens * heads >= kParallelRows) {
    executor.ParallelFor(tokens, [&fn](int64_t t) { fn(t); });
  } else {
    for (int64_t t = 0; t < tokens; ++t) fn(t);
  }
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_DENSE_ROWS_H_
