// SPDX-License-Identifier: Apache-2.0
// Selector `bucket`: per layer and KV head (or query head), the kept tokens of the sentences whose
// mean key is nearest to the mean query of the sentence being generated (SentenceKV;
// docs/spec/sentencekv.md).
//
// The prompt's last queries say which of its tokens are kept. Buckets are made when the prompt is
// complete and, for generated sentences, in the begin of the step after their last token. Without
// boundaries for the whole prompt, or without its last queries, it attends in full and says so;
// boundaries that come later are used from then on.
#include <algorithm>
#include <cmath>

#include "kernels/pages/element.h"
#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plan/plan_rows.h"
#include "kernels/plans/sentencekv/bucket_rule.h"
#include "kernels/plans/sentencekv/importance.h"
#include "kernels/plans/sentencekv/sentence_status.h"
#include "kernels/segment/sentence_rule.h"
#include "kernels/select/max_pool.h"
#include "kernels/select/ranking.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/sentence_queries.h"

namespace kvstrata {

namespace {

// Importances that are kept for Inspect, all layers together.
constexpr int64_t kImportanceKept = int64_t{4} << 20;

// A sentence for one row: what it can supply.
struct Bucket {
  Run tokens;        // its positions behind the first `start` ones
  int32_t kept = 0;  // they are those of [kept, kept_end) in Row::kept; or, when these are equal,
  int32_t kept_end = 0;  // all of `tokens`
};

// The buckets of one (layer, KV head or query head), in order of position.
struct Row {
  std::vector<int32_t> kept;  // tokens of the prompt, ascending
  std::vector<Bucket> buckets;
  std::vector<float> means;  // [buckets][head_dim]
};

// Positions that a bucket supplies, ascending.
class Supply {
 public:
  Supply(const Row& row, const Bucket& bucket, bool whole)
      : bucket_(bucket),
        listed_(!whole && bucket.kept < bucket.kept_end),
        kept_(row.kept.data() + bucket.kept) {}

  // How many lie below `end`.
  int32_t Below(int32_t end) const {
    if (listed_ && end >= bucket_.tokens.end) return bucket_.kept_end - bucket_.kept;
    if (!listed_) {
      return std::clamp(end - bucket_.tokens.begin, 0, bucket_.tokens.end - bucket_.tokens.begin);
    }
    const int32_t* stop = kept_ + (bucket_.kept_end - bucket_.kept);
    return static_cast<int32_t>(std::lower_bound(kept_, stop, end) - kept_);
  }
  void AppendFirst(int32_t count, std::vector<Run>* runs) const {
    if (!listed_) return AppendRun({bucket_.tokens.begin, bucket_.tokens.begin + count}, runs);
    for (int32_t i = 0, next; i < count; i = next) {
      for (next = i + 1; next < count && kept_[next] == kept_[next - 1] + 1;) ++next;
      AppendRun({kept_[i], kept_[next - 1] + 1}, runs);
    }
  }

 private:
  const Bucket& bucket_;
  const bool listed_;
  const int32_t* kept_;
};

void AddRow(const std::byte* row, DType dtype, std::vector<double>* sum) {
  WithElement(dtype, [&]<typename T>() {
    const T* const x = reinterpret_cast<const T*>(row);
    for (size_t c = 0; c < sum->size(); ++c) (*sum)[c] += ToFloat(x[c]);
  });
}

// Mean of a bucket's kept keys, or of all its keys when none was kept.
void AppendMean(const Row& row, const Bucket& bucket, const PagedRows& keys,
                std::vector<float>* means) {
  std::vector<double> sum(keys.dim);
  int32_t count = bucket.kept_end - bucket.kept;
  for (int32_t i = bucket.kept; i < bucket.kept_end; ++i) {
    AddRow(keys.Row(row.kept[i]), keys.dtype, &sum);
  }
  if (count == 0) {
    count = bucket.tokens.end - bucket.tokens.begin;
    for (int32_t t = bucket.tokens.begin; t < bucket.tokens.end; ++t) {
      AddRow(keys.Row(t), keys.dtype, &sum);
    }
  }
  for (const double x : sum) means->push_back(static_cast<float>(x / count));
}

// What of a list of each row is looked into.
struct Ragged {
  std::vector<int32_t> values, offsets = {0};
};
template <typename Fn>
Ragged Flat(std::span<const Row> rows, const Fn& list) {
  Ragged flat;
  for (const Row& row : rows) {
    const std::vector<int32_t> own = list(row);
    flat.values.insert(flat.values.end(), own.begin(), own.end());
    flat.offsets.push_back(static_cast<int32_t>(flat.values.size()));
  }
  return flat;
}
// What is in the prompt's buckets, or was kept for them.
std::vector<int32_t> KeptOf(const Row& row) {
  if (!row.kept.empty()) return row.kept;
  std::vector<int32_t> all;
  for (const Bucket& b : row.buckets) {
    for (int32_t t = b.tokens.begin; t < b.tokens.end; ++t) all.push_back(t);
  }
  return all;
}

class BucketSelector final : public Selector, private SelectorHistory {
 public:
  BucketSelector(const Plan& plan, const Geometry& geometry)
      : plan_(plan),
        geometry_(geometry),
        group_(plan.bucket.per_query_head ? 1 : geometry.group()),
        rows_per_layer_(geometry.query_heads / group_),
        observed_(geometry, plan.bucket.n_obs),
        queries_(geometry, plan.bucket.max_length) {}

  SelectorHistory* history() override { return this; }

  // A prompt attends everything; its last queries are kept.
  bool SelectChunk(const SelectContext&, int layer, const PromptQueries& queries,
                   Selection*) override {
    if (queries.again || IsDense(layer)) return false;
    observed_.Add(layer, queries.q, queries.q_token, queries.first, queries.count);
    return false;
  }

  void PrefillDone(const SelectContext& context) override {
    if (context.backend == nullptr) return;  // the GPU's half keeps them (cuda_sentences.h)
    queries_.Start(context.prompt_tokens);
    MakePromptBuckets(context);
  }

  void Begin(const SelectContext& context) override {
    if (context.prompt_tokens < 0) return;
    if (!ready_) MakePromptBuckets(context);
    if (!ready_) return;
    for (const Run& sentence : queries_.Close(context.boundary, context.view.tokens)) {
      ForRows(context, [&](int layer, int row) {
        AddGenerated(KeysOf(context, layer, row), sentence, &RowOf(layer, row));
      });
    }
  }

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    if (!ready_) return out->SetFull(n);
    const int32_t dim = geometry_.head_dim;
    q_.resize(int64_t{rows_per_layer_} * dim);
    queries_.Mean(layer, context.view.tokens, q, group_, q_.data());
    if (BucketsInFull(plan_, n)) return out->SetFull(n);
    // The window reaches back to the start of the sentence being generated.
    const int32_t window = std::min(n - plan_.bucket.recent, queries_.begin());
    Score(context, layer);
    out->Reset(n, rows_per_layer_);
    for (const auto& scores : scores_) {
      out->scored_bytes += static_cast<int64_t>(scores.size()) * dim * SizeOf(DType::kF32);
    }
    context.executor->ParallelFor(rows_per_layer_, [&](int64_t row) {
      Fill(RowOf(layer, static_cast<int>(row)), scores_[row], window, static_cast<int>(row), out);
    });
  }

  void Advance(int32_t) override { queries_.Advance(); }

  void Truncate(int32_t tokens) override {
    queries_.Truncate(tokens);
    for (Row& row : rows_) {
      while (!row.buckets.empty() && row.buckets.back().tokens.end > tokens) {
        row.buckets.pop_back();
      }
      row.means.resize(row.buckets.size() * static_cast<size_t>(geometry_.head_dim));
    }
  }

  std::string StatusText(const SelectContext& context) const override {
    const int32_t prompt = context.prompt_tokens;
    if (prompt < 0) return "";
    return SentenceStatus(plan_, context,
                          ready_ || BucketsInFull(plan_, prompt) || AllObserved(prompt));
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<BucketSelector>(*this);
    copy->queries_.Forget();
    return copy;
  }

  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    if (name == "importance") return Importance();
    if (name == "kept") return ArrayOf(InspectArray::Type::kI32, Flat(rows_, KeptOf).values);
    if (name == "kept_offsets")
      return ArrayOf(InspectArray::Type::kI32, Flat(rows_, KeptOf).offsets);
    if (name == "bucket_sizes") {
      return ArrayOf(InspectArray::Type::kI32,
                     Flat(rows_, [this](const Row& r) { return Sizes(r); }).values);
    }
    if (name == "bucket_sizes_offsets") {
      return ArrayOf(InspectArray::Type::kI32,
                     Flat(rows_, [this](const Row& r) { return Sizes(r); }).offsets);
    }
    if (name == "bucket_means") return Means();
    return NotFound("INSPECT_UNKNOWN", "array '" + std::string(name) +
                                           "': selector 'bucket' keeps importance (of up to " +
                                           std::to_string(kImportanceKept) +
                                           " tokens and rows), kept, kept_offsets, bucket_sizes, "
                                           "bucket_sizes_offsets, bucket_means");
  }

 private:
  bool IsDense(int layer) const { return layer < plan_.n_dense_layers; }
  Row& RowOf(int layer, int row) { return rows_[int64_t{layer} * rows_per_layer_ + row]; }
  PagedRows KeysOf(const SelectContext& context, int layer, int row) const {
    const int head = row * group_ / geometry_.group();
    return kvstrata::KeysOf(context.view.pages, context.layout, layer, head);
  }

  template <typename Fn>
  void ForRows(const SelectContext& context, const Fn& fn) {
    context.executor->ParallelFor(int64_t{geometry_.layers} * rows_per_layer_, [&](int64_t i) {
      const int layer = static_cast<int>(i / rows_per_layer_);
      if (!IsDense(layer)) fn(layer, static_cast<int>(i % rows_per_layer_));
    });
  }

  bool AllObserved(int32_t prompt) const {
    for (int layer = plan_.n_dense_layers; layer < geometry_.layers; ++layer) {
      if (!observed_.Cover(layer, prompt)) return false;
    }
    return true;
  }

  void MakePromptBuckets(const SelectContext& context) {
    const int32_t prompt = context.prompt_tokens;
    const bool all = BucketsInFull(plan_, prompt);  // such a prompt keeps everything
    if (!HasPromptBoundaries(context) || (!all && !AllObserved(prompt))) return;
    rows_.assign(int64_t{geometry_.layers} * rows_per_layer_, Row());
    for (int layer = plan_.n_dense_layers; !all && layer < geometry_.layers; ++layer) {
      Keep(context, layer, prompt);
    }
    const std::vector<Run> sentences =
        SentencesIn(context.boundary, {0, prompt}, plan_.bucket.max_length);
    ForRows(context, [&](int layer, int row) {
      const PagedRows keys = KeysOf(context, layer, row);
      Row& own = RowOf(layer, row);
      for (const Run& sentence : sentences) {
        if (all) {
          AddGenerated(keys, sentence, &own);
        } else {
          AddKept(keys, sentence, &own);
        }
      }
    });
    observed_ = ObservedQueries(geometry_, plan_.bucket.n_obs);  // its memory goes
    ready_ = true;
  }

  // The kept tokens of one layer's rows: the most important ones before the window, and the window.
  void Keep(const SelectContext& context, int layer, int32_t prompt) {
    const KeptOfPrompt keeps(plan_, prompt);
    const int32_t before = keeps.before, first = keeps.first;
    const std::vector<float> q = observed_.Queries(layer, prompt);
    std::vector<float> importance = TokenImportance(context, layer, q.data(), keeps.queries, prompt,
                                                    plan_.bucket.per_query_head);
    context.executor->ParallelFor(rows_per_layer_, [&](int64_t row) {
      std::vector<float> scratch;
      float* own = importance.data() + row * before;
      MaxPool(plan_.bucket.pool, own, before, &scratch);
      std::vector<int32_t>& kept = RowOf(layer, static_cast<int>(row)).kept;
      kept.resize(keeps.ranked);
      context.backend->top_k({own + first, before - first, keeps.ranked, kept.data()});
      for (int32_t& t : kept) t += first;
      for (int32_t t = keeps.window.begin; t < keeps.window.end; ++t) kept.push_back(t);
    });
    const int64_t all = static_cast<int64_t>(importance.size()) * geometry_.layers;
    if (all > kImportanceKept) return;
    importance_tokens_ = before;
    importance_.resize(all);
    std::ranges::copy(importance, importance_.begin() + int64_t{layer} * rows_per_layer_ * before);
  }

  // The bucket of a prompt's sentence, if it has any token to supply.
  void AddKept(const PagedRows& keys, Run sentence, Row* row) const {
    Bucket bucket{BucketTokens(plan_, sentence), 0, 0};
    if (bucket.tokens.begin >= bucket.tokens.end) return;
    const auto at = [row](int32_t t) {
      return static_cast<int32_t>(std::ranges::lower_bound(row->kept, t) - row->kept.begin());
    };
    bucket.kept = at(bucket.tokens.begin);
    bucket.kept_end = at(bucket.tokens.end);
    if (bucket.kept == bucket.kept_end && !plan_.bucket.keep_rest) return;
    AppendMean(*row, bucket, keys, &row->means);
    row->buckets.push_back(bucket);
  }

  // The bucket of a sentence all of whose tokens are kept.
  void AddGenerated(const PagedRows& keys, Run sentence, Row* row) const {
    const Bucket bucket{BucketTokens(plan_, sentence), 0, 0};
    if (bucket.tokens.begin >= bucket.tokens.end) return;
    AppendMean(*row, bucket, keys, &row->means);
    row->buckets.push_back(bucket);
  }

  // Similarity of q_ and every bucket, row by row.
  void Score(const SelectContext& context, int layer) {
    scores_.resize(rows_per_layer_);
    means_.resize(rows_per_layer_);
    works_.clear();
    for (int row = 0; row < rows_per_layer_; ++row) {
      Row& own = RowOf(layer, row);
      const auto count = static_cast<int32_t>(own.buckets.size());
      scores_[row].resize(count);
      if (count == 0) continue;
      means_[row] = reinterpret_cast<std::byte*>(own.means.data());
      ScoreWork& w = works_.emplace_back();
      w.q = q_.data() + int64_t{row} * geometry_.head_dim;
      w.rows = {&means_[row],       0,          geometry_.head_dim * SizeOf(DType::kF32), count,
                geometry_.head_dim, DType::kF32};
      w.units = {0, count};
      w.out = scores_[row].data();
    }
    if (works_.empty()) return;
    context.backend->score(works_.data(), static_cast<int64_t>(works_.size()), *context.executor);
  }

  // Buckets by descending score until tau tokens below `window`; the last one is cut.
  void Fill(const Row& row, const std::vector<float>& scores, int32_t window, int group,
            Selection* out) const {
    // Buckets are in order of position: from some one on none has a token below the window.
    const auto usable = static_cast<int32_t>(
        std::ranges::partition_point(
            row.buckets, [&](const Bucket& b) { return SupplyOf(row, b).Below(window) > 0; }) -
        row.buckets.begin());
    std::vector<int32_t> taken(usable);  // tokens, by bucket
    for (int32_t b = 0; b < usable; ++b) taken[b] = SupplyOf(row, row.buckets[b]).Below(window);
    TakeRanked(scores.data(), taken.data(), usable, plan_.bucket.budget);
    std::vector<Run>& runs = out->runs[group];
    AppendRun({0, plan_.bucket.sinks}, &runs);
    for (int32_t b = 0; b < usable; ++b) {
      if (taken[b] == 0) continue;
      out->units[group].push_back(b);
      SupplyOf(row, row.buckets[b]).AppendFirst(taken[b], &runs);
    }
    AppendRun({std::max(window, 0), out->tokens}, &runs);
  }

  Supply SupplyOf(const Row& row, const Bucket& bucket) const {
    return {row, bucket, plan_.bucket.keep_rest};
  }

  // --- Inspect ---

  std::vector<int32_t> Sizes(const Row& row) const {
    std::vector<int32_t> sizes;
    for (const Bucket& b : row.buckets) sizes.push_back(SupplyOf(row, b).Below(b.tokens.end));
    return sizes;
  }
  InspectArray Means() const {
    std::vector<float> all;
    for (const Row& row : rows_) all.insert(all.end(), row.means.begin(), row.means.end());
    const auto count = static_cast<int64_t>(all.size()) / geometry_.head_dim;
    return ArrayOf(InspectArray::Type::kF32, {count, geometry_.head_dim}, all);
  }
  InspectArray Importance() const {
    return ArrayOf(InspectArray::Type::kF32,
                   {geometry_.layers, rows_per_layer_, importance_tokens_}, importance_);
  }

  Plan plan_;
  Geometry geometry_;
  int32_t group_;           // query heads of a row
  int32_t rows_per_layer_;  // KV heads, or query heads
  ObservedQueries observed_;
  SentenceQueries queries_;
  bool ready_ = false;     // the prompt's buckets are made
  std::vector<Row> rows_;  // [layers][rows_per_layer]
  int64_t importance_tokens_ = 0;
  std::vector<float> importance_;  // [layers][rows_per_layer][importance_tokens]

  // Scratch for the current call.
  std::vector<float> q_;
  std::vector<std::vector<float>> scores_;  // by row
  std::vector<std::byte*> means_;
  std::vector<ScoreWork> works_;
};

// Over codec lowrank, spans are bucketed (span_bucket.cc), and no token is kept or dropped.
using BucketOption = RowsOf<&Plan::bucket>;
constexpr PlanOption kRows[] = {
    BucketOption::Int<&BucketOptions::budget, 0, kMaxTokens>("tau").Or("budget"),
    BucketOption::Number<&BucketOptions::r, kFactor>("r").If(OverRaw),
    BucketOption::Int<&BucketOptions::n_obs, 1, 1024>("n_obs").If(OverRaw),
    BucketOption::Int<&BucketOptions::sinks, 0, kMaxTokens>("start").Or("sinks").If(OverRaw),
    BucketOption::Int<&BucketOptions::recent, 1, kMaxTokens>("recent").If(OverRaw),
    BucketOption::Int<&BucketOptions::pool, 1, 1024>("pool").If(OverRaw),
    BucketOption::Int<&BucketOptions::max_length, 1, 65536>("max_length"),
    BucketOption::Flag<&BucketOptions::keep_rest>("keep_rest").If(OverRaw),
    BucketOption::Flag<&BucketOptions::per_query_head>("per_query_head"),
};

// Kept tokens are counted in 32 bits.
Status CheckKept(const Plan& plan) {
  constexpr double kMaxKept = 1 << 30;
  const BucketOptions& own = plan.bucket;
  if (!OverRaw(plan) || own.r * own.budget <= kMaxKept) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION", Assigned("tau", own.budget) +
                                                 " times r keeps more than 2^30 tokens; r or tau "
                                                 "must be smaller");
}

constexpr Combination kCodecs[] = {
    {CodecKind::kRaw, SegmenterKind::kSentence,
     "its buckets over codec 'raw' are sentences, which only segmenter 'sentence' finds"},
    {CodecKind::kLowRank, SegmenterKind::kSpan, kSpansOnly},
};

}  // namespace

SelectionRule BucketRule(const Plan& plan, int32_t) {
  SelectionRule rule;
  rule.always = plan.bucket.sinks + plan.bucket.recent;
  rule.units = plan.bucket.budget;
  rule.rows = rule.always + rule.units;
  rule.gpu_us = 10;
  rule.cpu_rows = 1750;
  return rule;
}

constinit const Preset kBucketPreset = {
    .description =
        "SentenceKV: per layer and KV head, the important tokens of the sentences "
        "nearest to the one being written",
    .options = {kRows, CheckKept},
    .codecs = kCodecs,
    .why_no_other =
        "a bucket is the kept tokens of a sentence, which do not fall on packed "
        "blocks; its codecs are 'raw' and 'lowrank'"};
constinit const SelectorRow kBucketSelector = {MakeSelector<BucketSelector>,
                                               NeedsSentencesAndQueries, BucketRule, BucketsInFull};

}  // namespace kvstrata
