// SPDX-License-Identifier: Apache-2.0
// What steps of plan strata over an engine's own blocks have to give, by all rows of a sequence as
// the engine made them and ops `ref`. For tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/plan/plan.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {

// All keys and values of one layer and KV head of a sequence, [token][dim], and its sealed groups,
// upper run before lower one.
struct HeadRows {
  std::vector<std::byte> keys, values;
  std::vector<std::vector<std::byte>> groups;
};

class PlanesOracle {
 public:
  PlanesOracle(const Plan& plan, const Geometry& geometry)
      : plan_(plan), g_(geometry), format_{geometry.head_dim, kUnit, plan.planes.keep} {}

  const PlanesFormat& format() const { return format_; }

  // Seals the groups of `rows` that are full and were not.
  void Seal(HeadRows* rows) const {
    const auto full = rows->keys.size() / static_cast<size_t>(kUnit * g_.row_bytes());
    while (rows->groups.size() < full) {
      const auto first = static_cast<int32_t>(rows->groups.size()) * kUnit;
      std::vector<std::byte> group(
          static_cast<size_t>(format_.upper_bytes() + format_.lower_bytes()));
      std::byte *keys = rows->keys.data(), *values = rows->values.data();
      PackPlanesWork w;
      w.keys = {&keys, 0, g_.row_bytes(), 1 << 20, g_.head_dim, g_.dtype};
      w.values = {&values, 0, g_.row_bytes(), 1 << 20, g_.head_dim, g_.dtype};
      w.begin = first;
      w.format = format_;
      w.upper = group.data();
      w.lower = group.data() + format_.upper_bytes();
      PackPlanesRef(&w, 1, InlineExecutor());
      rows->groups.push_back(std::move(group));
    }
  }

  // Rows [0, tokens) as a prompt of which `before` tokens were there has to find them.
  HeadRows Gathered(const HeadRows& rows, int32_t before) const {
    HeadRows all{rows.keys, rows.values, {}};
    for (int32_t g = 0; g < before / kUnit; ++g) {
      std::vector<float> keys(static_cast<size_t>(kUnit * g_.head_dim)), values(keys.size());
      const std::byte* const group = rows.groups[static_cast<size_t>(g)].data();
      const UnpackPlanesWork w{format_, group, group + format_.upper_bytes(), keys.data(),
                               values.data()};
      UnpackPlanesRef(&w, 1, InlineExecutor());
      for (size_t i = 0; i < keys.size(); ++i) {
        const size_t at = (static_cast<size_t>(g) * keys.size() + i) * 2;
        StoreAs(g_.dtype, &all.keys[at], keys[i]);
        StoreAs(g_.dtype, &all.values[at], values[i]);
      }
    }
    return all;
  }

  // The largest relative error of the query heads of one KV head, behind a step that attends all
  // rows; q, out [group][dim] in the model's dtype. 0 where it is above `limit` and what is chosen
  // is a near-tie.
  double ErrorOf(const HeadRows& rows, const PlanesRule& rule, const std::byte* q,
                 const std::byte* out, double limit) {
    std::vector<float> queries;
    for (int i = 0; i < g_.group() * g_.head_dim; ++i) {
      queries.push_back(LoadAs(g_.dtype, q + 2 * i));
    }
    const Answer want = Answered(rows, rule, queries);
    ++compared_;
    const double error = Apart(want, out);
    if (error < limit) return error;
    for (const double part : {0.95, 1.05}) {
      PlanesRule other = rule;
      other.fine_above *= part, other.skip_below *= part;
      if (Answered(rows, other, queries).chosen == want.chosen) continue;
      ++near_ties_;
      return 0;
    }
    return error;
  }

  // A step's rule for a sequence of so many tokens.
  PlanesRule RuleOf(int layer, bool in_full, int32_t tokens) const {
    const auto& o = plan_.fine;
    PlanesRule rule{0, o.fine_above, o.skip_below, 1, o.sample, o.sinks, o.recent};
    if (in_full || tokens < plan_.min_tokens || layer < plan_.n_dense_layers) rule.recent = 1 << 29;
    return rule;
  }

  // KV heads, in all calls, and those that were near-ties.
  int compared() const { return compared_; }
  int near_ties() const { return near_ties_; }

 private:
  static constexpr int32_t kUnit = 64;

  struct Answer {
    std::vector<float> rows;      // [group][dim]
    std::vector<uint8_t> chosen;  // fine [tokens], then strips
  };

  int32_t TokensOf(const HeadRows& rows) const {
    return static_cast<int32_t>(static_cast<int64_t>(rows.keys.size()) / g_.row_bytes());
  }
  // The largest |out - want| / |want| of a head.
  double Apart(const Answer& want, const std::byte* out) const {
    double worst = 0;
    for (size_t h = 0; h < static_cast<size_t>(g_.group()); ++h) {
      double off = 0, norm = 0;
      for (size_t c = 0; c < static_cast<size_t>(g_.head_dim); ++c) {
        const size_t at = h * static_cast<size_t>(g_.head_dim) + c;
        const double x = want.rows[at], d = LoadAs(g_.dtype, out + 2 * at) - x;
        off += d * d;
        norm += x * x;
      }
      const double error = std::sqrt(off / norm);
      worst = std::max(worst, std::isnan(error) ? INFINITY : error);
    }
    return worst;
  }

  Answer Answered(const HeadRows& rows, const PlanesRule& rule, const std::vector<float>& q) const {
    const int32_t tokens = TokensOf(rows), groups = (tokens - 1) / kUnit;
    const auto dim = static_cast<size_t>(g_.head_dim), heads = static_cast<size_t>(g_.group());
    std::vector<float> m(2 * heads, -INFINITY), l(2 * heads), o(2 * heads * dim);
    auto* keys = const_cast<std::byte*>(rows.keys.data());
    auto* values = const_cast<std::byte*>(rows.values.data());
    const Run run{groups * kUnit, tokens};
    AttendWork raw;
    raw.k = {&keys, 0, g_.row_bytes(), 1 << 20, g_.head_dim, g_.dtype};
    raw.v = {&values, 0, g_.row_bytes(), 1 << 20, g_.head_dim, g_.dtype};
    raw.q = q.data();
    raw.group = g_.group();
    raw.position = tokens - 1;
    raw.runs = &run;
    raw.run_count = 1;
    raw.scale = g_.logit_scale();
    raw.m = &m[heads], raw.l = &l[heads], raw.o = &o[heads * dim];
    AttendRawRef(&raw, 1, InlineExecutor());
    std::vector<const std::byte*> upper, lower;
    for (int32_t g = 0; g < groups; ++g) {
      upper.push_back(rows.groups[static_cast<size_t>(g)].data());
      lower.push_back(upper.back() + format_.upper_bytes());
    }
    Answer answer{std::vector<float>(heads * dim),
                  std::vector<uint8_t>(static_cast<size_t>(groups * (kUnit + 4)))};
    if (groups > 0) {
      AttendPlanesWork w;
      w.rows = {format_, upper.data(), lower.data(), groups};
      w.rule = rule;
      w.tokens = tokens;
      w.q = q.data();
      w.group = g_.group();
      w.scale = raw.scale;
      w.raw_m = raw.m, w.raw_l = raw.l;
      w.m = m.data(), w.l = l.data(), w.o = o.data();
      w.fine = answer.chosen.data();
      w.strips = answer.chosen.data() + groups * kUnit;
      AttendPlanesRef(&w, 1, InlineExecutor());
    }
    const MergeWork merge{m.data(),   l.data(),    o.data(),           2, g_.group(),
                          g_.group(), g_.head_dim, answer.rows.data(), 0, nullptr,
                          0};
    MergeRef(&merge, 1, InlineExecutor());
    return answer;
  }

  const Plan plan_;
  const Geometry g_;
  const PlanesFormat format_;
  int compared_ = 0, near_ties_ = 0;
};

}  // namespace kvstrata
