// SPDX-License-Identifier: Apache-2.0
// Which instruction set the simd backend runs: our own run-time dispatch for Highway code.
//
// A *_simd.cc is compiled once per target by hwy/foreach_target.h. Highway's HWY_DYNAMIC_DISPATCH
// needs libhwy, which libkvstrata.so may not link; KVS_SIMD_TABLE and KVS_SIMD_CALL replace it.
// A *_simd.cc includes this header first: it also tells Highway which targets to build.
//
//   KVS_SIMD_TABLE(AttendItems)                       a table of HWY_NAMESPACE::AttendItems
//   KVS_SIMD_CALL(AttendItems)(work, n)               the one for CurrentSimdTarget()
//
// The target is the best one that this CPU runs, or KVSTRATA_SIMD from the environment (avx3, avx2,
// sse4, neon) where the CPU has it; an unknown or unavailable name is ignored. Results may differ
// in the last bits between targets, never between calls on one target. An x86 without SSE4.2 has no
// target and no simd backend (backend.h).
// Threads: any; ForceSimdTarget is for tests and must not race with ops. Cost: one atomic load.
#pragma once

// AVX3_DL adds nothing our ops use, SSSE3 nothing over SSE4 on any CPU that matters; each target
// costs compile time. SVE waits for a machine to test it on.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_AVX3_DL | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#if defined(__x86_64__)
// Without this, Highway adds a scalar target for CPUs that have none of ours.
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif
// Highway's debug assertions call hwy::Abort in libhwy.
#define HWY_IS_DEBUG_BUILD 0
// Our ops use neither, and virtual machines hide them.
#define HWY_DISABLE_PCLMUL_AES 1

#include <span>
#include <string_view>

namespace kvstrata {

// Table order, best first.
enum class SimdTarget : int { kAvx3 = 0, kAvx2 = 1, kSse4 = 2, kNeon = 3 };

std::string_view NameOf(SimdTarget target);

// Compiled in and runnable on this CPU, best first; may be empty.
std::span<const SimdTarget> AvailableSimdTargets();

// REQUIRES: AvailableSimdTargets() is not empty.
SimdTarget CurrentSimdTarget();

// Tests hold every target to ref with this. REQUIRES: target is available, no op is running.
void ForceSimdTarget(SimdTarget target);

}  // namespace kvstrata

// HWY_CHOOSE_* give a null pointer for a target that is not compiled; it is never available.
#define KVS_SIMD_TABLE(FN)                                            \
  static constexpr decltype(&HWY_STATIC_DISPATCH(FN)) FN##Table[] = { \
      HWY_CHOOSE_AVX3(FN), HWY_CHOOSE_AVX2(FN), HWY_CHOOSE_SSE4(FN), HWY_CHOOSE_NEON(FN)}
#define KVS_SIMD_CALL(FN) (*FN##Table[static_cast<int>(::kvstrata::CurrentSimdTarget())])
