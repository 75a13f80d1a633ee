// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"
#include "kernels/ops/pick/pick.h"

namespace kvstrata {
namespace {

using Vector = std::vector<double>;
constexpr double kNone = -std::numeric_limits<double>::infinity();

// ln of the sum of exp of numbers; one that is NaN makes it NaN.
double LogSum(const Vector& numbers) {
  double top = kNone;
  for (double x : numbers) top = std::max(top, x);
  const double shift = std::isinf(top) ? 0 : top;
  double sum = 0;
  for (double x : numbers) sum += std::exp(x - shift);
  return shift + std::log(sum);
}

// One work item's attention, in the order of the page's rules.
class Attention {
 public:
  explicit Attention(const AttendPlanesWork& work)
      : w_(work), start_(CandidatesOf(work).start), stop_(CandidatesOf(work).stop) {}
  Attention(const Attention&) = delete;

  void Run() {
    FindCoarseLogits();
    FindVariances();
    std::fill_n(w_.fine, w_.rows.tokens(), uint8_t{1});
    std::fill_n(w_.strips, w_.rows.strips(), uint8_t{1});
    if (start_ < stop_) Choose();
    for (int32_t row = 0; row < w_.queries * w_.group; ++row) Attend(row);
  }

 private:
  // A token's key or rotated value, by its first `planes` planes.
  Vector RowOf(PlanesSide side, int32_t token, int planes) const {
    const PlanesFormat& f = w_.rows.format;
    const int32_t group = token / f.tokens;
    Vector row;
    for (int32_t c = 0; c < f.dim; ++c) {
      row.push_back(NumberAt<double>(f, w_.rows.upper[group], w_.rows.lower[group], planes,
                                     {side, token % f.tokens, c}));
    }
    return row;
  }

  // The logit of `key` for query row `row`, i * group + g.
  double Logit(int32_t row, const Vector& key) const {
    const float* q = w_.q + row / w_.group * w_.q_token + row % w_.group * w_.rows.format.dim;
    return w_.scale * std::inner_product(key.begin(), key.end(), q, 0.0);
  }

  // Fills coarse_[row][token] for all query rows.
  void FindCoarseLogits() {
    coarse_.resize(static_cast<size_t>(w_.queries * w_.group));
    for (int32_t t = 0; t < w_.rows.tokens(); ++t) {
      const Vector key = RowOf(PlanesSide::kKeys, t, 1);
      for (size_t row = 0; row < coarse_.size(); ++row) {
        coarse_[row].push_back(Logit(static_cast<int32_t>(row), key));
      }
    }
  }

  // Fills variances_[g][group] for the heads of the first query token, which choose.
  void FindVariances() {
    const PlanesFormat& f = w_.rows.format;
    for (int32_t g = 0; g < w_.group; ++g) {
      Vector& of_head = variances_.emplace_back();
      for (int32_t group = 0; group < w_.rows.groups; ++group) {
        double squares = 0;
        for (int32_t c = 0; c < f.dim; ++c) {
          F16 step;
          std::memcpy(&step, w_.rows.upper[group] + StepOffset(f, {PlanesSide::kKeys, 0, c}), 2);
          squares += std::pow(double{w_.scale} * w_.q[g * f.dim + c] * ToFloat(step), 2);
        }
        of_head.push_back(RoundingVariance(f) * squares);
      }
    }
  }
  // A token's score for head g (rule 2).
  double Score(int32_t g, int32_t t) const {
    return coarse_[g][t] + variances_[g][t / w_.rows.format.tokens] / 2;
  }

  bool IsCandidate(int32_t t) const { return t >= start_ && t < stop_; }

  // Rule 3: L_h of head g.
  double LogNormaliser(int32_t g) const {
    Vector terms = {w_.raw_m[g] + std::log(static_cast<double>(w_.raw_l[g]))}, sampled;
    const int32_t chosen = (w_.rule.sample - 1) / 2;
    for (int32_t t = start_; t < w_.rows.tokens(); ++t) {
      if (!IsCandidate(t)) {
        terms.push_back(Logit(g, RowOf(PlanesSide::kKeys, t, w_.rows.format.planes())));
      } else if (t / w_.rows.format.tokens % w_.rule.sample == chosen) {
        sampled.push_back(coarse_[g][t]);
      }
    }
    if (sampled.empty()) sampled.assign(&coarse_[g][start_], &coarse_[g][stop_ - 1] + 1);
    const double top = *std::ranges::max_element(sampled);
    double rest = -1;  // the largest counts once
    for (double s : sampled) rest += std::exp(s - top);
    const double ratio = static_cast<double>(stop_ - start_) / static_cast<double>(sampled.size());
    terms.push_back(top + std::log1p(std::max(rest, 0.0) * ratio));
    return LogSum(terms);
  }

  // The largest weight of a token, times N; NaN if a head's is.
  double LargestWeight(int32_t t, const Vector& normalisers) const {
    double largest = 0;
    for (int32_t g = 0; g < w_.group; ++g) {
      const double weight = std::exp(Score(g, t) - normalisers[g]) * w_.tokens;
      if (std::isnan(weight)) return weight;
      largest = std::max(largest, weight);
    }
    return largest;
  }

  // Rules 4 and 5.
  void Choose() {
    Vector normalisers;
    for (int32_t g = 0; g < w_.group; ++g) normalisers.push_back(LogNormaliser(g));
    if (w_.rule.fine_above > 0) {
      for (int32_t t = start_; t < stop_; ++t) w_.fine[t] = IsAbove(t, normalisers);
    } else {
      TakeShare();
    }
    for (int32_t strip = 0; strip < w_.rows.strips(); ++strip) {
      bool is_read = false;
      for (int32_t t = strip * kStripTokens; t < (strip + 1) * kStripTokens; ++t) {
        is_read |= w_.fine[t] != 0 || !(LargestWeight(t, normalisers) < w_.rule.skip_below);
      }
      w_.strips[strip] = is_read;
    }
  }
  bool IsAbove(int32_t t, const Vector& normalisers) const {
    for (int32_t g = 0; g < w_.group; ++g) {
      if (std::exp(Score(g, t) - normalisers[g]) * w_.tokens >= w_.rule.fine_above) return true;
    }
    return false;
  }

  void TakeShare() {
    const int32_t run = w_.rule.run, always = w_.tokens - (stop_ - start_);
    Vector masses((stop_ - start_) / run, 0.0);
    for (int32_t g = 0; g < w_.group; ++g) {
      Vector scores;
      for (int32_t t = start_; t < stop_; ++t) scores.push_back(Score(g, t));
      const double sum = LogSum(scores);
      for (size_t i = 0; i < scores.size(); ++i) masses[i / run] += std::exp(scores[i] - sum);
    }
    const std::vector<float> rounded(masses.begin(), masses.end());
    const std::vector<int32_t> order =
        RankedRef(rounded.data(), static_cast<int32_t>(rounded.size()));
    const size_t room = std::max(CeilShare(w_.rule.share, w_.tokens) - always, run) / run;
    for (size_t i = room; i < order.size(); ++i) {
      std::fill_n(w_.fine + start_ + order[i] * run, run, uint8_t{0});
    }
  }

  // Rule 6.
  void Attend(int32_t row) const {
    const PlanesFormat& f = w_.rows.format;
    Vector logits = coarse_[row], o(f.dim, 0.0);
    double m = kNone, l = 0;
    for (int32_t t = 0; t < w_.rows.tokens(); ++t) {
      if (w_.fine[t] != 0) logits[t] = Logit(row, RowOf(PlanesSide::kKeys, t, f.planes()));
      if (IsRead(t) && !(logits[t] <= m)) m = logits[t];
    }
    for (int32_t t = 0; t < w_.rows.tokens(); ++t) {
      if (!IsRead(t)) continue;
      const double weight = std::exp(logits[t] - m);
      const Vector value = RowOf(PlanesSide::kValues, t, w_.fine[t] != 0 ? f.planes() : 1);
      l += weight;
      for (int32_t c = 0; c < f.dim; ++c) o[c] += weight * value[c];
    }
    RotateHadamard(o.data(), f.dim);
    w_.m[row] = static_cast<float>(m);
    w_.l[row] = static_cast<float>(l);
    for (int32_t c = 0; c < f.dim; ++c) w_.o[int64_t{row} * f.dim + c] = static_cast<float>(o[c]);
  }
  bool IsRead(int32_t t) const { return w_.strips[t / kStripTokens] != 0; }

  const AttendPlanesWork& w_;
  const int32_t start_, stop_;     // range of the candidates
  std::vector<Vector> coarse_;     // [queries * group][tokens]
  std::vector<Vector> variances_;  // [group][groups]
};

}  // namespace

int64_t CountFlags(const uint8_t* flags, int64_t n) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    count += static_cast<int64_t>(eight * kOnes >> 56);
  }
  for (; i < n; ++i) count += flags[i];
  return count;
}

int64_t PlanesBytesRead(const PlanesRows& rows, const uint8_t* fine, const uint8_t* strips) {
  const PlanesFormat& f = rows.format;
  const int64_t strip_bytes = 4 * kStripTokens + int64_t{4} * f.dim;
  return rows.groups * f.value_minimum() +  // what lies before it is the keys'
         CountFlags(strips, rows.strips()) * strip_bytes +
         CountFlags(fine, rows.tokens()) * f.row_bytes();
}

PlanesCandidates CandidatesOf(const AttendPlanesWork& w) {
  const PlanesRule& rule = w.rule;
  const int32_t sealed = w.rows.tokens();
  const int32_t sinks = (rule.sinks + rule.run - 1) / rule.run * rule.run;
  const int32_t before_window = std::max(w.tokens - rule.recent, 0) / rule.run * rule.run;
  const int32_t start = std::min(sinks, sealed);
  return {start, std::max(start, std::min(before_window, sealed))};
}

void CheckPlanesWork(const AttendPlanesWork& w) {
  KVS_CHECK(w.rows.format.IsValid() && w.rule.run >= 1 && w.rows.format.tokens % w.rule.run == 0);
  KVS_CHECK(w.rule.sample >= 1 && w.rule.recent >= 1 && w.tokens > w.rows.tokens());
  KVS_CHECK(w.rule.run == 1 || w.rule.fine_above <= 0);
}

void AttendPlanesRef(const AttendPlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    CheckPlanesWork(work[i]);
    Attention(work[i]).Run();
  });
}

}  // namespace kvstrata
