// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/step_cost.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace kvstrata {
namespace {

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
    const StoredRows* const stored = stored_end_ > 0 ? member_.state->stored() : nullptr;
    const auto raw = static_cast<uint64_t>(2 * geometry_.row_bytes());
    std::vector<Run> runs;
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      if (head == 0 || !SharesRuns()) runs = RunsOf(head);
      read_.Add(RowsIn(runs, {stored_end_, std::numeric_limits<int32_t>::max()}), raw);
      if (stored != nullptr) {
        stored->CountReads({layer_, head, chunks_, runs, stored_end_}, &read_);
        if (stored->has_means()) continue;
      }
      for (int level = 0; level < member_.state->index().level_count; ++level) {
        AddMeans(level, head);
      }
    }
    cost_.rows = read_.rows;
    cost_.coarse_rows = read_.coarse_rows;
    cost_.attend_bytes = read_.bytes;
    return cost_;
  }

 private:
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
      for (const std::vector<Run>& list : ListsOf(c.selection->runs, head, geometry_.kv_heads)) {
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

  // Units of one level of the index that are attended as one row.
  void AddMeans(int level, int head) {
    const IndexLayout& index = member_.state->index();
    std::vector<Run> units;
    size_t lists = 0;
    for (const ReadChunk& c : chunks_) {
      for (const auto& list : ListsOf(c.selection->coarse, head, geometry_.kv_heads)) {
        for (const CoarseRun& run : list) {
          if (run.level == level) AppendUnordered(run.units, &units);
        }
        ++lists;
      }
    }
    if (lists > 1) units = Normalize(std::move(units));
    read_.AddCoarse(
        RowsIn(units, {0, std::numeric_limits<int32_t>::max()}),
        static_cast<uint64_t>(int64_t{2} * geometry_.head_dim * SizeOf(index.coarse_dtype())));
  }

  const StepMember& member_;
  const Geometry& geometry_;
  const int layer_;
  const int32_t stored_end_;
  const std::span<const ReadChunk> chunks_;
  ReadCost read_;
  StepCost cost_;
};

}  // namespace

StepCost CostOf(const StepMember& member, int layer, int32_t stored_end,
                std::span<const ReadChunk> chunks) {
  return Count(member, layer, stored_end, chunks).Total();
}

}  // namespace kvstrata
