// SPDX-License-Identifier: Apache-2.0
// SpanStorage as StoredRows.
#include <algorithm>
#include <vector>

#include "kernels/plans/sekv/lowrank.h"
#include "kernels/plans/sekv/ops/span_ops.h"

namespace kvstrata {
namespace {

enum PartKind : int32_t { kRawRows, kFactors, kMeans };

// Items of op attend_lowrank and the factors that they attend.
class LowRankWorks final : public CodecWorks {
 public:
  // Spans of an item: those that are added from FirstSpan() on until its Add.
  size_t FirstSpan() const { return spans_.size(); }
  void AddSpan(const LowRankSpan& span) { spans_.push_back(span); }
  void Add(AttendLowRankWork work, size_t first_span) {
    work.span_count = static_cast<int32_t>(spans_.size() - first_span);
    works_.push_back(work);
    first_span_.push_back(first_span);
  }

  void Clear() override {
    spans_.clear();
    works_.clear();
    first_span_.clear();
  }

  void Run(const Backend& backend, Executor& executor) override {
    if (works_.empty()) return;
    for (size_t i = 0; i < works_.size(); ++i) works_[i].spans = spans_.data() + first_span_[i];
    OpsOf<SpanOps>(backend.lowrank)
        .attend_lowrank(works_.data(), static_cast<int64_t>(works_.size()), executor);
  }

 private:
  std::vector<LowRankSpan> spans_;
  std::vector<AttendLowRankWork> works_;
  std::vector<size_t> first_span_;  // in spans_, which moves while it grows
};

// out[i] = scale * q.k of row i of a span.
void ScoreFactors(const LowRankRows& rows, int32_t n, const float* q, int32_t dim, float scale,
                  float* out) {
  const int32_t inner = rows.rank < 0 ? dim : rows.rank;
  std::vector<float> folded(q, q + dim);
  for (int32_t j = 0; j < rows.rank; ++j) {
    float dot = 0;
    for (int32_t c = 0; c < dim; ++c) dot += ToFloat(rows.right[int64_t{j} * dim + c]) * q[c];
    folded[static_cast<size_t>(j)] = dot;
  }
  for (int32_t i = 0; i < n; ++i) {
    float dot = 0;
    for (int32_t j = 0; j < inner; ++j) {
      dot += ToFloat(rows.left[int64_t{i} * inner + j]) * folded[static_cast<size_t>(j)];
    }
    out[i] = scale * dot;
  }
}

void AddRawRows(const SpanStorage& spans, int part, const QueryTile& tile, AttendWorks* works) {
  const int32_t rows = spans.parts()[static_cast<size_t>(part)].raw_count;
  auto w = AttendWorks::ItemOf<AttendWork>(tile);
  w.k = spans.RawKeys(part, tile.layer, tile.kv_head);
  w.v = spans.RawValues(part, tile.layer, tile.kv_head);
  w.position = rows;  // every query sees every row
  const size_t first = works->FirstRun();
  works->AddRun({0, rows});
  works->Add(w, first);
}

void AddFactors(const SpanStorage& spans, const Selection& selection, int part,
                const QueryTile& tile, LowRankWorks* works) {
  const SpanStorage::Part& range = spans.parts()[static_cast<size_t>(part)];
  const auto& lists = selection.units;
  ForHeads(lists.size(), tile, [&](const QueryTile& heads, size_t list) {
    const size_t first = works->FirstSpan();
    const auto add = [&](int32_t id) {
      works->AddSpan(spans.Factors(id, tile.layer, tile.kv_head));
    };
    if (selection.full) {
      for (int32_t u = 0; u < range.span_count; ++u) add(range.first_span + u);
    } else {
      const auto& ids = lists[list];
      auto id = std::ranges::lower_bound(ids, range.first_span);
      for (; id != ids.end() && *id < range.first_span + range.span_count; ++id) add(*id);
    }
    auto w = AttendWorks::ItemOf<AttendLowRankWork>(heads);
    w.dim = tile.dim;
    works->Add(w, first);
  });
}

void AddMeans(const SpanStorage& spans, const Selection& selection, int part, const QueryTile& tile,
              AttendWorks* works) {
  const SpanStorage::Part& range = spans.parts()[static_cast<size_t>(part)];
  const auto& lists = selection.coarse;
  ForHeads(lists.size(), tile, [&](const QueryTile& heads, size_t list) {
    auto w = AttendWorks::ItemOf<AttendCoarseWork>(heads);
    w.k = spans.KeyMeans(part, tile.layer, tile.kv_head);
    w.v = spans.ValueMeans(part, tile.layer, tile.kv_head);
    w.log_count = spans.log_length().data() + range.first_span;
    const size_t first = works->FirstRun();
    if (!lists.empty()) {
      for (const CoarseRun& c : lists[list]) {
        const Run run{std::max(c.units.begin, range.first_span) - range.first_span,
                      std::min(c.units.end - range.first_span, range.span_count)};
        if (c.level == 0 && run.begin < run.end) works->AddRun(run);
      }
    }
    works->Add(w, first);
  });
}

}  // namespace

void SpanStorage::PlanSlices(const Selection&, int32_t, int32_t, StoredPlan* plan) const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto source = static_cast<int32_t>(i);
    if (parts_[i].raw_count > 0) plan->slices.push_back({kRawRows, source, 0, 0});
    if (parts_[i].span_count == 0) continue;
    plan->slices.push_back({kFactors, source, 0, 0});
    plan->slices.push_back({kMeans, source, 0, 0});
  }
}

void SpanStorage::AddSlice(const Selection& selection, const StoredSlice& slice,
                           std::span<const Run>, const QueryTile& tile, AttendWorks* works) const {
  switch (slice.kind) {
    case kRawRows:
      return AddRawRows(*this, slice.source, tile, works);
    case kFactors:
      return AddFactors(*this, selection, slice.source, tile, &works->Of<LowRankWorks>());
    default:
      return AddMeans(*this, selection, slice.source, tile, works);
  }
}

// Raw rows; spans that a query of the head reads token by token, and those that one reads as one
// row.
void SpanStorage::CountReads(const HeadReads& reads, ReadCost* cost) const {
  cost->Add(static_cast<uint64_t>(raw_rows()), static_cast<uint64_t>(2 * geometry_.row_bytes()));
  std::vector<bool> expanded(spans_.size()), coarse(spans_.size());
  for (const ReadChunk& c : reads.chunks) {
    if (c.selection->full) expanded.assign(spans_.size(), true);
    for (const auto& list : ListsOf(c.selection->units, reads.kv_head, geometry_.kv_heads)) {
      for (const int32_t span : list) expanded[static_cast<size_t>(span)] = true;
    }
    for (const auto& list : ListsOf(c.selection->coarse, reads.kv_head, geometry_.kv_heads)) {
      for (const CoarseRun& run : list) {
        for (int32_t u = run.units.begin; u < run.units.end; ++u) {
          coarse[static_cast<size_t>(u)] = true;
        }
      }
    }
  }
  const auto mean = static_cast<uint64_t>(int64_t{2} * geometry_.head_dim * SizeOf(DType::kBF16));
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (coarse[i]) cost->AddCoarse(1, mean);
    if (!expanded[i]) continue;
    const LowRankSpan s = Factors(static_cast<int>(i), reads.layer, reads.kv_head);
    cost->rows += static_cast<uint64_t>(s.n);
    cost->bytes +=
        FactorBytes(s.n, s.k, geometry_.head_dim) + FactorBytes(s.n, s.v, geometry_.head_dim);
  }
}

void SpanStorage::AppendUnits(std::span<const int32_t> units, std::vector<Run>* runs) const {
  for (const int32_t unit : units) runs->push_back(spans_[static_cast<size_t>(unit)]);
}

void SpanStorage::AddScores(const KeyScores& scores, ScoreWorks* works) const {
  const Run range = scores.range;
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const std::span<const int32_t> raw(part.raw_positions, static_cast<size_t>(part.raw_count));
    const auto end = std::ranges::lower_bound(raw, range.end);
    for (auto from = std::ranges::lower_bound(raw, range.begin), to = from; from < end; from = to) {
      while (to < end && *to - *from == to - from) ++to;  // rows of consecutive positions
      ScoreTokensWork w;
      w.rows = RawKeys(static_cast<int>(p), scores.layer, scores.kv_head);
      w.run = {static_cast<int32_t>(from - raw.begin()), static_cast<int32_t>(to - raw.begin())};
      w.q = scores.q;
      w.queries = scores.queries;
      w.scale = scores.scale;
      w.out = scores.out + (*from - range.begin);
      w.out_query = scores.out_query;
      works->Add(w);
    }
  }
  std::vector<float> of_span;
  for (size_t s = 0; s < spans_.size(); ++s) {
    const Run span = spans_[s];
    const Run wanted{std::max(span.begin, range.begin), std::min(span.end, range.end)};
    if (wanted.begin >= wanted.end) continue;
    const LowRankSpan rows = Factors(static_cast<int>(s), scores.layer, scores.kv_head);
    of_span.resize(static_cast<size_t>(rows.n));
    for (int32_t i = 0; i < scores.queries; ++i) {
      ScoreFactors(rows.k, rows.n, scores.q + int64_t{i} * geometry_.head_dim, geometry_.head_dim,
                   scores.scale, of_span.data());
      std::copy(of_span.begin() + (wanted.begin - span.begin),
                of_span.begin() + (wanted.end - span.begin),
                scores.out + i * scores.out_query + (wanted.begin - range.begin));
    }
  }
}

int64_t SpanStorage::KeyBytes(int layer, Run range) const {
  int64_t bytes = 0;
  for (const Part& part : parts_) {
    const std::span<const int32_t> raw(part.raw_positions, static_cast<size_t>(part.raw_count));
    bytes +=
        (std::ranges::lower_bound(raw, range.end) - std::ranges::lower_bound(raw, range.begin)) *
        geometry_.kv_heads * geometry_.row_bytes();
  }
  for (size_t s = 0; s < spans_.size(); ++s) {
    if (spans_[s].begin >= range.end || spans_[s].end <= range.begin) continue;
    for (int kv_head = 0; kv_head < geometry_.kv_heads; ++kv_head) {
      const LowRankSpan rows = Factors(static_cast<int>(s), layer, kv_head);
      bytes += static_cast<int64_t>(FactorBytes(rows.n, rows.k, geometry_.head_dim));
    }
  }
  return bytes;
}

}  // namespace kvstrata
