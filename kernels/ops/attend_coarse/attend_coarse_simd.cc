#include "kernels/ops/attend_coarse/attend_coarse.h"

namespace kvstrata {

void AttendCoarseSimd(const AttendCoarseWork* work, int64_t n, Executor& executor) {
  AttendCoarseRef(work, n, executor);
}

}  // namespace kvstrata
