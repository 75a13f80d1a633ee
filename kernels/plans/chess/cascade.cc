// SPDX-License-Identifier: Apache-2.0
// Selector `cascade`: one page list for all layers and heads, from key-key affinity (CHESS;
// docs/spec/chess.md). Selects at the end of the prompt and then when a trigger fires; in between a
// step costs nothing. The window's start stays where the last selection put it, so the list grows.
// With `lists` a layer, or a KV head, has a list of its own; with `anchor = "query"` it is chosen
// by the query of the first step after a selection is due.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plans/chess/affinity.h"
#include "kernels/plans/chess/cascade_trigger.h"
#include "kernels/segment/index_rows.h"
#include "kernels/select/notice.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/unit_scores.h"

namespace kvstrata {
namespace {

using Units = std::vector<int32_t>;  // ascending

// The best ceil(share * n) of `units` by scores[unit], ascending.
Units Best(const Units& units, const std::vector<float>& scores, double share,
           const Backend& backend) {
  const auto n = static_cast<int32_t>(units.size());
  std::vector<float> own(n);
  std::ranges::transform(units, own.begin(), [&](int32_t u) { return scores[u]; });
  Units best(CeilShare(share, n));
  backend.top_k({own.data(), n, static_cast<int32_t>(best.size()), best.data()});
  std::ranges::transform(best, best.begin(), [&](int32_t i) { return units[i]; });
  return best;
}

// Units of [begin, end) whose parent (unit / size) is in `parents`.
Units ChildrenOf(const Units& parents, int32_t size, int32_t begin, int32_t end) {
  Units children;
  for (const int32_t p : parents) {
    for (int32_t u = std::max(begin, p * size); u < std::min(end, (p + 1) * size); ++u) {
      children.push_back(u);
    }
  }
  return children;
}

// Levels in the order of AffinityScores: 0 pages, 1 chunks, 2 grids.
struct CascadeInput {
  const AffinityScores& scores;
  int32_t pages_per_chunk, chunks_per_grid;
  std::array<double, 3> rho;  // for grids, chunks, pages
  Run candidates;             // pages
};

// Pages that survive section 3.2; a chunk or grid competes if it holds a candidate.
Units CascadeTop(const CascadeInput& in, const Backend& backend) {
  const Run& pages = in.candidates;
  if (pages.begin >= pages.end) return {};
  const Run chunks = {pages.begin / in.pages_per_chunk, (pages.end - 1) / in.pages_per_chunk + 1};
  const Run grids = {chunks.begin / in.chunks_per_grid, (chunks.end - 1) / in.chunks_per_grid + 1};
  Units kept;
  for (int32_t g = grids.begin; g < grids.end; ++g) kept.push_back(g);
  kept = Best(kept, in.scores[2], in.rho[0], backend);
  kept = ChildrenOf(kept, in.chunks_per_grid, chunks.begin, chunks.end);
  kept = Best(kept, in.scores[1], in.rho[1], backend);
  kept = ChildrenOf(kept, in.pages_per_chunk, pages.begin, pages.end);
  return Best(kept, in.scores[0], in.rho[2], backend);
}

// Algorithm 1 as printed: pruned scores become 0 and the quantiles run over the whole level.
Units CascadeLiteral(const CascadeInput& in) {
  std::vector<bool> parent;
  for (int step = 0; step < 3; ++step) {
    const std::vector<float>& scores = in.scores[2 - step];
    const int32_t size = step == 1 ? in.chunks_per_grid : in.pages_per_chunk;
    std::vector<bool> active(scores.size(), true);
    std::vector<double> shown(scores.begin(), scores.end());
    for (size_t u = 0; step > 0 && u < scores.size(); ++u) {
      active[u] = parent[u / size];
      if (!active[u]) shown[u] = 0;
    }
    const double threshold = Quantile(shown, 1 - in.rho[step]);
    for (size_t u = 0; u < scores.size(); ++u) {
      active[u] = active[u] && double{scores[u]} >= threshold;
    }
    parent = std::move(active);
  }
  Units kept;
  for (int32_t p = in.candidates.begin; p < in.candidates.end; ++p) {
    if (parent[p]) kept.push_back(p);
  }
  return kept;
}

// One row each for what is not selected of the candidate pages: page by page, or, with `tree`, at
// the coarsest level at which a unit is unselected as a whole and lies within the candidates.
class RestTree {
 public:
  RestTree(const Units& selected, Run candidates, const IndexLayout& index, bool tree)
      : selected_(selected), candidates_(candidates), tree_(tree) {
    for (int level = 0; level < 3; ++level) {
      pages_[level] = index.levels[level].unit_tokens / index.levels[0].unit_tokens;
    }
  }

  std::vector<CoarseRun> Rows() {
    if (!tree_) {
      AppendRest(candidates_, selected_, 0, &rows_);
      return std::move(rows_);
    }
    for (int32_t page = candidates_.begin; page < candidates_.end;) page = AddFrom(page);
    return std::move(rows_);
  }

 private:
  // Adds the coarsest unit that starts at `page`; where the next one starts.
  int32_t AddFrom(int32_t page) {
    for (int level = 2; level >= 0; --level) {
      const int32_t end = page + pages_[level];
      if (page % pages_[level] != 0 || end > candidates_.end || AnySelected(page, end)) continue;
      Add(level, page / pages_[level]);
      return end;
    }
    return page + 1;
  }
  bool AnySelected(int32_t begin, int32_t end) const {
    const auto first = std::ranges::lower_bound(selected_, begin);
    return first != selected_.end() && *first < end;
  }
  void Add(int32_t level, int32_t unit) {
    if (!rows_.empty() && rows_.back().level == level && rows_.back().units.end == unit) {
      ++rows_.back().units.end;
    } else {
      rows_.push_back({level, {unit, unit + 1}});
    }
  }

  const Units& selected_;
  const Run candidates_;
  const bool tree_;
  std::array<int32_t, 3> pages_;  // pages of a unit, by level
  std::vector<CoarseRun> rows_;
};

// What a list attends beside sinks and window, and what it leaves, where the plan attends that.
struct PageList {
  Units selected;
  std::vector<CoarseRun> rest;
};

class CascadeSelector final : public Selector, private SelectorHistory {
 public:
  CascadeSelector(const Plan& plan, const Geometry& geometry)
      : plan_(plan),
        lists_a_layer_(plan.cascade.lists == CascadeOptions::Lists::kHead ? geometry.kv_heads : 1),
        lists_(IsOfModel() ? 1 : geometry.layers * lists_a_layer_),
        layers_(geometry.layers) {}

  SelectorHistory* history() override { return this; }
  CascadeTrigger& trigger() { return trigger_; }

  void Begin(const SelectContext& context) override {
    scored_bytes_ = 0;
    if (context.prompt_tokens < 0) return;
    if (trigger_.Advance(plan_, context.entropy, context.prompt_tokens, context.view.tokens)) {
      SelectionDue(context, trigger_.selected_at());
    }
  }

  void PrefillDone(const SelectContext& context) override {
    trigger_.PromptDone(context.view.tokens);
    if (context.backend != nullptr) SelectionDue(context, context.view.tokens);
  }

  void Truncate(int32_t tokens) override {
    trigger_.Truncate(plan_, tokens);
    if (plan_.cascade.by_query && queried_at_ >= tokens) SetDue();
  }

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    if (n < plan_.min_tokens) return out->SetFull(n);
    Layer& own = layers_[layer];
    int64_t scored = scored_bytes_;
    if (own.due) {
      own.next = Choose(context, {layer, layer + 1}, q, &scored);
      queried_at_ = n - 1;
    }
    const std::span<const PageList> lists = own.next.empty() ? ListsOf(layer) : own.next;
    const int groups = static_cast<int>(lists.size());
    out->Reset(n, groups);
    out->scored_bytes = scored;
    if (plan_.index.rest != RestKind::kDrop) out->coarse.resize(lists.size());
    for (int group = 0; group < groups; ++group) Emit(lists[group], group, out);
  }

  void Advance(int32_t) override {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& own = layers_[layer];
      if (own.next.empty()) continue;
      std::ranges::move(own.next, lists_.begin() + static_cast<int64_t>(layer) * lists_a_layer_);
      own = {};
    }
  }

  std::string StatusText(const SelectContext& context) const override {
    const int32_t prompt = context.prompt_tokens;
    if (prompt < 0 || plan_.cascade.trigger != CascadeOptions::Trigger::kEntropy) return "";
    const bool reported = static_cast<int64_t>(context.entropy.size()) > prompt;
    if (reported) return NeverFires() ? Say(Notice::kNoThresholds, {plan_.cascade.every}) : "";
    return context.view.tokens > prompt ? Say(Notice::kNoEntropy, {plan_.cascade.every}) : "";
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<CascadeSelector>(*this);
    for (Layer& layer : copy->layers_) layer.next.clear();
    return copy;
  }

  Result<InspectArray> Inspect(const SelectContext& context, std::string_view name) const override {
    if (name == "selections")
      return ArrayOf(InspectArray::Type::kI32, Units{trigger_.selections()});
    if (name == "page_vectors_bf16") return PageVectors(context);
    static constexpr std::string_view kScores[] = {"page_scores", "chunk_scores", "grid_scores"};
    for (size_t level = 0; IsOfModel() && level < scores_.size(); ++level) {
      if (name == kScores[level]) return ArrayOf(InspectArray::Type::kF32, scores_[level]);
    }
    return NotFound("INSPECT_UNKNOWN",
                    "array '" + std::string(name) +
                        "': selector 'cascade' keeps selections, page_vectors_bf16 and, with lists "
                        "= \"model\", grid_scores, chunk_scores, page_scores");
  }

 private:
  // Whether no entropy exceeds the thresholds that it must.
  bool NeverFires() const {
    const auto infinite = [](double x) { return std::isinf(x); };
    return plan_.cascade.trigger_or ? std::ranges::all_of(plan_.cascade.thresholds, infinite)
                                    : std::ranges::any_of(plan_.cascade.thresholds, infinite);
  }

  // What a layer's next step does, for a plan that chooses by queries.
  struct Layer {
    bool due = false;
    std::vector<PageList> next;  // chosen by the step under way; empty: nothing
  };

  bool IsOfModel() const { return plan_.cascade.lists == CascadeOptions::Lists::kModel; }
  std::span<const PageList> ListsOf(int layer) const {
    if (IsOfModel()) return lists_;
    return std::span(lists_).subspan(static_cast<size_t>(layer) * lists_a_layer_, lists_a_layer_);
  }
  void SetDue() {
    for (Layer& layer : layers_) layer.due = true;
  }

  // Pages are chosen anew as of `tokens`, whatever came after: now, or by the next queries.
  void SelectionDue(const SelectContext& context, int32_t tokens) {
    window_start_ = CascadeTrigger::WindowStart(plan_, tokens);
    if (tokens < plan_.index.unit) return;  // no complete page yet: everything is in the window
    if (plan_.cascade.by_query) return SetDue();
    lists_ = Choose(context, {0, context.geometry->layers}, nullptr, &scored_bytes_);
  }

  // The lists of `layers`, as of the last selection. `q`: of the one layer, if it chooses by that.
  // Adds a layer's share of the bytes that are read: every mean of every level.
  std::vector<PageList> Choose(const SelectContext& context, Run layers, const float* q,
                               int64_t* scored_bytes) {
    std::vector<AffinityScores> scores =
        ScoreAffinity(context, {trigger_.selected_at(), window_start_, plan_.cascade.centred,
                                plan_.cascade.lists, layers, q});
    for (const auto& level : scores[0]) {
      *scored_bytes += static_cast<int64_t>(level.size()) * context.index->kv_heads *
                       context.index->head_dim * SizeOf(context.index->dtype);
    }
    std::vector<PageList> lists;
    for (const AffinityScores& own : scores) lists.push_back(ListBy(context, own));
    if (IsOfModel()) scores_ = std::move(scores[0]);
    return lists;
  }

  PageList ListBy(const SelectContext& context, const AffinityScores& scores) const {
    const CascadeInput input{scores,
                             plan_.index.pages_per_chunk,
                             plan_.index.chunks_per_grid,
                             plan_.cascade.rho,
                             {std::min(plan_.cascade.sinks, window_start_), window_start_}};
    PageList list;
    list.selected = plan_.cascade.pruning == CascadeOptions::Pruning::kTop
                        ? CascadeTop(input, *context.backend)
                        : CascadeLiteral(input);
    if (plan_.index.rest != RestKind::kDrop) {
      list.rest =
          RestTree(list.selected, input.candidates, *context.index, plan_.cascade.tree).Rows();
    }
    return list;
  }

  void Emit(const PageList& list, int group, Selection* out) const {
    const int32_t unit = plan_.index.unit, n = out->tokens;
    const int32_t pages = (n + unit - 1) / unit;
    const int32_t sinks = std::min(plan_.cascade.sinks, pages);
    // Selected pages lie between sinks and window; the union is their concatenation.
    const int32_t window = std::max(window_start_, sinks);
    Units& table = out->units[group];
    for (int32_t p = 0; p < sinks; ++p) table.push_back(p);
    table.insert(table.end(), list.selected.begin(), list.selected.end());
    for (int32_t p = window; p < pages; ++p) table.push_back(p);
    std::vector<Run>& runs = out->runs[group];
    AppendRun({0, std::min(sinks * unit, n)}, &runs);
    for (const int32_t p : list.selected) AppendRun({p * unit, (p + 1) * unit}, &runs);
    AppendRun({window * unit, n}, &runs);
    if (plan_.index.rest != RestKind::kDrop) out->coarse[group] = list.rest;
  }

  InspectArray PageVectors(const SelectContext& context) const {
    const IndexLayout& index = *context.index;
    const int32_t pages = index.UnitsFor(0, context.view.tokens);
    const size_t row = static_cast<size_t>(index.head_dim) * sizeof(BF16);
    InspectArray array;
    array.type = InspectArray::Type::kU16;
    array.shape = {pages, int64_t{index.layers} * index.kv_heads * index.head_dim};
    array.bytes.resize(static_cast<size_t>(pages) * index.layers * index.kv_heads * row);
    std::byte* out = array.bytes.data();
    for (int32_t page = 0; page < pages; ++page) {
      for (int layer = 0; layer < index.layers; ++layer) {
        for (int head = 0; head < index.kv_heads; ++head, out += row) {
          std::memcpy(out, index.Row(context.view.index_blocks, 0, layer, 0, head, page), row);
        }
      }
    }
    return array;
  }

  Plan plan_;
  CascadeTrigger trigger_;
  int64_t scored_bytes_ = 0;  // a layer's share of the selection that this step began with
  int32_t window_start_ = 0;  // first window page of the last selection; 0: everything is attended
  int32_t queried_at_ = 0;    // position of the last query that chose
  int32_t lists_a_layer_;
  std::vector<PageList> lists_;  // last selection's: one, or by layer, or layer and KV head
  std::vector<Layer> layers_;
  AffinityScores scores_;  // for Inspect: the last selection's scores, if one list serves all
};

struct RhoPreset {
  std::string_view name;
  std::array<double, 3> rho;
};
constexpr RhoPreset kRhoPresets[] = {{"aggressive", {0.5, 0.2, 0.1}},
                                     {"moderate", {0.8, 0.7, 0.7}},
                                     {"conservative", {0.9, 0.9, 0.9}}};

SetResult SetRho(const OptionValue& value, Plan* plan) {
  const auto is_share = [](double x) { return x > 0 && x <= 1; };
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return SetList(value, is_share, &plan->cascade.rho);
  for (const RhoPreset& p : kRhoPresets) {
    if (p.name != *name) continue;
    plan->cascade.rho = p.rho;
    return SetResult::kOk;
  }
  return SetResult::kRefused;
}

SetResult SetThresholds(const OptionValue& value, Plan* plan) {
  const auto is_threshold = [](double x) { return x >= 0; };  // NaN is refused
  return SetList(value, is_threshold, &plan->cascade.thresholds);
}

constexpr std::string_view kPruningNames[] = {"top", "literal"};
constexpr std::string_view kListsNames[] = {"model", "layer", "head"};
constexpr std::string_view kAnchorNames[] = {"keys", "query"};
constexpr std::string_view kTriggerNames[] = {"entropy", "every", "always"};
constexpr std::string_view kCombineNames[] = {"and", "or"};

using CascadeOption = RowsOf<&Plan::cascade>;
constexpr PlanOption kRows[] = {
    kUnitRow,
    kChunkRow,
    kGridRow,
    CascadeOption::Int<&CascadeOptions::sinks, 0, kMaxPages>("sinks"),
    CascadeOption::Int<&CascadeOptions::recent, 1, kMaxPages>("window").Or("recent"),
    {"rho", SetRho, [](const Plan& p) { return ListText(p.cascade.rho); },
     [] {
       return std::string(
           "three numbers above 0 and at most 1 (grids, chunks, pages), or "
           "\"aggressive\", \"moderate\" or \"conservative\"");
     }},
    CascadeOption::Name<&CascadeOptions::pruning, kPruningNames>("cascade"),
    CascadeOption::Name<&CascadeOptions::trigger, kTriggerNames>("trigger"),
    CascadeOption::Name<&CascadeOptions::trigger_or, kCombineNames>("combine"),
    {"thresholds", SetThresholds, [](const Plan& p) { return ListText(p.cascade.thresholds); },
     [] { return std::string("two numbers from 0 to inf (mean and variance of entropy, nats)"); }},
    CascadeOption::Int<&CascadeOptions::every, 1, kMaxPages>("every"),
    CascadeOption::Flag<&CascadeOptions::centred>("centred"),
    kRestRow,
    CascadeOption::Flag<&CascadeOptions::tree>("tree"),
    CascadeOption::Name<&CascadeOptions::lists, kListsNames>("lists").PrintedIf(
        [](const Plan& p) { return p.cascade.lists != CascadeOptions::Lists::kModel; }),
    CascadeOption::Name<&CascadeOptions::by_query, kAnchorNames>("anchor").PrintedIf(
        [](const Plan& p) { return p.cascade.by_query; }),
};

Status CheckAnchor(const Plan& plan) {
  const CascadeOptions& own = plan.cascade;
  if (!own.by_query) return OkStatus();
  if (own.lists == CascadeOptions::Lists::kModel) {
    return InvalidArgument("PLAN_COMBINATION",
                           "anchor = \"query\" chooses in each layer by its own query, and "
                           "lists = \"model\" is one list for all; use lists = \"layer\" or "
                           "\"head\"");
  }
  if (!own.centred) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "centred = true takes a mean page from the window's pages and all others, "
                         "and anchor = \"query\" is no page; use anchor = \"keys\"");
}

Status CheckCascade(const Plan& plan) {
  KVS_RETURN_IF_ERROR(CheckGrid(plan.index));
  KVS_RETURN_IF_ERROR(CheckAnchor(plan));
  if (!plan.cascade.tree || plan.index.rest != RestKind::kDrop) return OkStatus();
  return InvalidArgument(
      "PLAN_COMBINATION",
      "tree = true shows what is not selected at the resolution of the tree, and "
      "rest = \"drop\" drops it; use rest = \"mean\"");
}

uint32_t Needs(const Plan& plan) {
  return kNeedPrefillDone |
         (plan.cascade.trigger == CascadeOptions::Trigger::kEntropy ? uint32_t{kNeedEntropy} : 0);
}

// It chooses once in hundreds of steps. Until then the pages since the last choice are attended,
// half of the most on average.
SelectionRule Rule(const Plan& plan, int32_t tokens) {
  const CascadeOptions& own = plan.cascade;
  const double share = own.rho[0] * own.rho[1] * own.rho[2];
  SelectionRule rule;
  rule.unit_tokens = plan.index.unit;
  rule.always = (own.sinks + own.recent + own.every) * rule.unit_tokens;
  rule.units = static_cast<int32_t>(share * tokens / rule.unit_tokens);
  rule.rows = (own.sinks + own.recent + own.every / 2.0) * rule.unit_tokens + share * tokens;
  if (own.by_query && own.trigger == CascadeOptions::Trigger::kAlways) {
    // As selector block does: a mean key a page, in every step.
    rule.scored = static_cast<double>(tokens) / rule.unit_tokens / 2;
    rule.cpu_rows = 570;
  }
  return rule;
}

constexpr auto kCodecs = OverRawAndPacked(
    SegmenterKind::kHierarchy,
    "it cascades over grids, chunks and pages, whose means only segmenter 'hierarchy' keeps");

}  // namespace

constinit const Preset kCascadePreset = {
    .description =
        "CHESS: one page list for all layers and heads, chosen anew when the model is uncertain",
    .options = {kRows, CheckCascade},
    .codecs = kCodecs,
    .unit = 32};
constinit const SelectorRow kCascadeSelector = {MakeSelector<CascadeSelector>, Needs, Rule,
                                                NeverByBudget};

CascadeTrigger& CascadeTriggerOf(Selector& selector) {
  return static_cast<CascadeSelector&>(selector).trigger();
}

}  // namespace kvstrata
