// SPDX-License-Identifier: Apache-2.0
// Selector `vote`: per layer the k middle tokens that the heads' softmax scores vote for, shared by
// all heads, and chosen anew when the query turns away from that of the last re-selection
// (TokenSelect; docs/spec/tokenselect.md). Sinks and the local window slide along.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan_rows.h"
#include "kernels/select/max_pool.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/token_scores.h"

namespace kvstrata {
namespace {

// Scores in flight, 32 MiB: more tokens than that go group of heads by group of heads.
constexpr int64_t kScoreFloats = int64_t{8} << 20;
// Votes that are kept for Inspect; a longer middle keeps none.
constexpr int32_t kVotesKept = 1 << 16;

// A re-selection: its query [query_heads][head_dim], its tokens, and the end of its middle.
struct Pick {
  std::vector<float> query;
  std::vector<int32_t> tokens;
  int32_t middle_end = 0;
};

double Cosine(const float* a, const float* b, int64_t n) {
  double dot = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < n; ++i) {
    dot += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  const double norms = std::sqrt(aa) * std::sqrt(bb);
  return norms > 0 ? dot / norms : 0;
}

class VoteSelector final : public Selector, private SelectorHistory {
 public:
  VoteSelector(const Plan& plan, const Geometry& geometry)
      : plan_(plan), geometry_(geometry), layers_(geometry.layers) {}

  SelectorHistory* history() override { return this; }

  bool SelectChunk(const SelectContext& context, int layer, const PromptQueries& queries,
                   Selection* out) override {
    const int32_t start = queries.first;
    if (InFull(start)) return false;
    const std::vector<float> mean = MeanQuery(queries.q, queries.q_token, queries.count);
    std::vector<int32_t> tokens;
    Choose(context, layer, mean.data(), {plan_.vote.sinks, start - plan_.vote.recent}, &tokens);
    Emit(tokens, {}, start - plan_.vote.recent, start, out);
    return true;
  }

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    Layer& own = layers_[layer];
    own.hit = false;
    own.next.reset();
    if (InFull(n)) return out->SetFull(n);  // such a step leaves the cache alone
    const int32_t middle_end = n - plan_.vote.recent;
    own.hit = own.last && plan_.vote.theta < 1 && IsAlike(q, own.last->query.data());
    if (!own.hit) {
      Pick& next = own.next.emplace();
      next.query.assign(q, q + QueryFloats());
      next.middle_end = middle_end;
      Choose(context, layer, q, {plan_.vote.sinks, middle_end}, &next.tokens);
      own.votes = middle_end - plan_.vote.sinks <= kVotesKept ? votes_ : std::vector<float>();
    }
    const Pick& pick = own.hit ? *own.last : *own.next;
    const int32_t departed = plan_.vote.append_departed ? pick.middle_end : middle_end;
    Emit(pick.tokens, {departed, middle_end}, middle_end, n, out);
    if (!own.hit) out->scored_bytes = KeyBytes(context, layer, {plan_.vote.sinks, middle_end});
  }

  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}
  void Advance(int32_t) override {
    for (Layer& layer : layers_) {
      if (!layer.next) continue;
      layer.last = std::move(layer.next);
      layer.next.reset();
    }
  }

  void Truncate(int32_t tokens) override {
    for (Layer& layer : layers_) {
      layer.next.reset();
      // Its query's position has gone: n - 1 of that step.
      if (layer.last && layer.last->middle_end + plan_.vote.recent > tokens) layer.last.reset();
    }
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<VoteSelector>(plan_, geometry_);
    copy->layers_ = layers_;
    for (Layer& layer : copy->layers_) layer.next.reset();
    return copy;
  }

  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    if (name == "hits") {
      std::vector<uint8_t> hits;
      for (const Layer& layer : layers_) hits.push_back(layer.hit ? 1 : 0);
      return ArrayOf(InspectArray::Type::kU8, hits);
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (name != "votes_layer" + std::to_string(i)) continue;
      return ArrayOf(InspectArray::Type::kF32, layers_[i].votes);
    }
    return NotFound("INSPECT_UNKNOWN", "array '" + std::string(name) +
                                           "': selector 'vote' keeps hits (of the last step, by "
                                           "layer) and votes_layerI (of the last re-selection, if "
                                           "its middle had at most " +
                                           std::to_string(kVotesKept) + " tokens)");
  }

 private:
  struct Layer {
    std::optional<Pick> last;  // made by the last re-selection
    std::optional<Pick> next;  // made by the step under way
    bool hit = false;          // whether the last step reused one
    std::vector<float> votes;  // votes of the last re-selection, before any max-pool
  };

  int64_t QueryFloats() const { return int64_t{geometry_.query_heads} * geometry_.head_dim; }

  bool InFull(int32_t n) const { return cuda::CandidatesOf(VoteCandidates(plan_), n).full; }

  bool IsAlike(const float* q, const float* before) const {
    if (!plan_.vote.cosine_per_head) return Cosine(q, before, QueryFloats()) >= plan_.vote.theta;
    for (int64_t at = 0; at < QueryFloats(); at += geometry_.head_dim) {
      if (Cosine(q + at, before + at, geometry_.head_dim) < plan_.vote.theta) return false;
    }
    return true;
  }

  std::vector<float> MeanQuery(const float* q, int64_t q_token, int32_t count) const {
    std::vector<double> sum(QueryFloats());
    for (int32_t t = 0; t < count; ++t) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += q[t * q_token + static_cast<int64_t>(i)];
    }
    std::vector<float> mean(sum.size());
    std::ranges::transform(sum, mean.begin(),
                           [&](double x) { return static_cast<float>(x / count); });
    return mean;
  }

  // The k tokens of `middle` with the most votes, ascending.
  void Choose(const SelectContext& context, int layer, const float* q, Run middle,
              std::vector<int32_t>* tokens) {
    CountVotes(context, layer, q, middle);
    const int32_t n = middle.end - middle.begin;
    const float* scores = votes_.data();
    if (plan_.vote.max_pool > 1) {
      pooled_ = votes_;
      MaxPool(plan_.vote.max_pool, pooled_.data(), n, &scratch_);
      scores = pooled_.data();
    }
    tokens->resize(std::min(plan_.vote.budget, n));
    context.backend->top_k({scores, n, plan_.vote.budget, tokens->data()});
    for (int32_t& t : *tokens) t += middle.begin;
  }

  void CountVotes(const SelectContext& context, int layer, const float* q, Run middle) {
    const int32_t n = middle.end - middle.begin;
    const int32_t group = geometry_.group();
    const int64_t own = std::max<int64_t>(int64_t{group} * n, 1);
    const auto heads = static_cast<int32_t>(
        std::clamp<int64_t>(kScoreFloats / own, 1, geometry_.kv_heads));  // KV heads at a time
    const float scale = plan_.vote.scale ? geometry_.logit_scale() : 1.0f;
    logits_.resize(heads * own);
    max_.resize(int64_t{heads} * group);
    sum_.resize(int64_t{heads} * group);
    votes_.resize(n);
    for (int32_t first = 0; first < geometry_.kv_heads; first += heads) {
      const Run batch = {first, std::min(first + heads, geometry_.kv_heads)};
      scores_.Score(context, layer, q, batch, middle, scale, logits_.data(), n);
      std::vector<float>& counted = first == 0 ? votes_ : scratch_;
      counted.resize(n);
      context.backend->vote({logits_.data(), n, (batch.end - batch.begin) * group, n, max_.data(),
                             sum_.data(), counted.data()},
                            *context.executor);
      for (int32_t t = 0; first > 0 && t < n; ++t) votes_[t] += scratch_[t];
    }
  }

  void Emit(const std::vector<int32_t>& tokens, Run departed, int32_t local, int32_t n,
            Selection* out) const {
    out->Reset(n, 1);
    std::vector<Run>& runs = out->runs[0];
    AppendRun({0, plan_.vote.sinks}, &runs);
    for (const int32_t t : tokens) AppendRun({t, t + 1}, &runs);
    AppendRun(departed, &runs);
    AppendRun({local, n}, &runs);
  }

  Plan plan_;
  Geometry geometry_;
  std::vector<Layer> layers_;

  // Scratch for the current call.
  TokenScores scores_;
  std::vector<float> logits_, max_, sum_, votes_, pooled_, scratch_;
};

constexpr NumberRange kCosine = {-1, 1};
constexpr std::string_view kCosineNames[] = {"flat", "head"};

using VoteOption = RowsOf<&Plan::vote>;
constexpr PlanOption kRows[] = {
    VoteOption::Int<&VoteOptions::budget, 0, kMaxTokens>("k").Or("budget"),
    VoteOption::Int<&VoteOptions::sinks, 0, kMaxTokens>("n_init").Or("sinks"),
    VoteOption::Int<&VoteOptions::recent, 1, kMaxTokens>("n_local").Or("recent"),
    VoteOption::Number<&VoteOptions::theta, kCosine>("theta"),
    VoteOption::Name<&VoteOptions::cosine_per_head, kCosineNames>("cosine"),
    VoteOption::Flag<&VoteOptions::append_departed>("append_departed"),
    VoteOption::Int<&VoteOptions::max_pool, 1, 1024>("max_pool"),
    VoteOption::Flag<&VoteOptions::scale>("scale"),
    VoteOption::Int<&VoteOptions::chunk, 1, 65536>("chunk"),
};

// One decode step in ten misses its cache, and reads all keys.
SelectionRule Rule(const Plan& plan, int32_t tokens) {
  constexpr double kMisses = 0.1;
  SelectionRule rule;
  rule.always = plan.vote.sinks + plan.vote.recent;
  rule.units = plan.vote.budget;
  rule.rows = rule.always + rule.units;
  rule.scored = kMisses * tokens / 2;
  rule.gpu_us = 10;
  rule.cpu_rows = 2850;
  return rule;
}

}  // namespace

cuda::CandidateRule VoteCandidates(const Plan& plan) {
  return {1, plan.vote.sinks, plan.vote.recent, plan.vote.budget, plan.min_tokens};
}

constinit const Preset kVotePreset = {
    .description =
        "TokenSelect: per layer, the 2048 tokens that most heads attend to, kept while "
        "queries stay alike",
    .options = {kRows},
    .codecs = kWithoutSummaries};
constinit const SelectorRow kVoteSelector = {MakeSelector<VoteSelector>, NeedsPromptsEnd, Rule,
                                             CandidatesInFull<VoteCandidates>};

}  // namespace kvstrata
