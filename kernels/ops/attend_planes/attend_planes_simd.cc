// SPDX-License-Identifier: Apache-2.0
// Predicted: bound by memory where attend_raw is, with a sixth of its bytes; else by 40 operations
// a token for coarse logits of four heads, 60 for coarse values of a strip that is read. Measured
// (bench/ops_bench.cc, no strip left out): as long as attend_raw. Half of it waits for memory, for
// what fine tokens have apart and for words of strips; asking further ahead did not help.
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/attend_planes/attend_planes_simd.cc"
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/score_bits/bits_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

constexpr int kVector = static_cast<int>(kN);
constexpr int kGroupMax = 8;               // query heads that are done at once
constexpr CodeReading kCoarse{64, 31.5f};  // plane 0 of a code
constexpr int kOfByte[4] = {0, 2, 1, 3};   // a byte of a word: its number among four
constexpr size_t kAhead = 8;               // fine tokens whose bytes are on their way
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Whole numbers 0 .. 255 from bytes.
HWY_INLINE VF LoadFlags(const uint8_t* flags) {
  const hn::Rebind<uint8_t, DF> d8;
  return hn::ConvertTo(DF(), hn::PromoteTo(DI(), hn::LoadU(d8, flags)));
}

HWY_INLINE void AddTo(float* sums, VF x) {
  hn::StoreU(hn::Add(hn::LoadU(DF(), sums), x), DF(), sums);
}

// Numbers of a word's bytes in the order of their channels, which bytes have as 0, 2, 1, 3.
HWY_INLINE VI ByChannel(VI x) {
  alignas(64) static constexpr auto kLanes = [] {
    struct {
      int32_t from[kN];
    } order{};
    for (int i = 0; i < kVector; ++i) order.from[i] = i / 4 * 4 + kOfByte[i % 4];
    return order;
  }();
  return hn::TableLookupLanes(x, hn::SetTableIndices(DI(), kLanes.from));
}

// The largest of n numbers; NaN counts as nothing.
HWY_INLINE float LargestOf(const float* x, int n) {
  VF top = hn::Set(DF(), kNone);
  int i = 0;
  for (; i + kVector <= n; i += kVector) top = hn::Max(hn::LoadU(DF(), x + i), top);
  float largest = hn::GetLane(hn::MaxOfLanes(DF(), top));
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

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

// Planes of one token's key or value. coarse: plane 0, or null; second: null with keep = 4.
struct Digits {
  const uint8_t* coarse;
  const uint8_t* first;
  const uint8_t* second;

  // Codes of the channels [i, i + N), by the planes that are there.
  HWY_INLINE VF At(int i, int dim) const {
    const hn::Rebind<uint8_t, DF> d8;
    const int quarter = dim / 4, half = dim / 2;  // powers of two
    const auto digit = [&](const uint8_t* plane, int run, int width) HWY_ATTR {
      const auto bytes = hn::PromoteTo(DI(), hn::LoadU(d8, plane + (i & (run - 1))));
      const int bit = width * (i >> std::countr_zero(static_cast<uint32_t>(run)));
      return hn::And(hn::ShiftRightSame(bytes, bit), hn::Set(DI(), (1 << width) - 1));
    };
    VI code = hn::ShiftLeft<4>(digit(first, quarter, 2));
    if (second != nullptr) code = hn::Add(code, digit(second, half, 4));
    if (coarse != nullptr) code = hn::Add(code, hn::ShiftLeft<6>(digit(coarse, quarter, 2)));
    return hn::ConvertTo(DF(), ByChannel(code));
  }
};

// A group's queries times its steps, and what minima add: for keys that are read finely.
struct FineQueries {
  int32_t group = -1;
  float q[kGroupMax][kHeadDimMax], base[kGroupMax];
};

// A strip's weights as whole numbers: of token 4 m + i at byte kOfByte[i] of word m.
struct StripWeights {
  int8_t whole[kGroupMax][kStripTokens];
  float factor[kGroupMax];
};

// Some query heads of one query token, over all groups.
class HeadsPass {
 public:
  HeadsPass(const AttendPlanesWork& work, int32_t first, int32_t heads)
      : w_(work),
        f_(work.rows.format),
        tokens_(work.rows.tokens()),
        first_(first),
        heads_(heads),
        tail_(f_.keep == 8 ? 0.0f : 7.5f),
        logits_(static_cast<size_t>(heads) * static_cast<size_t>(tokens_)) {
    FindCoarseLogits();
  }
  HeadsPass(const HeadsPass&) = delete;

  float* logits(int h) { return &logits_[static_cast<size_t>(h) * static_cast<size_t>(tokens_)]; }
  int heads() const { return heads_; }

  // The token's logits by all planes, in place of those by plane 0.
  void Refine(int32_t token) {
    const int32_t at = token % f_.tokens;
    if (fine_.group != token / f_.tokens) Fold(token / f_.tokens);
    uint32_t words[kHeadDimMax / 16];
    const std::byte* const upper = w_.rows.upper[fine_.group] + f_.key_codes() + 4 * at;
    for (int i = 0; i < f_.dim / 16; ++i) std::memcpy(&words[i], upper + 4 * i * f_.tokens, 4);
    const Digits digits = DigitsOf(token, 0, reinterpret_cast<const uint8_t*>(words));
    VF sums[kGroupMax];
    for (int h = 0; h < heads_; ++h) sums[h] = hn::Zero(DF());
    for (int i = 0; i < f_.dim; i += kVector) {
      const VF code = digits.At(i, f_.dim);
      for (int h = 0; h < heads_; ++h) {
        sums[h] = hn::MulAdd(code, hn::LoadU(DF(), fine_.q[h] + i), sums[h]);
      }
    }
    for (int h = 0; h < heads_; ++h) {
      logits(h)[token] = hn::GetLane(hn::SumOfLanes(DF(), sums[h])) + fine_.base[h];
    }
  }

  // Rule 6, into the item's rows of these heads. fine: the tokens of the fine set, ascending.
  void Attend(const std::vector<int32_t>& fine) {
    for (size_t i = 0; i < fine.size(); ++i) {
      if (i + kAhead < fine.size()) PrefetchKey(fine[i + kAhead]);
      Refine(fine[i]);
    }
    FindWeights();
    o_.assign(static_cast<size_t>(heads_ * f_.dim), 0.0f);
    auto next = fine.begin();
    for (int32_t strip = 0; strip < w_.rows.strips(); ++strip) {
      const auto end = std::lower_bound(next, fine.end(), (strip + 1) * kStripTokens);
      if (strip + 1 < w_.rows.strips() && w_.strips[strip + 1] != 0) PrefetchStrip(strip + 1);
      if (w_.strips[strip] != 0) AddStrip(strip, next, end);
      next = end;
    }
    for (int h = 0; h < heads_; ++h) Store(h);
  }

 private:
  using Tokens = std::vector<int32_t>::const_iterator;

  const float* QueryOf(int h) const {
    return w_.q + int64_t{first_ / w_.group} * w_.q_token + int64_t{first_ % w_.group + h} * f_.dim;
  }
  float* OutputOf(int h) { return &o_[static_cast<size_t>(h * f_.dim)]; }

  Digits DigitsOf(int32_t token, int64_t half, const uint8_t* coarse) const {
    const auto* row = reinterpret_cast<const uint8_t*>(w_.rows.lower[token / f_.tokens]) +
                      token % f_.tokens * f_.row_bytes() + half;
    return {coarse, row, f_.keep == 8 ? row + f_.dim / 4 : nullptr};
  }
  // All that Refine reads of a token: its words of plane 0 lie a word of all tokens apart.
  void PrefetchKey(int32_t token) const {
    const int32_t group = token / f_.tokens, at = token % f_.tokens;
    Prefetch(w_.rows.lower[group] + at * f_.row_bytes(), 0, f_.row_bytes());
    const std::byte* word = w_.rows.upper[group] + f_.key_codes() + 4 * at;
    for (int i = 0; i < f_.dim / 16; ++i) __builtin_prefetch(word + 4 * i * f_.tokens);
  }
  void PrefetchStrip(int32_t strip) const {
    const int32_t token = strip * kStripTokens, at = token % f_.tokens;
    const std::byte* const upper = w_.rows.upper[token / f_.tokens];
    __builtin_prefetch(upper + f_.value_minimum() + 2 * at);
    __builtin_prefetch(upper + f_.value_step() + 2 * at);
    const std::byte* const words = upper + f_.value_codes() + at / kStripTokens * 4 * f_.dim;
    Prefetch(words, 0, 4 * f_.dim);
  }

  template <int H>
  void ScoreHeads(int h) {
    const QuantisedGroup keys{f_.dim, 2, f_.tokens};
    FoldedQueries folded;
    for (int32_t g = 0; g < w_.rows.groups; ++g) {
      const std::byte* const group = w_.rows.upper[g];
      const std::byte* const next = g + 1 < w_.rows.groups ? w_.rows.upper[g + 1] : nullptr;
      HWY_NAMESPACE::Fold<H>(keys, group, kCoarse, QueryOf(h), w_.scale, folded);
      const int64_t share = f_.value_minimum() * kVector / f_.tokens;
      for (int32_t t = 0; t < f_.tokens; t += kVector) {
        Prefetch(next, t / kVector * share, (t / kVector + 1) * share);
        ScoreVector<2, H>(keys, group, t, folded, logits(h) + g * f_.tokens + t, tokens_);
      }
    }
  }
  void FindCoarseLogits() {
    ForHeads([this]<int H>(int h) HWY_ATTR { ScoreHeads<H>(h); });
  }
  // body.template operator()<H>(h) for heads [h, h + H).
  template <typename Body>
  HWY_INLINE void ForHeads(const Body& body) const {
    int h = 0;
    for (; h + 4 <= heads_; h += 4) body.template operator()<4>(h);
    for (; h + 2 <= heads_; h += 2) body.template operator()<2>(h);
    if (h < heads_) body.template operator()<1>(h);
  }

  void Fold(int32_t group) {
    fine_.group = group;
    const auto* const minima = reinterpret_cast<const F16*>(w_.rows.upper[group]);
    const auto* const steps = minima + f_.dim;
    const VF scale = hn::Set(DF(), w_.scale);
    VF base[kGroupMax];
    for (int h = 0; h < heads_; ++h) base[h] = hn::Zero(DF());
    for (int c = 0; c < f_.dim; c += kVector) {
      const VF step = LoadFloats(steps + c);
      const VF mean = hn::MulAdd(step, hn::Set(DF(), tail_), LoadFloats(minima + c));
      for (int h = 0; h < heads_; ++h) {
        const VF x = hn::Mul(hn::LoadU(DF(), QueryOf(h) + c), scale);
        base[h] = hn::MulAdd(x, mean, base[h]);
        hn::StoreU(hn::Mul(x, step), DF(), fine_.q[h] + c);
      }
    }
    for (int h = 0; h < heads_; ++h) fine_.base[h] = hn::GetLane(hn::SumOfLanes(DF(), base[h]));
  }

  // Logits of strips that are read become weights; others are not looked at any more.
  void FindWeights() {
    for (int h = 0; h < heads_; ++h) {
      float* const x = logits(h);
      float top = kNone;
      ForReadStrips([&](int32_t at, int32_t n)
                        HWY_ATTR { top = std::max(top, LargestOf(x + at, n)); });
      double sum = 0;
      ForReadStrips([&](int32_t at, int32_t n)
                        HWY_ATTR { sum += WeightsOf(x + at, n, top, x + at); });
      w_.m[first_ + h] = std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : top;
      w_.l[first_ + h] = static_cast<float>(sum);
      std::fill_n(constants_[h], kN, 0.0f);
    }
  }
  // Runs of strips that are read: the first token, and how many.
  template <typename Body>
  void ForReadStrips(const Body& body) const {
    for (int32_t i = 0, end; i < w_.rows.strips(); i = end) {
      for (end = i + 1; end < w_.rows.strips() && w_.strips[end] == w_.strips[i];) ++end;
      if (w_.strips[i] != 0) body(i * kStripTokens, (end - i) * kStripTokens);
    }
  }

  void AddStrip(int32_t strip, Tokens fine, Tokens end) {
    const int32_t token = strip * kStripTokens, at = token % f_.tokens;
    const std::byte* const upper = w_.rows.upper[token / f_.tokens];
    const auto* const minima = reinterpret_cast<const F16*>(upper + f_.value_minimum()) + at;
    const auto* const steps = reinterpret_cast<const F16*>(upper + f_.value_step()) + at;
    const auto* const words =
        reinterpret_cast<const uint32_t*>(upper + f_.value_codes()) + at / kStripTokens * f_.dim;
    StripWeights weights;
    RoundWeights(token, minima, steps, weights);
    ForHeads([&]<int H>(int h) HWY_ATTR { AddCoarse<H>(words, weights, h); });
    for (; fine != end; ++fine) AddFine(*fine, ToFloat(steps[*fine % kStripTokens]), words);
  }

  // Weights times steps of what is not fine, as whole numbers; and what all channels get.
  void RoundWeights(int32_t token, const F16* minima, const F16* steps, StripWeights& out) {
    float products[kGroupMax][kStripTokens], top[kGroupMax] = {};
    for (int i = 0; i < kStripTokens; i += kVector) {
      const VF minimum = LoadFloats(minima + i), step = LoadFloats(steps + i);
      const auto fine = hn::Ne(LoadFlags(w_.fine + token + i), hn::Zero(DF()));
      const VF offset = hn::IfThenElse(fine, hn::Set(DF(), tail_), hn::Set(DF(), kCoarse.offset));
      for (int h = 0; h < heads_; ++h) {
        const VF weight = hn::LoadU(DF(), logits(h) + token + i), product = hn::Mul(weight, step);
        const VF coarse = hn::IfThenZeroElse(fine, hn::Mul(product, hn::Set(DF(), kCoarse.cell)));
        AddTo(constants_[h], hn::MulAdd(weight, minimum, hn::Mul(product, offset)));
        hn::StoreU(coarse, DF(), products[h] + i);
        top[h] = std::max(top[h], hn::GetLane(hn::MaxOfLanes(DF(), coarse)));
      }
    }
    int32_t whole[kGroupMax * kStripTokens] = {};
    for (int h = 0; h < heads_; ++h) {
      const bool none = !(top[h] >= 1e-30f);  // 127 / top has no fp32
      const VF inverse = hn::Set(DF(), none ? 0.0f : 127.0f / top[h]);
      out.factor[h] = none ? 0.0f : top[h] / 127.0f;
      for (int i = 0; i < kStripTokens; i += kVector) {
        const VF product = hn::LoadU(DF(), products[h] + i);
        const VI rounded = hn::NearestInt(hn::Mul(product, inverse));
        const VF rest =
            hn::NegMulAdd(hn::ConvertTo(DF(), rounded), hn::Set(DF(), out.factor[h]), product);
        AddTo(constants_[h],
              hn::Mul(rest, hn::Set(DF(), 1.5f)));  // codes count from the middle one
        hn::StoreU(rounded, DI(), whole + h * kStripTokens + i);
      }
    }
    for (int i = 0; i < heads_ * kStripTokens; i += 2 * kVector) {
      StoreBytes(hn::LoadU(DI(), whole + i), hn::LoadU(DI(), whole + i + kVector),
                 out.whole[0] + i);
    }
  }

  // Plane 0 of a strip's values, by the heads [h, h + H).
  template <int H>
  HWY_NOINLINE void AddCoarse(const uint32_t* words, const StripWeights& weights, int h) {
    const VU mask = hn::Set(DU(), 0x03030303u);
    VI four[H][4];
    VF factor[H];
    float* to[H];
#pragma GCC unroll 4
    for (int i = 0; i < H; ++i) {
      to[i] = OutputOf(h + i);
      factor[i] = hn::Set(DF(), weights.factor[h + i]);
#pragma GCC unroll 4
      for (int m = 0; m < 4; ++m) {
        int32_t bytes;
        std::memcpy(&bytes, weights.whole[h + i] + 4 * m, 4);
        four[i][m] = hn::Set(DI(), bytes);
      }
    }
    for (int c = 0; c < f_.dim; c += kVector) {
      const VU word = hn::LoadU(DU(), words + c);
      const VU codes[4] = {hn::And(word, mask), hn::And(hn::ShiftRight<2>(word), mask),
                           hn::And(hn::ShiftRight<4>(word), mask),
                           hn::And(hn::ShiftRight<6>(word), mask)};
#pragma GCC unroll 4
      for (int i = 0; i < H; ++i) {
        const V16 low = hn::Add(MulBytes(codes[0], four[i][0]), MulBytes(codes[1], four[i][1]));
        const V16 high = hn::Add(MulBytes(codes[2], four[i][2]), MulBytes(codes[3], four[i][3]));
        const VF sums = hn::ConvertTo(DF(), SumOfHalves(hn::Add(low, high)));
        hn::StoreU(hn::MulAdd(sums, factor[i], hn::LoadU(DF(), to[i] + c)), DF(), to[i] + c);
      }
    }
  }

  // A fine token's digits: plane 0 lies in its strip's words, the others in its row.
  void AddFine(int32_t token, float step, const uint32_t* words) {
    const int bit = PlaceInWords(kStripTokens, 2, token % kStripTokens).bit;
    const Digits digits = DigitsOf(token, f_.row_bytes() / 2, nullptr);
    for (int c = 0; c < f_.dim; c += kVector) {
      const VU coarse =
          hn::And(hn::ShiftRightSame(hn::LoadU(DU(), words + c), bit), hn::Set(DU(), 3));
      const VF high = hn::ConvertTo(DF(), hn::ShiftLeft<6>(hn::BitCast(DI(), coarse)));
      const VF code = hn::Add(high, digits.At(c, f_.dim));
      for (int h = 0; h < heads_; ++h) {
        const VF weight = hn::Set(DF(), logits(h)[token] * step);
        float* const o = OutputOf(h) + c;
        hn::StoreU(hn::MulAdd(code, weight, hn::LoadU(DF(), o)), DF(), o);
      }
    }
  }

  void Store(int h) {
    float* const out = w_.o + int64_t{first_ + h} * f_.dim;
    const float constant = hn::GetLane(hn::SumOfLanes(DF(), hn::LoadU(DF(), constants_[h])));
    for (int c = 0; c < f_.dim; ++c) {
      out[c] = OutputOf(h)[c] + constant;
    }
    RotateHadamard(out, f_.dim);
  }

  const AttendPlanesWork& w_;
  const PlanesFormat f_;
  const int32_t tokens_, first_, heads_;  // first_: query row of the item
  const float tail_;                      // what a fine code counts beyond its digits
  std::vector<float> logits_;             // [heads][tokens]; of what is read, weights at the end
  std::vector<float> o_;                  // [heads][dim], rotated
  float constants_[kGroupMax][kN];        // their sum is what every channel of a head's output gets
  FineQueries fine_;
};

// The fine set and the strips of an item, by all heads of its first query token.
class Choice {
 public:
  Choice(const AttendPlanesWork& work, std::vector<HeadsPass*> passes)
      : w_(work), range_(CandidatesOf(work)), passes_(std::move(passes)) {
    weights_.resize(static_cast<size_t>(count()));
  }

  void Run() {
    std::fill_n(w_.fine, w_.rows.tokens(), uint8_t{1});
    std::fill_n(w_.strips, w_.rows.strips(), uint8_t{1});
    if (range_.start == range_.stop) return;
    for (HeadsPass* pass : passes_) {
      for (int32_t t = 0; t < range_.start; ++t) pass->Refine(t);
      for (int32_t t = range_.stop; t < w_.rows.tokens(); ++t) pass->Refine(t);
      for (int h = 0; h < pass->heads(); ++h) {
        heads_.push_back({pass->logits(h), 0});
        heads_.back().normaliser =
            Normaliser(heads_.back().logits, static_cast<int>(heads_.size()) - 1);
      }
    }
    if (w_.rule.fine_above > 0) {
      TakeAbove();
    } else {
      TakeShare();
    }
    LeaveOut();
  }

 private:
  struct Head {
    const float* logits;
    double normaliser;  // L_h
  };

  int32_t count() const { return range_.stop - range_.start; }

  // Rule 3, of head g.
  double Normaliser(const float* x, int g) {
    double most = w_.raw_m[g] + std::log(static_cast<double>(w_.raw_l[g]));
    std::vector<double> terms = {most};
    for (int32_t t = 0; t < w_.rows.tokens(); ++t) {
      if (t == range_.start) t = range_.stop;
      if (t < w_.rows.tokens()) terms.push_back(x[t]);
    }
    const std::vector<float> some = Sampled(x);
    const float* const sampled = some.empty() ? x + range_.start : some.data();
    const int n = some.empty() ? count() : static_cast<int>(some.size());
    const float top = LargestOf(sampled, n);
    // The largest counts once.
    const double rest = std::max(WeightsOf(sampled, n, top, weights_.data()) - 1, 0.0);
    terms.push_back(top + std::log1p(rest * count() / n));
    for (double term : terms) most = std::max(most, term);
    double sum = 0;
    for (double term : terms) sum += std::exp(term - most);
    return most + std::log(sum);
  }
  // Logits of the sample; empty: it is all candidates.
  std::vector<float> Sampled(const float* x) const {
    std::vector<float> sampled;
    const int32_t size = w_.rows.format.tokens, chosen = (w_.rule.sample - 1) / 2;
    for (int32_t group = chosen; w_.rule.sample > 1 && group < w_.rows.groups;
         group += w_.rule.sample) {
      const int32_t begin = std::max(group * size, range_.start);
      const int32_t end = std::min((group + 1) * size, range_.stop);
      if (begin < end) sampled.insert(sampled.end(), x + begin, x + end);
    }
    return sampled;
  }

  // The logit from which on a token of head g has a weight of `times` / N.
  float LogitOf(const Head& head, double times) const {
    return static_cast<float>(head.normaliser + std::log(times / w_.tokens));
  }

  void TakeAbove() {
    std::fill_n(w_.fine + range_.start, count(), uint8_t{0});
    for (const Head& head : heads_) {
      const float least = LogitOf(head, w_.rule.fine_above);
      for (int32_t t = range_.start; t < range_.stop; ++t) w_.fine[t] |= head.logits[t] >= least;
    }
  }

  void TakeShare() {
    const int32_t run = w_.rule.run, n = count() / run, always = w_.tokens - count();
    std::vector<float> scores(static_cast<size_t>(n));
    for (const Head& head : heads_) {
      const float* const x = head.logits + range_.start;
      const double sum = WeightsOf(x, count(), LargestOf(x, count()), weights_.data());
      AddScores(static_cast<float>(1 / sum), run, scores);
    }
    const int32_t room = std::max(CeilShare(w_.rule.share, w_.tokens) - always, run) / run;
    std::vector<int32_t> taken(static_cast<size_t>(std::min(room, n)));
    TopKSimd({scores.data(), n, room, taken.data()});
    std::fill_n(w_.fine + range_.start, n * run, uint8_t{0});
    for (int32_t i : taken) std::fill_n(w_.fine + range_.start + i * run, run, uint8_t{1});
  }

  // Adds each run's weights times `one`.
  void AddScores(float one, int32_t run, std::vector<float>& scores) const {
    const int n = static_cast<int>(scores.size());
    const float* weight = weights_.data();
    int i = 0;
    for (; run == 1 && i + kVector <= n; i += kVector, weight += kVector) {
      AddTo(&scores[static_cast<size_t>(i)], hn::Mul(hn::LoadU(DF(), weight), hn::Set(DF(), one)));
    }
    for (; i < n; ++i) {
      for (int32_t j = 0; j < run; ++j) scores[static_cast<size_t>(i)] += *weight++ * one;
    }
  }

  // Rule 5.
  void LeaveOut() {
    for (int32_t strip = 0; strip < w_.rows.strips(); ++strip) {
      const int32_t token = strip * kStripTokens;
      w_.strips[strip] = std::any_of(w_.fine + token, w_.fine + token + kStripTokens,
                                     [](uint8_t fine) { return fine != 0; });
    }
    for (const Head& head : heads_) {
      const VF least = hn::Set(DF(), LogitOf(head, w_.rule.skip_below));
      for (int32_t strip = 0; strip < w_.rows.strips(); ++strip) {
        if (w_.strips[strip] != 0) continue;
        const float* const x = head.logits + strip * kStripTokens;
        bool below = true;
        for (int i = 0; i < kStripTokens; i += kVector) {
          below = below && hn::AllTrue(DF(), hn::Lt(hn::LoadU(DF(), x + i), least));
        }
        w_.strips[strip] = !below;
      }
    }
  }

  const AttendPlanesWork& w_;
  const PlanesCandidates range_;
  const std::vector<HeadsPass*> passes_;
  std::vector<Head> heads_;
  std::vector<float> weights_;  // one head's, of the candidates
};

void AttendPlanesItem(const AttendPlanesWork& w) {
  std::vector<std::unique_ptr<HeadsPass>> passes;
  std::vector<HeadsPass*> all;
  for (int32_t h = 0; h < w.group; h += kGroupMax) {
    passes.push_back(std::make_unique<HeadsPass>(w, h, std::min(kGroupMax, w.group - h)));
    all.push_back(passes.back().get());
  }
  Choice(w, all).Run();
  std::vector<int32_t> fine;
  for (int32_t t = 0; t < w.rows.tokens(); ++t) {
    if (w.fine[t] != 0) fine.push_back(t);
  }
  for (HeadsPass* pass : all) pass->Attend(fine);
  for (int32_t row = w.group; row < w.queries * w.group;) {
    const int32_t heads = std::min(kGroupMax, w.group - row % w.group);
    HeadsPass(w, row, heads).Attend(fine);
    row += heads;
  }
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
