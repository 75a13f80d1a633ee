#include "kernels/select/token_scores.h"

#include <algorithm>

#include "kernels/codec/packed.h"

namespace kvstrata {
namespace {

// Rows that one work item scores.
constexpr int32_t kScoreTile = 2048;

Run Intersection(Run a, Run b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

}  // namespace

void RotatedQueries::Rotate(const SelectContext& context, int layer, const float* q, Run range) {
  const Geometry& g = *context.geometry;
  const PackedStorage& packed = *context.packed;
  const auto segments = static_cast<int>(packed.segments().size());
  kv_heads_ = static_cast<size_t>(g.kv_heads);
  offsets_.assign(segments * kv_heads_, -1);
  works_.clear();
  const int64_t size = int64_t{g.group()} * g.head_dim;
  for (int head = 0; head < g.kv_heads; ++head) {
    const float* last = nullptr;  // rotations are shared by segments that follow each other
    for (int s = 0; s < segments; ++s) {
      const Run tokens = Intersection(packed.segments()[s].tokens, range);
      if (tokens.begin >= tokens.end) continue;
      const float* r = packed.head(s, layer, head).r_k;
      if (r != last) {
        RotateWork& w = works_.emplace_back();
        w.r = r;
        w.dim = g.head_dim;
        w.x = q + head * size;
        w.x_row = g.head_dim;
        w.rows = g.group();
        last = r;
      }
      offsets_[s * kv_heads_ + head] = (static_cast<int64_t>(works_.size()) - 1) * size;
    }
  }
  rows_.resize(works_.size() * size);
  for (size_t i = 0; i < works_.size(); ++i) works_[i].out = rows_.data() + i * size;
  if (works_.empty()) return;
  context.backend->rotate(works_.data(), static_cast<int64_t>(works_.size()), *context.executor);
}

void TokenScores::AddPacked(const SelectContext& context, int layer, int head, Run range,
                            float scale, float* out, int64_t stride) {
  const auto& segments = context.packed->segments();
  for (size_t s = 0; s < segments.size(); ++s) {
    const Run tokens = Intersection(segments[s].tokens, range);
    for (int32_t t = tokens.begin; t < tokens.end; t += kScoreTile) {
      ScorePackedWork& w = packed_.emplace_back();
      w.rows = context.packed->head(static_cast<int>(s), layer, head).keys;
      w.q = rotated_.For(static_cast<int>(s), head);
      w.queries = context.geometry->group();
      w.units = {t - segments[s].tokens.begin,
                 std::min(t + kScoreTile, tokens.end) - segments[s].tokens.begin};
      w.scale = scale;
      w.out = out + (t - range.begin);
      w.out_query = stride;
    }
  }
}

void TokenScores::Score(const SelectContext& context, int layer, const float* q, Run heads,
                        Run range, float scale, float* out, int64_t stride) {
  const Geometry& g = *context.geometry;
  const bool packed = context.packed != nullptr && range.begin < context.packed->end();
  const int32_t first_raw = packed ? context.packed->end() : range.begin;
  if (packed) rotated_.Rotate(context, layer, q, range);
  packed_.clear();
  raw_.clear();
  for (int head = heads.begin; head < heads.end; ++head) {
    float* own = out + int64_t{head - heads.begin} * g.group() * stride;
    if (packed) AddPacked(context, layer, head, range, scale, own, stride);
    for (int32_t t = first_raw; t < range.end; t += kScoreTile) {
      ScoreTokensWork& w = raw_.emplace_back();
      w.rows = KeysOf(context.view.pages, context.layout, layer, head);
      w.run = {t, std::min(t + kScoreTile, range.end)};
      w.q = q + int64_t{head} * g.group() * g.head_dim;
      w.queries = g.group();
      w.scale = scale;
      w.out = own + (t - range.begin);
      w.out_query = stride;
    }
  }
  const Backend& backend = *context.backend;
  if (!packed_.empty()) {
    backend.score_packed(packed_.data(), static_cast<int64_t>(packed_.size()), *context.executor);
  }
  if (!raw_.empty()) {
    backend.score_tokens(raw_.data(), static_cast<int64_t>(raw_.size()), *context.executor);
  }
}

}  // namespace kvstrata
