// SPDX-License-Identifier: Apache-2.0
// What the backends of Jacobi's method share: one rotation's angle, and how results are written.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/ops/eigen/eigen.h"

namespace kvstrata {

inline constexpr int kJacobiSweepsMax = 40;  // it takes 6 to 10; NaNs must end too

// Elements off the diagonal smaller than this share of the matrix's largest are left alone.
inline constexpr double kJacobiDone = 0x1p-60;

// Rotates (x_p, x_q) into (c x_p - s x_q, s x_p + c x_q); t = s / c.
struct JacobiAngle {
  double c = 1, s = 0, t = 0;
};

// The smaller angle that makes the element pq of a symmetric matrix zero.
inline JacobiAngle AngleFor(double pp, double pq, double qq) {
  const double theta = (qq - pp) / (2 * pq);
  // 1 / theta where theta^2 would overflow is what this gives anyway: t = 0 then.
  const double t = std::copysign(1.0, theta) / (std::fabs(theta) + std::sqrt(1 + theta * theta));
  const double c = 1 / std::sqrt(1 + t * t);
  return {c, t * c, t};
}

// Sorts, fixes signs and rounds: eigenvector i is rows[i * stride + c], its value values[i].
void WriteEigen(const EigenWork& work, const double* values, const double* rows, int64_t stride);

}  // namespace kvstrata
