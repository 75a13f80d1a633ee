// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/step.h"

#include <algorithm>

#include "kernels/step/finite_rows.h"
#include "kernels/step/shadow_attention.h"
#include "kernels/step/step_cost.h"

namespace kvstrata {
namespace {

// New tokens that one append item copies.
constexpr int32_t kAppendTile = 64;

SourceRows SourceFrom(const Rows& rows, int64_t token) {
  return {rows.data + token * rows.token_stride, rows.token_stride, rows.head_stride, rows.dtype};
}

}  // namespace

Step::Step(std::vector<StepMember> members, const Backend& backend, Executor& executor)
    : StepBatch(std::move(members)),
      chunks_(CutChunks(members_)),
      cost_(members_.size()),
      backend_(backend),
      executor_(executor),
      queries_(geometry(), executor),
      outputs_(geometry(), executor),
      tiles_(members_, chunks_),
      works_(backend, executor) {
  last_chunk_.resize(members_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) last_chunk_[chunks_[i].member] = static_cast<int>(i);
  for (const StepMember& m : members_) m.state->CatchUp(m.view, backend_, executor_);
}

Step::~Step() = default;

Status Step::Append(int layer, const Rows& k, const Rows& v) {
  std::vector<AppendWork> works;
  works.reserve(members_.size() + static_cast<size_t>(tokens_) / kAppendTile);
  for (size_t i = 0; i < members_.size(); ++i) {
    const StepMember& m = members_[i];
    for (int32_t t = 0; t < m.new_tokens; t += kAppendTile) {
      AppendWork& w = works.emplace_back();
      w.pages = m.view.pages;
      w.layout = PageLayout::Of(geometry());
      w.layer = layer;
      w.position = m.view.tokens + t;
      w.tokens = std::min(kAppendTile, m.new_tokens - t);
      w.k = SourceFrom(k, first_row_[i] + t);
      w.v = SourceFrom(v, first_row_[i] + t);
    }
  }
  if (backend_.append(works.data(), static_cast<int64_t>(works.size()), executor_)) {
    return OkStatus();
  }
  return CheckFinite(*this, k, v);
}

void Step::SelectChunk(int layer, const Rows& q, StepChunk* chunk) {
  const StepMember& m = members_[chunk->member];
  SequenceState& state = *m.state;
  const int32_t start = m.view.tokens + chunk->begin;
  const bool prompt = state.prompt_tokens() < 0;
  const auto [queries, q_token] =
      queries_.Of(q, first_row_[chunk->member] + chunk->begin, prompt ? chunk->count : 1);
  const SelectContext context = state.Context(m.view, &backend_, &executor_);
  if (layer < state.plan().n_dense_layers) return chunk->selection.SetFull(start + 1);
  if (!prompt) return state.selector().Select(context, layer, queries, &chunk->selection);
  const PromptQueries own = {queries, q_token, start, chunk->count, layer == selected_layer_};
  if (!state.selector().SelectChunk(context, layer, own, &chunk->selection)) {
    chunk->selection.SetFull(start + 1);
  }
}

void Step::Select(int layer, const Rows& q) {
  for (StepChunk& chunk : chunks_) SelectChunk(layer, q, &chunk);
  selected_layer_ = layer;
}

void Step::Choose(int layer, Selection selection) {
  KVS_CHECK(chunks_.size() == 1);
  chunks_[0].selection = std::move(selection);
  selected_layer_ = layer;
}

void Step::CountCosts(int layer) {
  std::vector<ReadChunk> read;
  for (size_t first = 0; first < chunks_.size(); first += read.size()) {
    const int member = chunks_[first].member;
    const StepMember& m = members_[member];
    read.clear();
    for (size_t i = first; i < chunks_.size() && chunks_[i].member == member; ++i) {
      const StepChunk& chunk = chunks_[i];
      read.push_back({&chunk.selection, m.view.tokens + chunk.begin, chunk.count});
    }
    cost_[member] = CostOf(m, layer, StoredEnd(m), read);
  }
}

void Step::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  if (selected_layer_ != layer) Select(layer, q);
  const auto [queries, q_token] = queries_.Of(q, 0, tokens_);
  const DenseOutputs::Answer to = outputs_.For(out, tokens_);
  reads_.assign(members_.size(), {});
  const LayerTensors t{
      layer, queries, q_token, to.data, to.token, lse, geometry().query_heads, reads_.data()};
  tiles_.Plan();
  CountCosts(layer);
  works_.Attend(tiles_, first_row_, t);
  for (size_t i = 0; i < reads_.size(); ++i) {
    cost_[i].rows += reads_[i].rows;
    cost_[i].coarse_rows += reads_[i].coarse_rows;
    cost_[i].attend_bytes += reads_[i].bytes;
  }
  if (!shadows_.empty()) MeasureShadows(t);
  if (!to.in_place) outputs_.Store(to, tokens_, out);
}

void Step::Shadow(int member) {
  KVS_CHECK(Decodes(member));
  shadows_.resize(members_.size());
  shadows_[member] = std::make_unique<ShadowAttention>(members_[member], backend_, executor_);
}

const ShadowAttention* Step::shadow(int member) const {
  return shadows_.empty() ? nullptr : shadows_[member].get();
}

void Step::MeasureShadows(const LayerTensors& t) {
  for (int i = 0; i < members(); ++i) {
    if (shadows_[i] == nullptr) continue;
    std::vector<std::vector<Run>> attended;
    for (int group = 0; group < Groups(i); ++group) attended.push_back(Positions(i, group));
    const int64_t row = first_row_[i];
    shadows_[i]->Measure(t.layer, t.q + row * t.q_token, t.out + row * t.out_token, attended);
  }
}

void Step::End() {
  for (const StepMember& m : members_) {
    if (m.kept) m.state->Advance(m.new_tokens);
  }
}

}  // namespace kvstrata
