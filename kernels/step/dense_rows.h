// SPDX-License-Identifier: Apache-2.0
// Rows of any dtype and stride to and from the dense fp32 rows that the ops read and write. Private
// to kernels/step. Threads: pure functions; any. Objects: one call at a time.
#pragma once

#include <vector>

#include "kernels/cpu/executor.h"
#include "kernels/pages/element.h"
#include "kernels/step/step_batch.h"

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

inline void LoadDense(DType dtype, const std::byte* from, int32_t n, float* to) {
  WithElement(dtype, [&]<typename T>() { LoadRow<T>(from, n, to); });
}

inline void StoreDense(DType dtype, const float* from, int32_t n, std::byte* to) {
  WithElement(dtype, [&]<typename T>() { StoreRow<T>(from, n, to); });
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

// Keeps n floats or more: what was there need not be kept, nor cleared.
inline float* ReserveFloats(std::vector<float>* scratch, int64_t n) {
  if (static_cast<int64_t>(scratch->size()) < n) scratch->resize(static_cast<size_t>(n));
  return scratch->data();
}

// Queries of a batch [tokens][heads][dim] as fp32.
class DenseQueries {
 public:
  DenseQueries(const Geometry& geometry, Executor& executor)
      : heads_(geometry.query_heads), dim_(geometry.head_dim), executor_(executor) {}

  struct Answer {
    const float* data;
    int64_t token;  // floats from a token to the next; its heads lie side by side
  };
  // `count` tokens from `first` on: where they are if the ops can use them there, else a copy, good
  // until the next call.
  Answer Of(const Rows& q, int32_t first, int32_t count) {
    constexpr int64_t kFloat = sizeof(float);
    const std::byte* const data = q.data + first * q.token_stride;
    if (IsDense(q.dtype, data, q.token_stride, q.head_stride, dim_)) {
      return {reinterpret_cast<const float*>(data), q.token_stride / kFloat};
    }
    const int64_t token = int64_t{heads_} * dim_;
    float* const copy = ReserveFloats(&copy_, count * token);
    ForRows(executor_, count, heads_, [&](int64_t t) {
      for (int32_t h = 0; h < heads_; ++h) {
        LoadDense(q.dtype, data + t * q.token_stride + h * q.head_stride, dim_,
                  copy + t * token + int64_t{h} * dim_);
      }
    });
    return {copy, token};
  }

 private:
  const int32_t heads_, dim_;
  Executor& executor_;
  std::vector<float> copy_;
};

// Outputs of a batch, which ops write as fp32.
class DenseOutputs {
 public:
  DenseOutputs(const Geometry& geometry, Executor& executor)
      : heads_(geometry.query_heads), dim_(geometry.head_dim), executor_(executor) {}

  struct Answer {
    float* data;
    int64_t token;
    bool in_place;
  };
  // Where `tokens` outputs are to be written: `out` itself, or memory that Store converts from.
  Answer For(const MutableRows& out, int32_t tokens) {
    if (IsDense(out.dtype, out.data, out.token_stride, out.head_stride, dim_)) {
      return {reinterpret_cast<float*>(out.data),
              out.token_stride / static_cast<int64_t>(sizeof(float)), true};
    }
    const int64_t token = int64_t{heads_} * dim_;
    return {ReserveFloats(&copy_, tokens * token), token, false};
  }
  void Store(const Answer& from, int32_t tokens, const MutableRows& out) {
    ForRows(executor_, tokens, heads_, [&](int64_t t) {
      for (int32_t h = 0; h < heads_; ++h) {
        StoreDense(out.dtype, from.data + t * from.token + int64_t{h} * dim_, dim_,
                   out.data + t * out.token_stride + h * out.head_stride);
      }
    });
  }

 private:
  const int32_t heads_, dim_;
  Executor& executor_;
  std::vector<float> copy_;
};

}  // namespace kvstrata
