// SPDX-License-Identifier: Apache-2.0
// The network of SeKV's trained parameters that says which components of a span's factors stay
// (docs/spec/sekv.md 4), and what it is bound to say before the factors are there. Private to
// sekv.
//
// Threads: pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/plans/sekv/span_parameters.h"

namespace kvstrata {

inline constexpr double kGateFloor = 0.05;  // components below it are dropped

// Gates of a spectrum (descending, at most r_max values): sigmoid(MLP([s / s_1, 0..; k / |k|])),
// the unit of 0 being 0. All 1 where `parameters` is null.
std::vector<double> SpanGates(std::span<const float> spectrum, std::span<const BF16> k_mean,
                              const SpanParameters* parameters);

// How many of `rank` components SpanGates puts at kGateFloor or above whatever spectrum of finite
// values it is given, the first one counted always: at least so many are kept. All of them where
// `parameters` is null. Cost: two thirds more than SpanGates.
int32_t SurelyKept(int32_t rank, std::span<const BF16> k_mean, const SpanParameters* parameters);

}  // namespace kvstrata
