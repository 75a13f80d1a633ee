// SPDX-License-Identifier: Apache-2.0
// Groups go by one after the other: scored, decided, and attended while the next is scored, for
// which what is read of them was asked for. With `share`, and with a sample of everything, all
// logits are kept instead until all are there. Measured beside attend_raw over 32K tokens in one
// process, least times of a thread on a busy machine, where the rule reads 15.5 % of the
// bytes: 0.30 of its time with AVX-512 and VNNI, 0.38 with AVX2.
// In full no coarse logit is made; with AVX-512 it then takes 0.98 to 1.01 of that time.
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/attend_planes/attend_planes_simd.cc"
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/attend_planes/plane_keys-inl.h"
#include "kernels/ops/attend_planes/strip_values-inl.h"
#include "kernels/ops/pick/pick.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

// exp(x[i] - top) to `to`, and their sum. REQUIRES: no x is above top.
HWY_INLINE double WeightsOf(const float* x, int n, float top, float* to) {
  double sum = 0;
  int i = 0;
  const VF shift = hn::Set(DF(), top);
  while (i + kVector <= n) {
    VF part = hn::Zero(DF());  // so few that fp32 loses nothing that counts
    for (const int end = std::min(n - kVector, i + 63 * kVector); i <= end; i += kVector) {
      const VF weight = ExpNonPositive(hn::Sub(hn::LoadU(DF(), x + i), shift));
      hn::StoreU(weight, DF(), to + i);
      part = hn::Add(part, weight);
    }
    sum += hn::GetLane(hn::SumOfLanes(DF(), part));
  }
  for (; i < n; ++i) sum += to[i] = std::exp(x[i] - top);
  return sum;
}

// Rule 7, or a share of everything: all is fine whatever the logits are.
bool IsInFull(const AttendPlanesWork& work) {
  const PlanesCandidates range = CandidatesOf(work);
  return range.start == range.stop || (work.rule.share >= 1 && work.rule.fine_above <= 0);
}

// Coarse logits of a group's tokens, of head h and token t at [h * head + t], and what scores are
// above them.
struct Logits {
  float* at = nullptr;
  int64_t head = 0;
  float* half_variances = nullptr;  // [heads]
};

// All query heads of one query token, over the groups.
template <typename Format>
class HeadsPass {
 public:
  HeadsPass(const AttendPlanesWork& work, const Format& format, int32_t token)
      : w_(work),
        format_(format),
        token_(token),
        queries_{{w_.group, format}, {w_.group, format}},
        sums_(w_.group, format),
        q_(static_cast<size_t>(w_.group * f().dim)),
        logits_(static_cast<size_t>(2 * w_.group * f().tokens)),
        half_variances_(static_cast<size_t>(2 * w_.group)) {
    const float* const q = w_.q + token * w_.q_token;
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = q[i] * w_.scale;
  }
  HeadsPass(const HeadsPass&) = delete;

  // Coarse logits of a group, until the next but one is scored.
  Logits Score(int32_t group) {
    const Logits out = PlaceFor(group);
    ScoreTo(group, out);
    return out;
  }
  void ScoreTo(int32_t group, const Logits& out) {
    const std::byte* const next = w_.rows.upper[std::min(group + kAhead, w_.rows.groups - 1)];
    const GroupQueries<Format>& queries = QueriesFor(group);
    queries.Score(w_.rows.upper[group], next, out.at, out.head);
    for (int h = 0; h < w_.group; ++h) out.half_variances[h] = queries.HalfVariance(h);
  }

  // Logits by all planes, of a group's tokens t + i whose bit i is set.
  void ScoreFine(int32_t group, int32_t t, uint32_t tokens, float* out, int64_t out_head) {
    QueriesFor(group).ScoreFine(w_.rows.upper[group], w_.rows.lower[group], t, tokens, out,
                                out_head);
  }

  // Attends what is chosen of a group, whose coarse logits these are.
  // Asks for what of `next` will be attended; -1: there is none.
  void Add(int32_t group, const Logits& logits, int32_t next) {
    StripBlock block{w_.rows.upper[group], w_.rows.lower[group]};
    for (int32_t t = 0; t < f().tokens; t += kStripTokens) {
      if (next >= 0) AskForStrip(next, t);
      const int32_t token = group * f().tokens + t;
      if (w_.strips[token / kStripTokens] != 0) {
        const uint32_t fine = BitsOf(w_.fine + token);
        if (fine != 0) ScoreFine(group, t, fine, logits.at + t, logits.head);
        block.first[block.count] = t;
        block.fine[block.count++] = fine;
      }
      const bool last = t + kStripTokens == f().tokens;
      if (block.count == 0 || (block.count < kBlockStrips && !last)) continue;
      sums_.Add(block, logits.at, logits.head);
      block.count = 0;
    }
  }

  // Asks for what Add will read of 16 tokens of a group, from its token t on.
  HWY_INLINE void AskForStrip(int32_t group, int32_t t) const {
    const int32_t token = group * f().tokens + t;
    if (w_.strips[token / kStripTokens] == 0) return;
    const std::byte* const upper = w_.rows.upper[group];
    Lines(upper + f().value_minimum() + 2 * t, 1).AskForAll();
    Lines(upper + f().value_step() + 2 * t, 1).AskForAll();
    Lines(upper + f().value_codes() + t / kStripTokens * 4 * f().dim, 4 * f().dim).AskForAll();
    const uint32_t fine = BitsOf(w_.fine + token);
    if (fine == 0) return;
    for (uint32_t bits = fine; bits != 0; bits &= bits - 1) {
      const int64_t row = (t + std::countr_zero(bits)) * f().row_bytes();
      Lines(w_.rows.lower[group] + row, f().row_bytes() + 32).AskForAll();
    }
    // Where all logits were kept, the keys may be gone.
    const std::byte* const words = upper + f().key_codes() + 4 * t;
    for (int i = 0; i < f().dim / 16; ++i) Lines(words + 4 * i * f().tokens, 64).AskForAll();
  }

  // Into the item's rows.
  void Store() const {
    for (int h = 0; h < w_.group; ++h) {
      const int64_t row = int64_t{token_} * w_.group + h;
      w_.l[row] = sums_.l(h);
      w_.m[row] = std::isnan(w_.l[row]) ? std::numeric_limits<float>::quiet_NaN() : sums_.m(h);
      sums_.Output(h, w_.o + row * f().dim);
    }
  }

  // Attends all groups. logits(g): coarse ones of group g, upon which its flags have to be set.
  template <typename LogitsOf>
  void Attend(const LogitsOf& logits) {
    Logits before;
    for (int32_t g = 0; g < w_.rows.groups; ++g) {
      const Logits scored = logits(g);
      if (g > 0) Add(g - 1, before, g);
      before = scored;
    }
    if (w_.rows.groups > 0) Add(w_.rows.groups - 1, before, -1);
    Store();
  }

  // Attends all groups, of which everything is fine: no coarse logit is asked for.
  void AttendInFull() {
    Attend([&](int32_t g) {
      Lines(w_.rows.upper[std::min(g + kAhead, w_.rows.groups - 1)], f().key_codes()).AskForAll();
      return PlaceFor(g);
    });
  }

 private:
  PlanesFormat f() const { return format_(); }
  // Where a group's logits lie until those of the next but one do.
  Logits PlaceFor(int32_t group) {
    const auto heads = static_cast<size_t>(group % 2 * w_.group);
    return {&logits_[heads * static_cast<size_t>(f().tokens)], f().tokens, &half_variances_[heads]};
  }
  GroupQueries<Format>& QueriesFor(int32_t group) {
    GroupQueries<Format>& queries = queries_[group % 2];
    if (queries.group() != group) queries.Fold(group, w_.rows.upper[group], q_.data());
    return queries;
  }

  const AttendPlanesWork& w_;
  const Format format_;
  const int32_t token_;
  static constexpr int32_t kAhead = 2;  // groups whose keys are on their way

  GroupQueries<Format> queries_[2];  // for the group that is scored, and the one before it
  ValueSums<Format> sums_;
  std::vector<float> q_;               // [heads][dim], with the scale
  std::vector<float> logits_;          // [2][heads][format.tokens]
  std::vector<float> half_variances_;  // [2][heads]
};

// The fine set and the strips of an item, by all heads of its first query token.
template <typename Format>
class Choice {
 public:
  Choice(const AttendPlanesWork& work, HeadsPass<Format>& pass)
      : w_(work), range_(CandidatesOf(work)), pass_(pass), limits_(Index(work.group)) {}

  // Sets all flags, and attends by them.
  void Attend() {
    std::fill_n(w_.fine, w_.rows.tokens(), uint8_t{1});
    std::fill_n(w_.strips, w_.rows.strips(), uint8_t{1});
    if (IsInFull(w_)) return pass_.AttendInFull();
    ScoreAlways();
    const std::vector<int32_t> sample = SampledGroups();
    if (!IsAbove() || sample.empty()) return AttendKept(sample);
    sampled_.resize(limits_.size());
    for (int32_t g : sample) Gather(g, pass_.Score(g));
    for (int h = 0; h < w_.group; ++h) SetLimits(h, SumOf(sampled_[Index(h)]));
    pass_.Attend([&](int32_t g) HWY_ATTR { return Marked(g, pass_.Score(g)); });
  }

 private:
  // A head's limits: the scores from which on a token is fine, and a strip is read.
  struct Limits {
    float fine, read;
  };
  // Some logits summed: exp(logit - top).
  struct Sum {
    float top;
    double sum;
    size_t n;
  };

  static size_t Index(int i) { return static_cast<size_t>(i); }
  int32_t count() const { return range_.stop - range_.start; }
  bool IsAbove() const { return w_.rule.fine_above > 0; }

  // Fine logits of what is always fine, but for sinks.
  void ScoreAlways() {
    const int32_t n = w_.rows.tokens() - range_.stop;
    always_.assign(limits_.size(), std::vector<float>(Index(n)));
    std::vector<float> one(limits_.size());
    const int32_t size = w_.rows.format.tokens;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t token = range_.stop + i;
      pass_.ScoreFine(token / size, token % size, 1, one.data(), 1);
      for (size_t h = 0; h < one.size(); ++h) always_[h][Index(i)] = one[h];
    }
  }

  // Those that have candidates; none: the sample is all candidates.
  std::vector<int32_t> SampledGroups() const {
    std::vector<int32_t> groups;
    const int32_t every = w_.rule.sample, size = w_.rows.format.tokens;
    for (int32_t g = (every - 1) / 2; every > 1 && g < w_.rows.groups; g += every) {
      if (g * size < range_.stop && (g + 1) * size > range_.start) groups.push_back(g);
    }
    return groups;
  }
  // Adds a group's candidates to the sample. logits: the group's.
  void Gather(int32_t group, const Logits& logits) {
    const int32_t size = w_.rows.format.tokens, first = group * size;
    const int32_t begin = std::max(range_.start - first, 0);
    const int32_t end = std::min(range_.stop - first, size);
    for (size_t h = 0; h < sampled_.size(); ++h) {
      const float* const x = logits.at + static_cast<int64_t>(h) * logits.head;
      sampled_[h].insert(sampled_[h].end(), x + begin, x + end);
    }
  }
  // Leaves the weights behind.
  Sum SumOf(const float* x, size_t n) {
    if (weights_.size() < n) weights_.resize(n);
    const float top = LargestOf(x, static_cast<int>(n));
    return {top, WeightsOf(x, static_cast<int>(n), top, weights_.data()), n};
  }
  Sum SumOf(const std::vector<float>& x) { return SumOf(x.data(), x.size()); }

  // Rules 3 to 5: what head h's limits are in scores.
  void SetLimits(int h, const Sum& sample) {
    const auto log_of = [](const Sum& s) {
      return s.n == 0 ? -std::numeric_limits<double>::infinity() : s.top + std::log(s.sum);
    };
    // The largest of the sample counts once.
    const double rest = std::max(sample.sum - 1, 0.0) * count() / static_cast<double>(sample.n);
    const double terms[] = {w_.raw_m[h] + std::log(static_cast<double>(w_.raw_l[h])),
                            sample.top + std::log1p(rest), log_of(SumOf(always_[Index(h)]))};
    double most = terms[0], sum = 0;
    for (double term : terms) most = std::max(most, term);
    for (double term : terms) sum += std::exp(term - most);
    const double normaliser = most + std::log(sum) - std::log(w_.tokens);
    limits_[Index(h)] = {static_cast<float>(normaliser + std::log(w_.rule.fine_above)),
                         static_cast<float>(normaliser + std::log(w_.rule.skip_below))};
  }

  // All logits are there before any token is chosen.
  void AttendKept(const std::vector<int32_t>& sample) {
    const int64_t tokens = w_.rows.tokens();
    const auto all = std::make_unique_for_overwrite<float[]>(limits_.size() * Index(tokens));
    std::vector<float> half_variances(limits_.size() * Index(w_.rows.groups));
    const auto of_group = [&](int32_t g) {
      return Logits{&all[g * w_.rows.format.tokens], tokens, &half_variances[Index(g * w_.group)]};
    };
    for (int32_t g = 0; g < w_.rows.groups; ++g) pass_.ScoreTo(g, of_group(g));
    if (!sample.empty()) sampled_.resize(limits_.size());
    for (int32_t g : sample) Gather(g, of_group(g));
    std::vector<float> masses(IsAbove() ? 0 : Index(count() / w_.rule.run));
    for (int h = 0; h < w_.group; ++h) {
      const float* const logits = &all[h * tokens];
      SetLimits(h, sample.empty() ? SumOf(logits + range_.start, Index(count()))
                                  : SumOf(sampled_[Index(h)]));
      if (!IsAbove()) AddMasses(logits, &half_variances[Index(h)], masses);
    }
    if (!IsAbove()) TakeShare(masses);
    pass_.Attend([&](int32_t g) HWY_ATTR { return Marked(g, of_group(g)); });
  }

  void TakeShare(const std::vector<float>& masses) {
    const int32_t run = w_.rule.run, n = static_cast<int32_t>(masses.size());
    const int32_t always = w_.tokens - count();
    const int32_t room = std::max(CeilShare(w_.rule.share, w_.tokens) - always, run) / run;
    std::vector<int32_t> taken(Index(std::min(room, n)));
    TopKSimd({masses.data(), n, room, taken.data()});
    std::fill_n(w_.fine + range_.start, n * run, uint8_t{0});
    for (int32_t i : taken) std::fill_n(w_.fine + range_.start + i * run, run, uint8_t{1});
  }

  // Adds a head's softmax over the scores of candidates, by runs. logits [tokens]. half_variances
  // are group 0's, those of others lie [heads] further on.
  void AddMasses(const float* logits, const float* half_variances, std::vector<float>& masses) {
    const int32_t size = w_.rows.format.tokens;
    std::vector<float> scores(Index(count()));
    for (int32_t t = range_.start; t < range_.stop; ++t) {
      scores[Index(t - range_.start)] = logits[t] + half_variances[t / size * w_.group];
    }
    const auto one = static_cast<float>(1 / SumOf(scores).sum);
    const int n = static_cast<int>(masses.size());
    const float* weight = weights_.data();
    int i = 0;
    for (; w_.rule.run == 1 && i + kVector <= n; i += kVector, weight += kVector) {
      const VF sum = hn::MulAdd(hn::LoadU(DF(), weight), hn::Set(DF(), one),
                                hn::LoadU(DF(), &masses[Index(i)]));
      hn::StoreU(sum, DF(), &masses[Index(i)]);
    }
    for (; i < n; ++i) {
      for (int32_t j = 0; j < w_.rule.run; ++j) masses[Index(i)] += *weight++ * one;
    }
  }

  // Sets a group's flags by its logits.
  Logits Marked(int32_t group, const Logits& logits) const {
    const int32_t size = w_.rows.format.tokens;
    for (int32_t t = 0; t < size; t += kStripTokens) {
      const int32_t token = group * size + t;
      bool is_read = MarkStrip(token, {logits.at + t, logits.head, logits.half_variances});
      if (token < range_.start || token + kStripTokens > range_.stop) {  // some are always fine
        std::fill(w_.fine + token, w_.fine + std::clamp(range_.start, token, token + kStripTokens),
                  uint8_t{1});
        std::fill(w_.fine + std::clamp(range_.stop, token, token + kStripTokens),
                  w_.fine + token + kStripTokens, uint8_t{1});
        is_read = true;
      }
      w_.strips[token / kStripTokens] = is_read;
    }
    return logits;
  }
  // Rules 4 and 5, of a strip whose logits these are: as if all of it were candidates. Returns
  // whether it is read.
  HWY_INLINE bool MarkStrip(int32_t token, const Logits& logits) const {
    constexpr int kVectors = kStripTokens / kVector;
    hn::MFromD<DF> fine[kVectors], below[kVectors];
    const float *x = logits.at, *half_variance = logits.half_variances;
    for (const Limits& limits : limits_) {
      const VF from = hn::Set(DF(), limits.fine), read = hn::Set(DF(), limits.read);
      const VF more = hn::Set(DF(), *half_variance++);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const VF score = hn::Add(hn::LoadU(DF(), x + i * kVector), more);
        const auto is_fine = hn::Ge(score, from), is_below = hn::Lt(score, read);
        const bool first = x == logits.at;
        fine[i] = first ? is_fine : hn::Or(fine[i], is_fine);
        below[i] = first ? is_below : hn::And(below[i], is_below);
      }
      x += logits.head;
    }
    bool is_read = !IsAbove() && BitsOf(w_.fine + token) != 0;
    uint8_t* const flags = w_.fine + token;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      is_read = is_read || !hn::AllTrue(DF(), below[i]);
      if (!IsAbove()) continue;
      is_read = is_read || !hn::AllFalse(DF(), fine[i]);
      const VI flag = hn::And(hn::BitCast(DI(), hn::VecFromMask(DF(), fine[i])), hn::Set(DI(), 1));
      const hn::Rebind<uint8_t, DF> d8;
      hn::StoreU(hn::DemoteTo(d8, flag), d8, flags + i * kVector);
    }
    return is_read;
  }

  const AttendPlanesWork& w_;
  const PlanesCandidates range_;
  HeadsPass<Format>& pass_;
  std::vector<Limits> limits_;               // [heads]
  std::vector<std::vector<float>> always_;   // [heads]: fine logits of what is always fine
  std::vector<std::vector<float>> sampled_;  // [heads]: coarse logits of the sample
  std::vector<float> weights_;               // behind the last Sum
};

template <typename Format>
void AttendOf(const AttendPlanesWork& w, const Format& format) {
  HeadsPass first(w, format, 0);
  Choice(w, first).Attend();
  for (int32_t token = 1; token < w.queries; ++token) {
    HeadsPass pass(w, format, token);
    if (IsInFull(w)) {
      pass.AttendInFull();
    } else {
      pass.Attend([&](int32_t g) { return pass.Score(g); });
    }
  }
}

void AttendPlanesItem(const AttendPlanesWork& w) {
  if (w.rows.format == UsualFormat()()) return AttendOf(w, UsualFormat());
  AttendOf(w, AnyFormat{w.rows.format});
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AttendPlanesItem);

void AttendPlanesSimd(const AttendPlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    CheckPlanesWork(work[i]);
    KVS_SIMD_CALL(AttendPlanesItem)(work[i]);
  });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
