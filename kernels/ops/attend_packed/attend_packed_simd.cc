#include "kernels/ops/attend_packed/attend_packed.h"

namespace kvstrata {

void AttendPackedSimd(const AttendPackedWork* work, int64_t n, Executor& executor) {
  AttendPackedRef(work, n, executor);
}
void ScorePackedSimd(const ScorePackedWork* work, int64_t n, Executor& executor) {
  ScorePackedRef(work, n, executor);
}
void RotateSimd(const RotateWork* work, int64_t n, Executor& executor) {
  RotateRef(work, n, executor);
}

}  // namespace kvstrata
