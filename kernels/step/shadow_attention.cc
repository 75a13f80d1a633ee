// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/shadow_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvstrata {
namespace {

// The sequence without its index and its extents, which plan `full` does not read.
StepMember RawMember(const StepMember& m, SequenceState* state) {
  SequenceView view;
  view.pages = m.view.pages;
  view.tokens = m.view.tokens;
  return {state, view, m.new_tokens};
}

}  // namespace

bool IsRawGone(const StepMember& member) {
  const int32_t page_tokens = member.state->geometry().page_tokens;
  const int32_t pages = (member.view.tokens + page_tokens - 1) / page_tokens;
  return std::any_of(member.view.pages, member.view.pages + pages,
                     [](const std::byte* page) { return page == nullptr; });
}

float MassOf(float attended_lse, float full_lse) {
  const float mass = std::exp(attended_lse - full_lse);
  return std::isnan(mass) ? 0.0f : std::min(1.0f, mass);
}

float OutputError(const float* out, const float* full, int32_t dim) {
  double distance = 0, size = 0;
  for (int32_t c = 0; c < dim; ++c) {
    const double d = double{out[c]} - double{full[c]};
    distance += d * d;
    size += double{full[c]} * double{full[c]};
  }
  if (distance == 0) return 0;
  const auto error = static_cast<float>(std::sqrt(distance / size));
  return std::isfinite(error) ? error : std::numeric_limits<float>::max();
}

ShadowAttention::ShadowAttention(const StepMember& member, const Backend& backend,
                                 Executor& executor)
    : state_(member.state->geometry(), Plan(), member.view.tokens, 0),
      sample_{IsRawGone(member), {}, {}, {}},
      step_({RawMember(member, &state_)}, backend, executor) {
  KVS_CHECK(member.new_tokens == 1);
}

void ShadowAttention::Attend(int layer, const float* q, const Selection* selection,
                             std::vector<float>* lse) {
  const Geometry& g = state_.geometry();
  const int64_t head = g.head_dim * int64_t{sizeof(float)};
  const Rows queries{reinterpret_cast<const std::byte*>(q), g.query_heads * head, head,
                     DType::kF32};
  out_.resize(static_cast<size_t>(int64_t{g.query_heads} * g.head_dim));
  lse->resize(static_cast<size_t>(g.query_heads));
  if (selection == nullptr) {
    step_.Select(layer, queries);
  } else {
    step_.Choose(layer, *selection);
  }
  step_.Attend(layer, queries,
               {reinterpret_cast<std::byte*>(out_.data()), queries.token_stride, head, DType::kF32},
               lse->data());
}

// Layers come in order, once each, but for an engine that attends one again.
size_t ShadowAttention::RowOf(int layer) {
  const auto at = std::ranges::lower_bound(sample_.layers, layer);
  const auto row = static_cast<size_t>(at - sample_.layers.begin());
  if (at != sample_.layers.end() && *at == layer) return row;
  sample_.layers.insert(at, layer);
  const auto heads = static_cast<size_t>(state_.geometry().query_heads);
  const auto first = static_cast<ptrdiff_t>(row * heads);
  sample_.recall.insert(sample_.recall.begin() + first, heads, 0.0f);
  sample_.error.insert(sample_.error.begin() + first, heads, 0.0f);
  return row;
}

void ShadowAttention::Measure(int layer, const float* q, const float* out,
                              const std::vector<std::vector<Run>>& attended) {
  if (sample_.raw_gone) return;
  const Geometry& g = state_.geometry();
  const size_t first = RowOf(layer) * static_cast<size_t>(g.query_heads);
  Selection positions;
  positions.Reset(state_.tokens() + 1, static_cast<int>(attended.size()));
  positions.runs = attended;
  Attend(layer, q, &positions, &attended_lse_);
  Attend(layer, q, nullptr, &full_lse_);
  for (int32_t h = 0; h < g.query_heads; ++h) {
    const auto i = static_cast<size_t>(h);
    const int64_t row = int64_t{h} * g.head_dim;
    sample_.recall[first + i] = MassOf(attended_lse_[i], full_lse_[i]);
    sample_.error[first + i] = OutputError(out + row, out_.data() + row, g.head_dim);
  }
}

}  // namespace kvstrata
