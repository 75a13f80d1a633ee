// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

using Vector = std::vector<double>;

// A row before and after rotary embedding to `place`.
Vector Rotated(const Rotary& rotary, Vector row, int32_t place) {
  for (int32_t i = 0; i < rotary.pairs(); ++i) {
    const double angle = place * RotaryTable::Frequency(rotary, i);
    double& x = row[rotary.interleaved ? 2 * i : i];
    double& y = row[rotary.interleaved ? 2 * i + 1 : rotary.pairs() + i];
    std::tie(x, y) = std::pair(x * std::cos(angle) - y * std::sin(angle),
                               y * std::cos(angle) + x * std::sin(angle));
  }
  return row;
}

Vector QueryOf(const AttendWork& w, int token, int head) {
  const float* q = w.q + token * w.q_token + int64_t{head} * w.k.dim;
  Vector row(q, q + w.k.dim);
  return w.rotary == nullptr ? row
                             : Rotated(w.rotary->rotary(), std::move(row), w.query_place + token);
}

// A row of the work's runs.
struct KeyRow {
  int32_t position;
  Vector key;  // as attention uses it
};

template <typename T>
std::vector<KeyRow> KeysOfRuns(const AttendWork& w) {
  std::vector<KeyRow> rows;
  for (int i = 0; i < w.run_count; ++i) {
    for (int32_t t = w.runs[i].begin; t < w.runs[i].end; ++t) {
      const T* k = reinterpret_cast<const T*>(w.k.Row(t));
      Vector key(w.k.dim);
      for (size_t c = 0; c < key.size(); ++c) key[c] = ToFloat(k[c]);
      const auto rank = static_cast<int32_t>(rows.size());
      const int32_t place = w.row_place < 0 ? t : w.row_place + rank;
      if (w.rotary != nullptr) key = Rotated(w.rotary->rotary(), std::move(key), place);
      rows.push_back({t, std::move(key)});
    }
  }
  return rows;
}

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

template <typename T>
void AddRow(double weight, const std::byte* row, Vector& o) {
  const T* v = reinterpret_cast<const T*>(row);
  for (size_t c = 0; c < o.size(); ++c) o[c] += weight * ToFloat(v[c]);
}

// Attends the rows that the query sees, the first ones of `rows`.
template <typename T>
void AttendOne(const AttendWork& w, std::span<const KeyRow> rows, const Vector& q, int64_t out) {
  Vector scores;
  double m = -std::numeric_limits<double>::infinity();
  for (const KeyRow& row : rows) {
    scores.push_back(w.scale * Dot(q, row.key));
    m = std::max(m, scores.back());
  }
  const double shift = std::isinf(m) && m < 0 ? 0 : m;
  double l = 0;
  Vector o(w.v.dim, 0.0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double p = std::exp(scores[i] - shift);
    l += p;
    AddRow<T>(p, w.v.Row(rows[i].position), o);
  }
  w.m[out] = static_cast<float>(m);
  w.l[out] = static_cast<float>(l);
  for (int c = 0; c < w.v.dim; ++c) w.o[out * w.v.dim + c] = static_cast<float>(o[c]);
}

template <typename T>
void Attend(const AttendWork& w) {
  const std::vector<KeyRow> rows = KeysOfRuns<T>(w);
  for (int i = 0; i < w.queries; ++i) {
    size_t visible = 0;
    while (visible < rows.size() && rows[visible].position <= w.position + i) ++visible;
    for (int g = 0; g < w.group; ++g) {
      AttendOne<T>(w, std::span(rows).first(visible), QueryOf(w, i, g), int64_t{i} * w.group + g);
    }
  }
}

}  // namespace

void AttendRawRef(const AttendWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    KVS_CHECK(work[i].k.dtype == work[i].v.dtype && work[i].k.dim == work[i].v.dim);
    WithElement(work[i].k.dtype, [&]<typename T>() { Attend<T>(work[i]); });
  });
}

}  // namespace kvstrata
