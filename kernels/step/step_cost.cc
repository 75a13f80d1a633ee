#include "kernels/step/step_cost.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace kvstrata {
namespace {

uint64_t RowsIn(const std::vector<Run>& runs, Run range) {
  int64_t rows = 0;
  for (const Run& run : runs) {
    rows += std::max(std::min(run.end, range.end) - std::max(run.begin, range.begin), 0);
  }
  return static_cast<uint64_t>(rows);
}

class Count {
 public:
  Count(const StepMember& member, int layer, int32_t stored_end, std::span<const ReadChunk> chunks)
      : member_(member),
        geometry_(member.state->geometry()),
        layer_(layer),
        stored_end_(stored_end),
        chunks_(chunks) {}

  StepCost Total() {
    for (const ReadChunk& c : chunks_) {
      cost_.select_bytes += static_cast<uint64_t>(c.selection->scored_bytes);
    }
    const SequenceState& state = *member_.state;
    std::vector<Run> runs;
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      if (head == 0 || !SharesRuns()) runs = RunsOf(head);
      AddRows(runs, head);
      if (state.spans() != nullptr && stored_end_ > 0) {
        AddSpans(*state.spans(), head);
      } else {
        for (int level = 0; level < state.index().level_count; ++level) AddMeans(level, head);
      }
    }
    return cost_;
  }

 private:
  void Add(uint64_t rows, uint64_t bytes_each) {
    cost_.rows += rows;
    cost_.attend_bytes += rows * bytes_each;
  }
  void AddCoarse(uint64_t rows, int64_t bytes_each) {
    cost_.coarse_rows += rows;
    cost_.attend_bytes += rows * static_cast<uint64_t>(bytes_each);
  }

  // Those lists that a KV head's queries go by; there is one for all heads, one per KV head or one
  // per query head.
  template <typename List>
  std::span<const List> ListsOf(const std::vector<List>& lists, int head) const {
    const auto all = std::span(lists);
    if (all.size() <= 1) return all;
    const size_t own = all.size() / static_cast<size_t>(geometry_.kv_heads);
    return all.subspan(static_cast<size_t>(head) * own, own);
  }

  // Whether all heads attend the same.
  bool SharesRuns() const {
    return std::ranges::all_of(chunks_,
                               [](const ReadChunk& c) { return c.selection->runs.size() == 1; });
  }

  // Positions that some query of the head attends one by one.
  std::vector<Run> RunsOf(int head) const {
    std::vector<Run> runs;
    size_t lists = 0;
    for (const ReadChunk& c : chunks_) {
      for (const std::vector<Run>& list : ListsOf(c.selection->runs, head)) {
        for (const Run& run : list) AppendUnordered({run.begin, std::min(run.end, c.start)}, &runs);
        ++lists;
      }
      runs.push_back({c.start, c.start + c.count});
    }
    return lists > 1 ? Normalize(std::move(runs)) : runs;
  }
  static void AppendUnordered(Run run, std::vector<Run>* runs) {
    if (run.begin < run.end) runs->push_back(run);
  }

  void AddRows(const std::vector<Run>& runs, int head) {
    const auto raw = static_cast<uint64_t>(2 * geometry_.row_bytes());
    Add(RowsIn(runs, {stored_end_, std::numeric_limits<int32_t>::max()}), raw);
    const SequenceState& state = *member_.state;
    if (stored_end_ == 0) return;
    if (state.spans() != nullptr) return Add(static_cast<uint64_t>(state.spans()->raw_rows()), raw);
    const auto& segments = state.packed()->segments();
    for (size_t i = 0; i < segments.size(); ++i) {
      const PackedHead& packed = state.packed()->head(static_cast<int>(i), layer_, head);
      const Run range{segments[i].tokens.begin, std::min(segments[i].tokens.end, stored_end_)};
      Add(RowsIn(runs, range), static_cast<uint64_t>(packed.keys.stride + packed.values.stride));
    }
  }

  // Spans that a query of the head reads token by token, and those that one reads as one row.
  void AddSpans(const SpanStorage& spans, int head) {
    const size_t count = spans.spans().size();
    std::vector<bool> expanded(count), coarse(count);
    for (const ReadChunk& c : chunks_) {
      if (c.selection->full) expanded.assign(count, true);
      for (const auto& list : ListsOf(c.selection->units, head)) {
        for (const int32_t span : list) expanded[static_cast<size_t>(span)] = true;
      }
      for (const auto& list : ListsOf(c.selection->coarse, head)) {
        for (const CoarseRun& run : list) {
          for (int32_t u = run.units.begin; u < run.units.end; ++u) {
            coarse[static_cast<size_t>(u)] = true;
          }
        }
      }
    }
    for (size_t i = 0; i < count; ++i) {
      if (coarse[i]) AddCoarse(1, int64_t{2} * geometry_.head_dim * SizeOf(DType::kBF16));
      if (!expanded[i]) continue;
      const LowRankSpan s = spans.Factors(static_cast<int>(i), layer_, head);
      cost_.rows += static_cast<uint64_t>(s.n);
      cost_.attend_bytes +=
          FactorBytes(s.n, s.k, geometry_.head_dim) + FactorBytes(s.n, s.v, geometry_.head_dim);
    }
  }

  // Units of one level of the index that are attended as one row.
  void AddMeans(int level, int head) {
    const IndexLayout& index = member_.state->index();
    std::vector<Run> units;
    size_t lists = 0;
    for (const ReadChunk& c : chunks_) {
      for (const auto& list : ListsOf(c.selection->coarse, head)) {
        for (const CoarseRun& run : list) {
          if (run.level == level) AppendUnordered(run.units, &units);
        }
        ++lists;
      }
    }
    if (lists > 1) units = Normalize(std::move(units));
    AddCoarse(RowsIn(units, {0, std::numeric_limits<int32_t>::max()}),
              int64_t{2} * geometry_.head_dim * SizeOf(index.coarse_dtype()));
  }

  const StepMember& member_;
  const Geometry& geometry_;
  const int layer_;
  const int32_t stored_end_;
  const std::span<const ReadChunk> chunks_;
  StepCost cost_;
};

}  // namespace

StepCost CostOf(const StepMember& member, int layer, int32_t stored_end,
                std::span<const ReadChunk> chunks) {
  return Count(member, layer, stored_end, chunks).Total();
}

}  // namespace kvstrata
