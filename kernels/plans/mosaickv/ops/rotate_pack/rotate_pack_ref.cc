// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/pages/element.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack.h"

namespace kvstrata {
namespace {

template <typename T>
std::vector<float> Rotated(const RotatePackWork& w, int32_t t) {
  const T* x = reinterpret_cast<const T*>(w.rows.Row(t));
  std::vector<float> out(w.rows.dim);
  for (int i = 0; i < w.rows.dim; ++i) {
    double sum = 0;
    for (int c = 0; c < w.rows.dim; ++c) {
      sum += static_cast<double>(w.r[int64_t{i} * w.rows.dim + c]) * ToFloat(x[c]);
    }
    out[i] = static_cast<float>(sum);
  }
  return out;
}

// The L1 norm of each group as its bits: they order as the norms do, and NaNs too have a place.
std::vector<uint32_t> NormBits(const float* x, const PackedRows& f) {
  std::vector<uint32_t> norms(f.bits);
  for (int b = 0; b < f.bits; ++b) {
    float norm = std::fabs(x[b * f.neighbours]);
    for (int i = 1; i < f.neighbours; ++i) norm += std::fabs(x[b * f.neighbours + i]);
    norms[b] = std::bit_cast<uint32_t>(norm) & 0x7FFFFFFFu;
  }
  return norms;
}

// Groups to keep, ascending.
std::vector<int> Choose(const float* x, const PackedRows& f) {
  const std::vector<uint32_t> norms = NormBits(x, f);
  std::vector<int> order(f.bits);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return norms[a] > norms[b]; });
  order.resize(f.keep / f.neighbours);
  std::sort(order.begin(), order.end());
  return order;
}

// Returns the sum of the squares of what is kept.
double Pack(const float* x, const PackedRows& f, std::byte* out) {
  std::memset(out, 0, static_cast<size_t>(f.stride));
  std::byte* values = out + f.value_offset;
  double kept = 0;
  for (int b : Choose(x, f)) {
    out[b / 8] |= std::byte{1} << (b % 8);
    for (int c = b * f.neighbours; c < (b + 1) * f.neighbours; ++c) {
      const uint16_t bits = FromFloat<BF16>(x[c]).bits;
      *values++ = static_cast<std::byte>(bits & 0xFF);
      *values++ = static_cast<std::byte>(bits >> 8);
      kept += static_cast<double>(x[c]) * x[c];
    }
  }
  return kept;
}

template <typename T>
void PackRows(const RotatePackWork& w) {
  double energy = 0, kept = 0, error = 0;
  for (int32_t t = w.run.begin; t < w.run.end; ++t) {
    const std::vector<float> x = Rotated<T>(w, t);
    double all = 0;
    for (float value : x) all += static_cast<double>(value) * value;
    const double row = Pack(x.data(), w.format, w.out + (t - w.run.begin) * w.format.stride);
    energy += all;
    kept += row;
    if (all != 0) error += std::sqrt(std::max(0.0, 1 - row / all));
  }
  if (w.energy != nullptr) *w.energy = energy;
  if (w.kept != nullptr) *w.kept = kept;
  if (w.relative_error != nullptr) *w.relative_error = error;
}

template <typename T>
void PackBlocks(const RotatePackWork& w) {
  std::byte* out = w.out;
  for (int32_t t = w.run.begin; t < w.run.end; t += w.block, out += w.format.stride) {
    const int32_t end = std::min(t + w.block, w.run.end);
    std::vector<float> mean(w.rows.dim, 0.0f);  // fp32 and in order: part of the contract
    for (int32_t i = t; i < end; ++i) {
      const std::vector<float> x = Rotated<T>(w, i);
      for (int c = 0; c < w.rows.dim; ++c) mean[c] += x[c];
    }
    for (float& value : mean) value /= static_cast<float>(end - t);
    Pack(mean.data(), w.format, out);
  }
}

template <typename T>
void RotatePack(const RotatePackWork& w) {
  return w.block > 0 ? PackBlocks<T>(w) : PackRows<T>(w);
}

}  // namespace

void RotatePackRef(const RotatePackWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    const PackedRows& f = work[i].format;
    KVS_CHECK(f.dim == work[i].rows.dim && f.bits * f.neighbours <= f.dim);
    KVS_CHECK(f.keep % f.neighbours == 0 && f.keep <= f.bits * f.neighbours);
    WithElement(work[i].rows.dtype, [&]<typename T>() { RotatePack<T>(work[i]); });
  });
}

}  // namespace kvstrata
