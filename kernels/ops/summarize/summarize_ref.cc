// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "kernels/ops/summarize/summarize.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

template <typename T>
void MinMax(const SummarizeWork& w) {
  T* low = reinterpret_cast<T*>(w.out);
  T* high = reinterpret_cast<T*>(w.out2);
  for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
    const T* k = reinterpret_cast<const T*>(w.keys.Row(t));
    for (int c = 0; c < w.keys.dim; ++c) {
      if (t == w.rows.begin || ToFloat(k[c]) < ToFloat(low[c])) low[c] = k[c];
      if (t == w.rows.begin || ToFloat(k[c]) > ToFloat(high[c])) high[c] = k[c];
    }
  }
}

template <typename T>
void Mean(const SummarizeWork& w) {
  std::vector<float> sum(w.keys.dim, 0.0f);  // fp32 and in order: part of the contract
  for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
    const T* k = reinterpret_cast<const T*>(w.keys.Row(t));
    for (int c = 0; c < w.keys.dim; ++c) sum[c] += ToFloat(k[c]);
  }
  const auto count = static_cast<float>(w.rows.end - w.rows.begin);
  for (int c = 0; c < w.keys.dim; ++c) {
    const float mean = sum[c] / count;
    if (w.out_dtype == DType::kF32) {
      reinterpret_cast<float*>(w.out)[c] = mean;
    } else {
      reinterpret_cast<BF16*>(w.out)[c] = FromFloat<BF16>(mean);
    }
  }
}

template <typename T>
void Deviation(const SummarizeWork& w) {
  const auto count = static_cast<float>(w.rows.end - w.rows.begin);
  for (int c = 0; c < w.keys.dim; ++c) {
    const auto key = [&w, c](int32_t t) {
      return ToFloat(reinterpret_cast<const T*>(w.keys.Row(t))[c]);
    };
    float sum = 0, squares = 0;
    for (int32_t t = w.rows.begin; t < w.rows.end; ++t) sum += key(t);
    const float mean = sum / count;
    for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
      const float x = key(t) - mean;
      squares += x * x;
    }
    reinterpret_cast<T*>(w.out)[c] = FromFloat<T>(mean);
    reinterpret_cast<T*>(w.out2)[c] = VarianceOf<T>(squares / count);
  }
}

template <typename T>
void Summarize(const SummarizeWork& w) {
  switch (w.kind) {
    case SummarizeWork::Kind::kMinMax:
      return MinMax<T>(w);
    case SummarizeWork::Kind::kDeviation:
      return Deviation<T>(w);
    case SummarizeWork::Kind::kMean:
      return Mean<T>(w);
  }
}

}  // namespace

void SummarizeRef(const SummarizeWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    WithElement(work[i].keys.dtype, [&]<typename T>() { Summarize<T>(work[i]); });
  });
}

}  // namespace kvstrata
