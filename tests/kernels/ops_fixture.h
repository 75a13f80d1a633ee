// SPDX-License-Identifier: Apache-2.0
// What the op suites share: a fresh seed each run (printed on failure), paged rows with random
// content, and the simd backend's targets as test parameters.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/executor.h"
#include "kernels/cpu/simd_target.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Random numbers of one test; KVS_TEST_SEED repeats a run.
class Random {
 public:
  Random() {
    const char* fixed = std::getenv("KVS_TEST_SEED");
    seed_ = fixed != nullptr ? static_cast<uint32_t>(std::stoul(fixed)) : std::random_device()();
    engine_.seed(seed_);
    ::testing::Test::RecordProperty("seed", std::to_string(seed_));
  }
  std::string Trace() const { return "KVS_TEST_SEED=" + std::to_string(seed_); }
  float Normal() { return normal_(engine_); }
  int Below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(engine_); }

 private:
  uint32_t seed_;
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

inline void StoreAs(DType t, std::byte* p, float x) {
  if (t == DType::kF32) {
    std::memcpy(p, &x, 4);
  } else {
    const uint16_t bits = t == DType::kF16 ? FromFloat<F16>(x).bits : FromFloat<BF16>(x).bits;
    std::memcpy(p, &bits, 2);
  }
}

inline float LoadAs(DType t, const std::byte* p) {
  if (t == DType::kF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return t == DType::kF16 ? ToFloat(F16{bits}) : ToFloat(BF16{bits});
}

// Rows of one head, scattered over pages in random order; between rows lies padding of NaN.
struct PagedFixture {
  std::vector<std::byte> memory;
  std::vector<std::byte*> pages;
  PagedRows rows;

  PagedFixture(Random& random, DType dtype, int tokens, int page_tokens, int dim, int padding = 0) {
    const int64_t stride = (dim + padding) * SizeOf(dtype);
    const int64_t offset = 64, page_bytes = offset + page_tokens * stride;
    const int count = (tokens + page_tokens - 1) / page_tokens;
    memory.resize(static_cast<size_t>(count * page_bytes));
    for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      StoreAs(dtype, &memory[i], kNaN);
    }
    for (int i = 0; i < count; ++i) pages.push_back(memory.data() + i * page_bytes);
    for (int i = count - 1; i > 0; --i) std::swap(pages[i], pages[random.Below(i + 1)]);
    rows = {pages.data(), offset, stride, page_tokens, dim, dtype};
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < dim; ++c) Set(t, c, random.Normal());
    }
  }
  PagedFixture(const PagedFixture&) = delete;

  void Set(int t, int c, float x) { StoreAs(rows.dtype, rows.Row(t) + c * SizeOf(rows.dtype), x); }
  float Get(int t, int c) const { return LoadAs(rows.dtype, rows.Row(t) + c * SizeOf(rows.dtype)); }
};

inline std::vector<float> NormalFloats(Random& random, size_t n) {
  std::vector<float> x(n);
  for (float& value : x) value = random.Normal();
  return x;
}

// |a - b| / |b|, and infinity where one has a NaN.
inline double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return kInf;
    if (a[i] == b[i]) continue;  // infinities
    error += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  }
  for (float x : b) {
    if (std::isfinite(x)) size += static_cast<double>(x) * x;
  }
  return error == 0 ? 0 : std::sqrt(error / size);
}

// A suite that runs once for each instruction set that this CPU has.
class SimdTest : public ::testing::TestWithParam<SimdTarget> {
 protected:
  void SetUp() override {
    before_ = CurrentSimdTarget();
    ForceSimdTarget(GetParam());
  }
  void TearDown() override { ForceSimdTarget(before_); }

  Random random_;

 private:
  SimdTarget before_;
};

#define KVS_INSTANTIATE_SIMD(SUITE)                                                      \
  INSTANTIATE_TEST_SUITE_P(                                                              \
      Targets, SUITE,                                                                    \
      ::testing::ValuesIn(AvailableSimdTargets().begin(), AvailableSimdTargets().end()), \
      [](const ::testing::TestParamInfo<SimdTarget>& target) {                           \
        return std::string(NameOf(target.param));                                        \
      })

inline constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
inline constexpr int kDims[] = {64, 128, 256};

}  // namespace kvstrata
