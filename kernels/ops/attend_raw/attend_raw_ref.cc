#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_raw/attend_raw.h"

namespace kvstrata {
namespace {

template <typename T>
double Dot(const float* q, const std::byte* row, int dim) {
  const T* k = reinterpret_cast<const T*>(row);
  double sum = 0;
  for (int c = 0; c < dim; ++c) sum += static_cast<double>(q[c]) * ToFloat(k[c]);
  return sum;
}

template <typename T>
void AddRow(double weight, const std::byte* row, std::vector<double>& o) {
  const T* v = reinterpret_cast<const T*>(row);
  for (size_t c = 0; c < o.size(); ++c) o[c] += weight * ToFloat(v[c]);
}

// The positions of the work's rows that a query token at `position` sees.
std::vector<int32_t> VisibleRows(const AttendWork& w, int32_t position) {
  std::vector<int32_t> rows;
  for (int i = 0; i < w.run_count; ++i) {
    for (int32_t t = w.runs[i].begin; t < w.runs[i].end && t <= position; ++t) rows.push_back(t);
  }
  return rows;
}

template <typename T>
void AttendOne(const AttendWork& w, const std::vector<int32_t>& rows, const float* q, int64_t out) {
  std::vector<double> scores;
  double m = -std::numeric_limits<double>::infinity();
  for (int32_t t : rows) {
    scores.push_back(w.scale * Dot<T>(q, w.k.Row(t), w.k.dim));
    m = std::max(m, scores.back());
  }
  const double shift = std::isinf(m) && m < 0 ? 0 : m;
  double l = 0;
  std::vector<double> o(w.v.dim, 0.0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double p = std::exp(scores[i] - shift);
    l += p;
    AddRow<T>(p, w.v.Row(rows[i]), o);
  }
  w.m[out] = static_cast<float>(m);
  w.l[out] = static_cast<float>(l);
  for (int c = 0; c < w.v.dim; ++c) w.o[out * w.v.dim + c] = static_cast<float>(o[c]);
}

template <typename T>
void Attend(const AttendWork& w) {
  for (int i = 0; i < w.queries; ++i) {
    const std::vector<int32_t> rows = VisibleRows(w, w.position + i);
    for (int g = 0; g < w.group; ++g) {
      AttendOne<T>(w, rows, w.q + i * w.q_token + int64_t{g} * w.k.dim, int64_t{i} * w.group + g);
    }
  }
}

}  // namespace

void AttendRawRef(const AttendWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    KVS_CHECK(work[i].k.dtype == work[i].v.dtype && work[i].k.dim == work[i].v.dim);
    switch (work[i].k.dtype) {
      case DType::kF32:
        return Attend<float>(work[i]);
      case DType::kF16:
        return Attend<F16>(work[i]);
      case DType::kBF16:
        return Attend<BF16>(work[i]);
    }
  });
}

}  // namespace kvstrata
