// SPDX-License-Identifier: Apache-2.0
// A sequence with a Recompressor: raw pages and extents in this process's memory, without a store.
// What is released is overwritten with NaN and its whole pages go, as a store would have it.
//
// Threads: none of it is shared.
#pragma once

#include <cmath>

#include "kernels/plans/mosaickv/packed.h"
#include "kernels/plans/sekv/lowrank.h"
#include "kernels/plans/sekv/span_parameters.h"
#include "kernels/plans/strata/planes.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {

inline Plan PackedPlan() {
  Plan plan;
  plan.name = "custom";
  plan.selector = SelectorKind::kBlock;
  plan.codec = CodecKind::kPacked;
  plan.stored.max_loss = 1;  // random rows lose much
  plan.min_tokens = 0;
  return plan;
}

inline Plan SpanPlan() {
  Plan plan;
  plan.name = "custom";
  plan.selector = SelectorKind::kZoom;
  plan.codec = CodecKind::kLowRank;
  plan.stored.max_loss = 1;
  plan.min_tokens = 0;
  plan.lowrank.local = 32;
  plan.lowrank.r_max = 8;
  plan.lowrank.d_route = 16;
  return plan;
}

inline Plan PlanesPlan() {
  Plan plan;
  plan.name = "custom";
  plan.selector = SelectorKind::kFine;
  plan.codec = CodecKind::kPlanes;
  plan.min_tokens = 0;
  return plan;
}

inline SpanParameters SomeParameters(const Geometry& g, const Plan& plan) {
  SpanParameters p;
  p.layers = g.layers, p.query_heads = g.query_heads, p.head_dim = g.head_dim;
  p.d_route = plan.lowrank.d_route, p.r_max = plan.lowrank.r_max;
  p.w.resize(static_cast<size_t>(g.layers * g.query_heads * plan.lowrank.d_route * g.head_dim));
  for (size_t i = 0; i < p.w.size(); ++i) p.w[i] = static_cast<float>(i % 97) - 48;
  p.tau.assign(static_cast<size_t>(g.layers * g.query_heads), 0.25f);
  const int32_t sizes[] = {plan.lowrank.r_max + g.head_dim, 64, 64, plan.lowrank.r_max};
  for (int i = 0; i < 3; ++i) {
    p.weight[i].assign(static_cast<size_t>(sizes[i] * sizes[i + 1]), 0.0f);
    p.bias[i].assign(static_cast<size_t>(sizes[i + 1]), 0.0f);
  }
  return p;
}

using Bytes = std::vector<std::byte>;

class CodecSequence {
 public:
  CodecSequence(const Plan& plan, const Geometry& geometry, const Inputs& in,
                std::shared_ptr<const SpanParameters> parameters = nullptr,
                std::string_view backend = "ref", const Codec* codec = nullptr)
      : g_(geometry),
        in_(in),
        recompressor_(codec == nullptr || !codec->stores()
                          ? NewRecompressor(plan, geometry, std::move(parameters))
                          : codec->recompressor(plan, geometry, std::move(parameters))),
        backend_(*FindBackend(backend)) {}

  // Appends raw rows up to `end`.
  void Commit(int32_t end) {
    const PageLayout layout = PageLayout::Of(g_);
    for (; tokens_ < end; ++tokens_) {
      if (tokens_ % g_.page_tokens == 0) {
        pages_.emplace_back(static_cast<size_t>(g_.page_bytes()), std::byte{0xFF});
        page_addresses_.push_back(pages_.back().data());
      }
      std::byte* page = pages_[static_cast<size_t>(tokens_ / g_.page_tokens)].data();
      for (int layer = 0; layer < g_.layers; ++layer) {
        for (int h = 0; h < g_.kv_heads; ++h) {
          const int slot = tokens_ % g_.page_tokens;
          StoreDense(g_.dtype, in_.Key(tokens_, layer, h), g_.head_dim,
                     page + layout.KeyOffset(layer, h, slot));
          StoreDense(g_.dtype, in_.Value(tokens_, layer, h), g_.head_dim,
                     page + layout.ValueOffset(layer, h, slot));
        }
      }
    }
  }
  void Report(std::vector<float> surprisal) { surprisal_ = std::move(surprisal); }
  void PrefillDone() { prompt_ = tokens_; }

  RecompressInput Input() {
    RecompressInput input;
    input.view = View();
    input.prompt_tokens = prompt_;
    input.indexed_tokens = indexed < 0 ? tokens_ : indexed;
    input.surprisal = surprisal_;
    input.backend = backend_;
    input.executor = executor == nullptr ? &InlineExecutor() : executor;
    input.cancelled = &cancelled;
    return input;
  }
  SequenceView View() {
    views_.clear();
    for (size_t i = 0; i < extents_.size(); ++i) {
      views_.push_back(
          {extents_[i].data(), static_cast<int64_t>(extents_[i].size()), tokens_of_[i]});
    }
    SequenceView view;
    view.pages = page_addresses_.data();
    view.tokens = tokens_;
    view.extents = views_.data();
    view.extent_count = static_cast<int32_t>(views_.size());
    return view;
  }

  // One unit of work.
  Status RunOnce() {
    Result<RecompressOutput> output = recompressor_->Run(Input());
    if (!output.ok()) return output.status();
    std::vector<Bytes> extents;
    std::vector<Run> tokens;
    for (ExtentDraft& draft : output->extents) {
      if (draft.kept >= 0) {
        EXPECT_EQ(draft.tokens, tokens_of_[static_cast<size_t>(draft.kept)]);
      }
      extents.push_back(draft.kept >= 0 ? extents_[static_cast<size_t>(draft.kept)]
                                        : std::move(draft.bytes));
      tokens.push_back(draft.tokens);
    }
    extents_ = std::move(extents);
    tokens_of_ = std::move(tokens);
    if (!output->warning.empty()) warnings_.push_back(output->warning);
    Release(output->released);
    return OkStatus();
  }
  // Runs until nothing is due.
  void Settle() {
    for (int i = 0; recompressor_ != nullptr && recompressor_->Due(Input()); ++i) {
      ASSERT_LT(i, 10000) << "always due";
      const Status status = RunOnce();
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }

  Recompressor& recompressor() { return *recompressor_; }
  void UseCloneOf(const Recompressor& other) { recompressor_ = other.Clone(); }
  const std::vector<Bytes>& extents() const { return extents_; }
  std::vector<Bytes>& mutable_extents() { return extents_; }
  const std::vector<Run>& released() const { return released_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  int32_t tokens() const { return tokens_; }
  const Geometry& geometry() const { return g_; }
  const Backend& backend() const { return *backend_; }

  SelectContext Context(const StoredRows* stored) {
    SelectContext context;
    context.geometry = &g_;
    context.layout = PageLayout::Of(g_);
    context.view = View();
    context.backend = backend_;
    context.executor = &InlineExecutor();
    context.surprisal = surprisal_;
    context.prompt_tokens = prompt_;
    context.stored = stored;
    return context;
  }

  std::atomic<bool> cancelled = false;
  int32_t indexed = -1;          // -1: no index
  Executor* executor = nullptr;  // null: inline
  bool keep_pages = false;       // released rows stay as they are

 private:
  void Release(const std::vector<Run>& released) {
    released_ = released;
    if (keep_pages) return;
    for (const Run& run : released) {
      for (int32_t page = (run.begin + g_.page_tokens - 1) / g_.page_tokens;
           (page + 1) * g_.page_tokens <= run.end; ++page) {
        page_addresses_[static_cast<size_t>(page)] = nullptr;
        std::ranges::fill(pages_[static_cast<size_t>(page)], std::byte{0xFF});
      }
    }
  }

  Geometry g_;
  const Inputs& in_;
  std::unique_ptr<Recompressor> recompressor_;
  const Backend* backend_;
  int32_t tokens_ = 0, prompt_ = -1;
  std::vector<Bytes> pages_;
  std::vector<std::byte*> page_addresses_;
  std::vector<Bytes> extents_;
  std::vector<Run> tokens_of_;
  std::vector<ExtentView> views_;
  std::vector<float> surprisal_;
  std::vector<Run> released_;
  std::vector<std::string> warnings_;
};

// --- attention over what is stored ---

// Attention of one query over some rows, in double precision.
struct Attention {
  double m = -INFINITY, l = 0;
  std::vector<double> o;

  explicit Attention(int32_t dim) : o(static_cast<size_t>(dim)) {}
  template <typename T>
  void Merge(double om, double ol, const T* oo) {
    if (ol == 0) return;
    const double next = std::max(m, om), mine = std::exp(m - next), theirs = std::exp(om - next);
    l = l * mine + ol * theirs;
    for (size_t c = 0; c < o.size(); ++c) o[c] = o[c] * mine + double{oo[c]} * theirs;
    m = next;
  }
  std::vector<double> Output() const {
    std::vector<double> out = o;
    for (double& x : out) x /= l;
    return out;
  }
};

inline void AttendRow(const float* q, const float* k, const float* v, int32_t dim, Attention* a) {
  double dot = 0;
  for (int32_t c = 0; c < dim; ++c) dot += double{q[c]} * double{k[c]};
  a->Merge(dot / std::sqrt(double(dim)), 1, v);
}

// Rows [begin, end) of the inputs as they were before any codec.
inline void AttendInputs(const Inputs& in, const float* q, int layer, int head, Run rows,
                         Attention* a) {
  for (int32_t t = rows.begin; t < rows.end; ++t) {
    AttendRow(q, in.Key(t, layer, head), in.Value(t, layer, head), in.g.head_dim, a);
  }
}

// What a selection attends of what is stored, for one query head.
inline void AttendStored(const StoredRows& stored, const Geometry& g, const Backend& backend,
                         const Selection& selection, const float* q, int layer, int query_head,
                         Attention* a) {
  StoredPlan plan;
  stored.PlanSlices(selection, query_head, stored.end(), &plan);
  const auto slices = static_cast<int32_t>(plan.slices.size());
  std::vector<float> m(plan.slices.size()), l(m.size()), o(m.size() * a->o.size());
  AttendWorks works;
  for (int32_t i = 0; i < slices; ++i) {
    const StoredSlice& slice = plan.slices[static_cast<size_t>(i)];
    const QueryTile tile{layer,
                         query_head / g.group(),
                         query_head,
                         1,
                         g.query_heads,
                         1,
                         1,
                         g.head_dim,
                         g.logit_scale(),
                         q,
                         g.head_dim,
                         m.data() + i,
                         l.data() + i,
                         o.data() + int64_t{i} * g.head_dim};
    stored.AddSlice(selection, slice, plan.RunsOf(slice), tile, &works);
  }
  works.Attend(backend, InlineExecutor());
  for (int32_t i = 0; i < slices; ++i) {
    a->Merge(m[static_cast<size_t>(i)], l[static_cast<size_t>(i)],
             o.data() + int64_t{i} * g.head_dim);
  }
}
// All of it.
inline void AttendStored(const StoredRows& stored, const Geometry& g, const Backend& backend,
                         const float* q, int layer, int query_head, Attention* a) {
  AttendStored(stored, g, backend, Selection::Full(stored.end()), q, layer, query_head, a);
}

// Relative L2 error.
inline double ErrorOf(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace kvstrata
