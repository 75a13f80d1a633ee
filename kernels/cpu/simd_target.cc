// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#include <array>
#include <atomic>
#include <cstdlib>

#include "base/check.h"
#include "hwy/detect_targets.h"
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace kvstrata {
namespace {

#if HWY_ARCH_X86
// clang's __builtin_cpu_supports does not know "f16c".
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool Runs(SimdTarget target) {
#if HWY_ARCH_X86
  __builtin_cpu_init();
  const bool sse4 = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("sse4.2");
  const bool avx2 = sse4 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && HasF16c();
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  switch (target) {
    case SimdTarget::kAvx3:
      return (HWY_TARGETS & HWY_AVX3) != 0 && avx3;
    case SimdTarget::kAvx2:
      return (HWY_TARGETS & HWY_AVX2) != 0 && avx2;
    case SimdTarget::kSse4:
      return (HWY_TARGETS & HWY_SSE4) != 0 && sse4;
    case SimdTarget::kNeon:
      return false;
  }
  return false;
#else
  return target == SimdTarget::kNeon && (HWY_TARGETS & HWY_NEON) != 0;
#endif
}

struct Available {
  std::array<SimdTarget, 4> targets{};
  size_t count = 0;

  Available() {
    for (int i = 0; i < 4; ++i) {
      if (Runs(static_cast<SimdTarget>(i))) targets[count++] = static_cast<SimdTarget>(i);
    }
  }
};

const Available& AvailableOnce() {
  static const Available available;
  return available;
}

SimdTarget FirstChoice() {
  KVS_CHECK(!AvailableSimdTargets().empty());
  const char* wanted = std::getenv("KVSTRATA_SIMD");
  for (SimdTarget target : AvailableSimdTargets()) {
    if (wanted != nullptr && NameOf(target) == wanted) return target;
  }
  return AvailableSimdTargets().front();
}

std::atomic<SimdTarget>& Current() {
  static std::atomic<SimdTarget> current{FirstChoice()};
  return current;
}

}  // namespace

std::string_view NameOf(SimdTarget target) {
  switch (target) {
    case SimdTarget::kAvx3:
      return "avx3";
    case SimdTarget::kAvx2:
      return "avx2";
    case SimdTarget::kSse4:
      return "sse4";
    case SimdTarget::kNeon:
      return "neon";
  }
  return "unknown";
}

std::span<const SimdTarget> AvailableSimdTargets() {
  return {AvailableOnce().targets.data(), AvailableOnce().count};
}

SimdTarget CurrentSimdTarget() { return Current().load(std::memory_order_relaxed); }

void ForceSimdTarget(SimdTarget target) {
  KVS_CHECK(Runs(target));
  Current().store(target, std::memory_order_relaxed);
}

}  // namespace kvstrata
