// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_coarse/softmax_ref.h"
#include "kernels/pages/dtype.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"

namespace kvstrata {

PackedRows PackedFormat(int32_t dim, int32_t keep, int32_t neighbours, bool truncate) {
  KVS_CHECK(neighbours == 1 || neighbours == 2 || neighbours == 4);
  PackedRows format;
  format.dim = dim;
  format.keep = keep;
  format.neighbours = neighbours;
  format.bits = (truncate ? dim - dim / 4 : dim) / neighbours;
  format.value_offset = (format.bits + 127) / 128 * 16;
  format.stride = format.value_offset + (2 * keep + 15) / 16 * 16;
  KVS_CHECK(keep >= 0 && keep % neighbours == 0 && keep <= format.bits * neighbours);
  return format;
}

namespace {

// The dense row of row `t`. Values that a damaged bitmap asks for beyond the last count as 0.
std::vector<double> Unpack(const PackedRows& rows, int32_t t) {
  const std::byte* row = rows.data + t * rows.stride;
  std::vector<double> dense(rows.dim, 0.0);
  int at = 0;
  for (int b = 0; b < rows.bits; ++b) {
    if ((std::to_integer<int>(row[b / 8]) >> (b % 8) & 1) == 0) continue;
    for (int c = b * rows.neighbours; c < (b + 1) * rows.neighbours; ++c, ++at) {
      BF16 value{};
      if (at < rows.keep) std::memcpy(&value, row + rows.value_offset + 2 * at, sizeof value);
      dense[c] = ToFloat(value);
    }
  }
  return dense;
}

double Dot(const float* q, const std::vector<double>& row) {
  double sum = 0;
  for (size_t c = 0; c < row.size(); ++c) sum += static_cast<double>(q[c]) * row[c];
  return sum;
}

std::vector<int32_t> RowsOf(const Run* runs, int count) {
  std::vector<int32_t> rows;
  for (int i = 0; i < count; ++i) {
    for (int32_t t = runs[i].begin; t < runs[i].end; ++t) rows.push_back(t);
  }
  return rows;
}

void AttendOne(const AttendPackedWork& w, const std::vector<std::vector<double>>& k,
               const std::vector<std::vector<double>>& v, const float* q, int64_t out) {
  const int dim = w.v.dim;
  std::vector<double> weights;
  for (const auto& row : k) weights.push_back(w.scale * Dot(q, row));
  const SoftmaxSums sums = WeighScores(weights);
  std::vector<double> rotated(dim, 0.0), o(dim, 0.0);
  for (size_t i = 0; i < v.size(); ++i) {
    for (int c = 0; c < dim; ++c) rotated[c] += weights[i] * v[i][c];
  }
  for (int j = 0; j < dim; ++j) {
    for (int c = 0; c < dim; ++c) o[c] += rotated[j] * w.r_v[int64_t{j} * dim + c];
  }
  w.m[out] = static_cast<float>(sums.m);
  w.l[out] = static_cast<float>(sums.l);
  for (int c = 0; c < dim; ++c) w.o[out * dim + c] = static_cast<float>(o[c]);
}

void Attend(const AttendPackedWork& w) {
  std::vector<std::vector<double>> k, v;
  for (int32_t t : RowsOf(w.runs, w.run_count)) {
    k.push_back(Unpack(w.k, t));
    v.push_back(Unpack(w.v, t));
  }
  for (int i = 0; i < w.queries; ++i) {
    for (int g = 0; g < w.group; ++g) {
      AttendOne(w, k, v, w.q + i * w.q_token + int64_t{g} * w.k.dim, int64_t{i} * w.group + g);
    }
  }
}

void Score(const ScorePackedWork& w) {
  for (int32_t u = w.units.begin; u < w.units.end; ++u) {
    const std::vector<double> row = Unpack(w.rows, u);
    double best = -std::numeric_limits<double>::infinity();
    for (int i = 0; i < w.queries; ++i) {
      const double score = w.scale * Dot(w.q + int64_t{i} * w.rows.dim, row);
      best = std::max(best, score);
      if (w.out_query != 0) {
        w.out[i * w.out_query + u - w.units.begin] = static_cast<float>(score);
      }
    }
    if (w.out_query == 0) w.out[u - w.units.begin] = static_cast<float>(best);
  }
}

void RotateRows(const RotateWork& w) {
  for (int i = 0; i < w.rows; ++i) {
    for (int c = 0; c < w.dim; ++c) {
      double sum = 0;
      for (int j = 0; j < w.dim; ++j) {
        const int64_t at = w.transposed ? int64_t{j} * w.dim + c : int64_t{c} * w.dim + j;
        sum += static_cast<double>(w.x[i * w.x_row + j]) * w.r[at];
      }
      w.out[int64_t{i} * w.dim + c] = static_cast<float>(sum);
    }
  }
}

}  // namespace

void AttendPackedRef(const AttendPackedWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { Attend(work[i]); });
}

void ScorePackedRef(const ScorePackedWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { Score(work[i]); });
}

void RotateRef(const RotateWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { RotateRows(work[i]); });
}

}  // namespace kvstrata
