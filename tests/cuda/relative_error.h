// The norm of a difference over the norm of what it should be; NaN never passes a comparison.
#ifndef KVSTRATA_TESTS_CUDA_RELATIVE_ERROR_H_
#define KVSTRATA_TESTS_CUDA_RELATIVE_ERROR_H_

#include <cmath>
#include <cstdint>

namespace kvstrata::cuda {

// got, want [n]. 0 for n = 0.
inline double RelativeError(const float* got, const float* want, int64_t n) {
  double off = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    off += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return n == 0 ? 0 : std::sqrt(off) / std::sqrt(norm);
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_RELATIVE_ERROR_H_
