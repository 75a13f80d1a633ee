#include "kernels/ops/attend_lowrank/attend_lowrank.h"

namespace kvstrata {

void AttendLowRankSimd(const AttendLowRankWork* work, int64_t n, Executor& executor) {
  AttendLowRankRef(work, n, executor);
}

}  // namespace kvstrata
