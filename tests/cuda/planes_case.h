// SPDX-License-Identifier: Apache-2.0
// Inputs of op attend_planes on the GPU, and the rule of docs/spec/planes.md in double precision
// over what a device chose: near-ties may fall either way, outputs over one choice may not differ.
#ifndef KVSTRATA_TESTS_CUDA_PLANES_CASE_H_
#define KVSTRATA_TESTS_CUDA_PLANES_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

struct PlanesShape {
  int dim = 128, keep = 8, group = 4, kv_heads = 2, batch = 2, groups_max = 12, block_groups = 4;
  int raw_parts = 1;
  DType q_dtype = DType::kBF16;
  PlanesRule rule = {.fine_above = 2, .skip_below = 1, .sample = 16};
  float sharpness = 2;   // of queries: how much of some token's key they have
  float value_size = 1;  // of values
  float spike = 0;       // over 0: one token of each head has a logit as large as that
  bool merges = true;    // to the output, else to a partial
  bool ahead = false;
};

// What the device made of one (sequence, KV head), and what it should be.
struct PlanesItemErrors {
  double output = 0;  // the largest |got - want| / |want| of a row
  double lse = 0;
  double logit = 0;                      // the largest lse
  int wrong_fine = 0, wrong_strips = 0;  // beyond the margin
  int near_ties = 0;                     // chosen otherwise within it
  int first_wrong = -1;                  // token
  double weight = 0, limit = 0;          // its weight times N
};

class PlanesCase {
 public:
  PlanesCase(const PlanesShape& shape, Rng& rng) : s_(shape), rng_(rng) {
    format_ = {s_.dim, kUnit, s_.keep};
    upper_.resize(Items() * s_.groups_max * format_.upper_bytes());
    lower_.resize(Items() * s_.groups_max * format_.lower_bytes());
    coarse_.resize(Items());
    for (size_t item = 0; item < Items(); ++item) Pack(item);
    Place();
    FillQueries();
    Allocate();
  }

  // N of each sequence, and how many groups of it are sealed (fewer: workers lag).
  void SetTokens(const std::vector<int32_t>& tokens, int lag = 0) {
    tokens_ = tokens;
    sealed_.clear();
    for (int32_t n : tokens) {
      sealed_.push_back(std::clamp((n - 1) / kUnit - lag, 0, s_.groups_max));
    }
    device_tokens_.Write(tokens_);
    device_groups_.Write(sealed_);
  }

  AttendPlanesBatch work() const { return work_; }
  void PoisonOutputs() {
    out_.Poison();
    lse_.Poison();
    partial_.Poison();
    fine_.Poison();
    strips_.Poison();
    fetched_.Write(std::vector<uint64_t>(Items(), 0));
  }
  int Run(Stream stream = nullptr) {
    PoisonOutputs();
    return kvs_cuda_ops()->attend_planes(work_, stream);
  }
  void Read() {
    got_ = s_.merges ? out_.Read() : partial_.Read();
    got_lse_ = lse_.Read();
    got_fine_ = fine_.Read();
    got_strips_ = strips_.Read();
    got_fetched_ = fetched_.Read();
  }
  const std::vector<float>& got() const { return got_; }

  // Reads what a run made and holds it to the rule. Returns the largest error of an output.
  double ExpectRule(double tolerance = 5e-3, double margin = 0.02) {
    Read();
    double worst = 0;
    fine_tokens_ = tied_ = candidates_ = 0;
    for (size_t item = 0; item < Items(); ++item) {
      const PlanesItemErrors e = Compare(item, margin);
      worst = std::max(worst, e.output);
      tied_ += e.near_ties;
      EXPECT_LE(e.output, tolerance) << Name(item) << ": output";
      EXPECT_LE(e.lse, 4e-3 + 1e-4 * e.logit) << Name(item) << ": lse";
      EXPECT_TRUE(e.wrong_fine == 0 && e.wrong_strips == 0)
          << Name(item) << ": " << e.wrong_fine << " tokens and " << e.wrong_strips << " strips of "
          << sealed_[item / s_.kv_heads] * kUnit << " chosen otherwise; the first is token "
          << e.first_wrong << " of weight " << e.weight << " / N, limit " << e.limit << ", start "
          << Start(item) << ", stop " << Stop(item);
    }
    return worst;
  }
  int fine_tokens() const { return fine_tokens_; }
  int candidates() const { return candidates_; }
  int near_ties() const { return tied_; }

  // Bytes that were fetched over those that the rule reads for what was chosen.
  double FetchedOverRule() const {
    double fetched = 0, rule = 0;
    for (size_t item = 0; item < Items(); ++item) {
      PlanesRows rows{.format = format_, .groups = sealed_[item / s_.kv_heads]};
      fetched += static_cast<double>(got_fetched_[item]);
      rule += static_cast<double>(
          PlanesBytesRead(rows, &got_fine_[item * Stride()], &got_strips_[item * Stride() / 16]));
    }
    return fetched / rule;
  }

  // A host work item of ops `ref`, which decide for themselves.
  AttendPlanesWork HostWork(size_t item, std::vector<const std::byte*>* upper,
                            std::vector<const std::byte*>* lower) const {
    const int32_t groups = sealed_[item / s_.kv_heads];
    for (int g = 0; g < groups; ++g) {
      upper->push_back(Upper(item, g));
      lower->push_back(Lower(item, g));
    }
    AttendPlanesWork w;
    w.rows = {format_, upper->data(), lower->data(), groups};
    w.rule = s_.rule;
    w.tokens = tokens_[item / s_.kv_heads];
    w.q = &q_[item * s_.group * s_.dim];
    w.group = s_.group;
    w.scale = work_.scale;
    return w;
  }
  double RawLogSum(size_t row) const {
    double sum = 0;
    for (int part = 0; part < s_.raw_parts; ++part) {
      sum += std::exp(double{raw_m_[part * Rows() + row]}) * raw_l_[part * Rows() + row];
    }
    return std::log(sum);
  }
  // Holds row `row` of what was read to the partial (m, l, o) of its sealed tokens.
  void CheckRow(size_t row, double m, double l, const std::vector<double>& o,
                PlanesItemErrors& e) const {
    const Merged want = MergedRow(row, m, l, o);
    const auto dim = static_cast<size_t>(s_.dim);
    const std::vector<double> own(got_.begin() + row * dim, got_.begin() + (row + 1) * dim);
    Merged got{0, own};
    if (s_.merges) {
      got.lse = got_lse_[row];
    } else {
      got = MergedRow(row, got_[Rows() * dim + row], got_[Rows() * (dim + 1) + row], own);
    }
    double off = 0, norm = 0;
    for (size_t c = 0; c < dim; ++c) {
      off += (got.o[c] - want.o[c]) * (got.o[c] - want.o[c]);
      norm += want.o[c] * want.o[c];
    }
    const auto finite = [](double x) {
      return std::isnan(x) ? std::numeric_limits<double>::infinity() : x;
    };
    e.output = std::max(e.output, off == 0 ? 0 : finite(std::sqrt(off / norm)));
    e.lse = std::max(e.lse, finite(std::abs(got.lse - want.lse)));
    e.logit = std::max(e.logit, std::abs(want.lse));
  }

  const uint8_t* got_fine(size_t item) const { return &got_fine_[item * Stride()]; }
  const uint8_t* got_strips(size_t item) const { return &got_strips_[item * Stride() / 16]; }
  size_t Items() const { return static_cast<size_t>(s_.batch) * s_.kv_heads; }
  void SetQuery(size_t row, int channel, float x) {
    q_[row * s_.dim + channel] = x;
    device_q_.Write(Encoded(q_, s_.q_dtype));
  }

 private:
  static constexpr int kUnit = 64;
  struct Numbers {
    std::vector<double> coarse_keys, fine_keys, coarse_values, fine_values;  // [token][dim]
  };

  size_t Rows() const { return Items() * s_.group; }
  size_t Stride() const { return static_cast<size_t>(s_.groups_max) * kUnit; }
  std::byte* Upper(size_t item, int g) {
    return &upper_[(item * s_.groups_max + g) * format_.upper_bytes()];
  }
  std::byte* Lower(size_t item, int g) {
    return &lower_[(item * s_.groups_max + g) * format_.lower_bytes()];
  }
  const std::byte* Upper(size_t item, int g) const {
    return const_cast<PlanesCase*>(this)->Upper(item, g);
  }
  const std::byte* Lower(size_t item, int g) const {
    return const_cast<PlanesCase*>(this)->Lower(item, g);
  }
  std::string Name(size_t item) const {
    return "sequence " + std::to_string(item / s_.kv_heads) + " of " +
           std::to_string(tokens_[item / s_.kv_heads]) + " tokens, KV head " +
           std::to_string(item % s_.kv_heads);
  }

  // Random rows of one item, sealed by `ref`, and the numbers that they count as.
  void Pack(size_t item) {
    const int tokens = s_.groups_max * kUnit;
    std::vector<float> keys(static_cast<size_t>(tokens) * s_.dim), values(keys.size());
    std::vector<float> mean(s_.dim);
    for (float& x : mean) x = Normal(rng_);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = Normal(rng_) + mean[i % s_.dim];
    for (float& x : values) x = s_.value_size * Normal(rng_);
    std::vector<std::byte> key_bytes = Encoded(keys, DType::kBF16);
    std::vector<std::byte> value_bytes = Encoded(values, DType::kBF16);
    keys_.push_back(Floats(DType::kBF16, key_bytes));
    std::byte *const key_page = key_bytes.data(), *const value_page = value_bytes.data();
    const int64_t row = int64_t{s_.dim} * 2;
    for (int g = 0; g < s_.groups_max; ++g) {
      PackPlanesWork w;
      w.keys = {&key_page, 0, row, tokens, s_.dim, DType::kBF16};
      w.values = {&value_page, 0, row, tokens, s_.dim, DType::kBF16};
      w.begin = g * kUnit;
      w.format = format_;
      w.upper = Upper(item, g);
      w.lower = Lower(item, g);
      PackPlanesRef(&w, 1, InlineExecutor());
      Widen(item, g);
    }
  }
  void Widen(size_t item, int g) {
    Numbers& n = coarse_[item];
    for (int t = 0; t < kUnit; ++t) {
      for (int c = 0; c < s_.dim; ++c) {
        const auto number = [&](PlanesSide side, int planes) {
          return NumberAt<double>(format_, Upper(item, g), Lower(item, g), planes, {side, t, c});
        };
        n.coarse_keys.push_back(number(PlanesSide::kKeys, 1));
        n.fine_keys.push_back(number(PlanesSide::kKeys, format_.planes()));
        n.coarse_values.push_back(number(PlanesSide::kValues, 1));
        n.fine_values.push_back(number(PlanesSide::kValues, format_.planes()));
      }
    }
  }

  // Groups to blocks [kv_heads][block_groups] at random places of one array.
  void Place() {
    const int blocks = (s_.groups_max + s_.block_groups - 1) / s_.block_groups;
    std::vector<int> places(static_cast<size_t>(blocks) * s_.batch);
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), rng_);
    PlaceRuns(places, blocks, format_.upper_bytes(), upper_, 64, device_upper_, upper_table_,
              work_.planes.upper);
    PlaceRuns(places, blocks, format_.lower_bytes(), lower_, 32, device_lower_, lower_table_,
              work_.planes.lower);
    work_.planes.format = format_;
    work_.planes.block_stride = blocks;
    work_.planes.block_groups = s_.block_groups;
    work_.planes.kv_heads = s_.kv_heads;
  }
  void PlaceRuns(const std::vector<int>& places, int blocks, int64_t run,
                 const std::vector<std::byte>& from, int64_t offset, DeviceArray<std::byte>& memory,
                 DeviceArray<uint64_t>& table, DeviceRuns& runs) {
    const int64_t head = s_.block_groups * run, block = offset + s_.kv_heads * head;
    std::vector<std::byte> bytes(places.size() * block, std::byte{0xFF});
    memory = DeviceArray<std::byte>(bytes.size());
    std::vector<uint64_t> addresses(places.size());
    for (int b = 0; b < s_.batch; ++b) {
      for (int g = 0; g < blocks * s_.block_groups; ++g) {
        const size_t entry = static_cast<size_t>(b) * blocks + g / s_.block_groups;
        const int64_t at = places[entry] * block;
        addresses[entry] = memory.address() + at;
        for (int h = 0; g < s_.groups_max && h < s_.kv_heads; ++h) {
          const size_t item = static_cast<size_t>(b) * s_.kv_heads + h;
          std::copy_n(&from[(item * s_.groups_max + g) * run], run,
                      &bytes[at + offset + h * head + g % s_.block_groups * run]);
        }
      }
    }
    memory.Write(bytes);
    table = DeviceArray<uint64_t>(addresses);
    runs = {table.get(), offset, head};
  }

  // Queries have some of the keys of a few tokens; raw rows' partials are about as heavy.
  void FillQueries() {
    const float scale = 1 / std::sqrt(static_cast<float>(s_.dim));
    q_.resize(Rows() * s_.dim);
    for (size_t row = 0; row < Rows(); ++row) {
      const std::vector<float>& keys = keys_[row / s_.group];
      const size_t token = rng_() % (static_cast<size_t>(s_.groups_max) * kUnit);
      const float* key = &keys[token * s_.dim];
      float square = 0;
      for (int c = 0; c < s_.dim; ++c) square += key[c] * key[c];
      const float share =
          s_.spike > 0 ? s_.spike / (scale * square) : s_.sharpness * Normal(rng_) * 0.2f;
      for (int c = 0; c < s_.dim; ++c) {
        const float x = s_.sharpness * Normal(rng_) + share * key[c];
        q_[row * s_.dim + c] = RoundedTo(s_.q_dtype, x);
      }
    }
    for (size_t i = 0; i < Rows() * s_.raw_parts; ++i) {
      raw_m_.push_back(2 * Normal(rng_));
      raw_l_.push_back(1 + static_cast<float>(Below(rng_, 20)));
      for (int c = 0; c < s_.dim; ++c) raw_o_.push_back(raw_l_.back() * Normal(rng_));
    }
    work_.scale = scale;
  }

  void Allocate() {
    const size_t rows = Rows();
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s_.q_dtype));
    device_m_ = DeviceArray<float>(raw_m_);
    device_l_ = DeviceArray<float>(raw_l_);
    device_o_ = DeviceArray<float>(raw_o_);
    device_tokens_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
    device_groups_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
    out_ = DeviceArray<float>(rows * s_.dim);
    lse_ = DeviceArray<float>(rows);
    partial_ = DeviceArray<float>(rows * (s_.dim + 2));
    fine_ = DeviceArray<uint8_t>(Items() * Stride());
    strips_ = DeviceArray<uint8_t>(Items() * Stride() / 16);
    fetched_ = DeviceArray<uint64_t>(Items());
    AttendPlanesBatch& w = work_;
    w.rule = s_.rule;
    w.batch = s_.batch;
    w.group = s_.group;
    w.tokens = device_tokens_.get();
    w.groups = device_groups_.get();
    w.q = device_q_.get();
    w.q_dtype = s_.q_dtype;
    w.q_stride = int64_t{s_.kv_heads} * s_.group * s_.dim;
    w.ahead = s_.ahead;
    w.with = {device_m_.get(), device_l_.get(), device_o_.get(), s_.raw_parts};
    if (s_.merges) w.to = {out_.get(), DType::kF32, lse_.get()};
    float* const o = partial_.get();
    w.partial = {o + rows * s_.dim, o + rows * (s_.dim + 1), o, 1};
    w.report = {fine_.get(), strips_.get(), static_cast<int64_t>(Stride()), fetched_.get()};
    workspace_ = DeviceArray<std::byte>(std::vector<std::byte>(
        static_cast<size_t>(kvs_cuda_ops()->attend_planes_workspace_bytes(w))));
    w.workspace = workspace_.get();
  }

  int Sealed(size_t item) const { return sealed_[item / s_.kv_heads] * kUnit; }
  int Start(size_t item) const { return std::min(s_.rule.sinks, Sealed(item)); }
  int Stop(size_t item) const {
    const int before = std::max(tokens_[item / s_.kv_heads] - s_.rule.recent, 0);
    return std::max(Start(item), std::min(before, Sealed(item)));
  }

  double Logit(size_t row, const std::vector<double>& keys, int token) const {
    double sum = 0;
    for (int c = 0; c < s_.dim; ++c) {
      sum += keys[static_cast<size_t>(token) * s_.dim + c] * q_[row * s_.dim + c];
    }
    return sum * work_.scale;
  }

  // Rule 3.
  double LogNormaliser(size_t item, size_t row) const {
    const Numbers& n = coarse_[item];
    const int start = Start(item), stop = Stop(item), every = s_.rule.sample;
    std::vector<double> always = {RawLogSum(row)}, sampled, all;
    for (int t = 0; t < Sealed(item); ++t) {
      if (t < start || t >= stop) {
        always.push_back(Logit(row, n.fine_keys, t));
        continue;
      }
      all.push_back(Logit(row, n.coarse_keys, t));
      if (t / kUnit % every == (every - 1) / 2) sampled.push_back(all.back());
    }
    if (all.empty()) return 0;
    if (sampled.empty()) sampled = all;
    const double top = *std::ranges::max_element(sampled);
    double rest = 0;
    for (double x : sampled) rest += std::exp(x - top);
    rest = (rest - 1) * static_cast<double>(all.size()) / static_cast<double>(sampled.size());
    double sum = std::exp(top) * (1 + rest);
    for (double x : always) sum += std::exp(x);
    return std::log(sum);
  }

  // Weights of the rule, times N: [token], the largest of the heads; NaN if one is.
  std::vector<double> Weights(size_t item) const {
    std::vector<double> weights(static_cast<size_t>(Sealed(item)), 0.0);
    for (int g = 0; g < s_.group && Start(item) < Stop(item); ++g) {
      const size_t row = item * s_.group + g;
      const double normaliser = LogNormaliser(item, row);
      for (int t = 0; t < Sealed(item); ++t) {
        const double weight = std::exp(Logit(row, coarse_[item].coarse_keys, t) - normaliser) *
                              tokens_[item / s_.kv_heads];
        double& largest = weights[static_cast<size_t>(t)];
        if (std::isnan(weight) || weight > largest) largest = weight;
        if (std::isnan(weight)) break;
      }
    }
    return weights;
  }

  PlanesItemErrors Compare(size_t item, double margin) {
    PlanesItemErrors e;
    CompareChoice(item, margin, e);
    for (int g = 0; g < s_.group; ++g) CompareRow(item, item * s_.group + g, e);
    return e;
  }

  void CompareChoice(size_t item, double margin, PlanesItemErrors& e) {
    const std::vector<double> weights = Weights(item);
    const uint8_t *fine = got_fine(item), *strips = got_strips(item);
    const auto check = [&](bool got, bool want, double weight, double limit, int token,
                           int& wrong) {
      if (got == want) return;
      if (std::abs(weight - limit) <= margin * limit) {
        ++e.near_ties;
        return;
      }
      ++wrong;
      if (e.first_wrong >= 0) return;
      e.first_wrong = token;
      e.weight = weight;
      e.limit = limit;
    };
    const double fine_above = s_.rule.fine_above, skip = s_.rule.skip_below;
    for (int strip = 0; strip < Sealed(item) / 16; ++strip) {
      bool has_fine = false, has_nan = false;
      double largest = 0;
      for (int t = 16 * strip; t < 16 * strip + 16; ++t) {
        const double weight = weights[static_cast<size_t>(t)];
        const bool always = t < Start(item) || t >= Stop(item);
        check(fine[t] == 1, always || weight >= fine_above, always ? -1e9 : weight, fine_above, t,
              e.wrong_fine);
        EXPECT_LE(fine[t], 1) << Name(item) << ": token " << t << " has no flag";
        has_fine |= fine[t] == 1;
        has_nan |= std::isnan(weight);
        largest = std::max(largest, weight);
        fine_tokens_ += !always && fine[t] == 1;
        candidates_ += !always;
      }
      check(strips[strip] == 1, has_fine || has_nan || !(largest < skip),
            has_fine || has_nan ? -1e9 : largest, skip, 16 * strip, e.wrong_strips);
    }
  }

  // Rule 6 over what the device chose.
  void CompareRow(size_t item, size_t row, PlanesItemErrors& e) {
    const Numbers& n = coarse_[item];
    std::vector<double> logits;
    double top = -std::numeric_limits<double>::infinity();
    for (int t = 0; t < Sealed(item); ++t) {
      logits.push_back(Logit(row, got_fine(item)[t] == 1 ? n.fine_keys : n.coarse_keys, t));
      if (got_strips(item)[t / 16] == 1) top = std::max(top, logits.back());
    }
    std::vector<double> o(s_.dim, 0.0);
    double l = 0;
    for (int t = 0; t < Sealed(item); ++t) {
      if (got_strips(item)[t / 16] != 1) continue;
      const double weight = std::exp(logits[static_cast<size_t>(t)] - top);
      const auto& values = got_fine(item)[t] == 1 ? n.fine_values : n.coarse_values;
      l += weight;
      for (int c = 0; c < s_.dim; ++c) o[c] += weight * values[static_cast<size_t>(t) * s_.dim + c];
    }
    RotateHadamard(o.data(), s_.dim);
    CheckRow(row, top, l, o, e);
  }

  // Partials merged with those of raw rows: what a part of no weight is off by does not count.
  struct Merged {
    double lse = 0;
    std::vector<double> o;
  };
  Merged MergedRow(size_t row, double m, double l, const std::vector<double>& o) const {
    const auto dim = static_cast<size_t>(s_.dim);
    double top = l == 0 ? -std::numeric_limits<double>::infinity() : m, sum = 0;
    for (int part = 0; part < s_.raw_parts; ++part) {
      top = std::max<double>(top, raw_m_[part * Rows() + row]);
    }
    const double own = l == 0 ? 0 : std::exp(m - top);
    Merged merged;
    for (size_t c = 0; c < dim; ++c) merged.o.push_back(own == 0 ? 0 : own * o[c]);
    sum = own == 0 ? 0 : own * l;
    for (int part = 0; part < s_.raw_parts; ++part) {
      const size_t at = part * Rows() + row;
      const double weight = std::exp(raw_m_[at] - top);
      sum += weight * raw_l_[at];
      for (size_t c = 0; c < dim; ++c) merged.o[c] += weight * raw_o_[at * dim + c];
    }
    for (double& x : merged.o) x /= sum;
    merged.lse = top + std::log(sum);
    return merged;
  }

  const PlanesShape s_;
  Rng& rng_;
  PlanesFormat format_;
  std::vector<std::byte> upper_, lower_;  // [item][group]
  std::vector<std::vector<float>> keys_;  // of each item, before they are sealed
  std::vector<Numbers> coarse_;           // of each item
  std::vector<float> q_, raw_m_, raw_l_, raw_o_;
  std::vector<int32_t> tokens_, sealed_;
  AttendPlanesBatch work_;
  DeviceArray<std::byte> device_upper_, device_lower_, device_q_, workspace_;
  DeviceArray<uint64_t> upper_table_, lower_table_, fetched_;
  DeviceArray<float> device_m_, device_l_, device_o_, out_, lse_, partial_;
  DeviceArray<int32_t> device_tokens_, device_groups_;
  DeviceArray<uint8_t> fine_, strips_;
  std::vector<float> got_, got_lse_;
  std::vector<uint8_t> got_fine_, got_strips_;
  std::vector<uint64_t> got_fetched_;
  int fine_tokens_ = 0, candidates_ = 0, tied_ = 0;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_PLANES_CASE_H_
