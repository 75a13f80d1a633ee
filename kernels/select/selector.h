// Selector: which rows does this query need? (DESIGN, the second axis.)
//
// A selector belongs to one sequence and keeps what it needs between steps. It reads summaries and
// scores, never values; it moves no bytes, takes no lock, knows no transport. It only emits a
// Selection. Implementations: full.cc window.cc minmax.cc cascade.cc, one row each in selector.cc.
// Threads: one call at a time for a selector. Deterministic: ties go to the lower index.
#ifndef KVSTRATA_KERNELS_SELECT_SELECTOR_H_
#define KVSTRATA_KERNELS_SELECT_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/page_view.h"
#include "kernels/plan.h"

namespace kvstrata {

// What one (sequence, layer) attends to in one step.
struct Selection {
  int32_t tokens = 0;  // N, the query's own token included
  bool full = true;    // everything; `runs` is then one run [0, N)
  // Positions, ascending disjoint runs, always-on sets included: one list for all heads, or one per
  // KV head.
  std::vector<std::vector<Run>> runs;
  // Ids of the chosen units, ascending, grouped like `runs` (golden/README "units"): quest the
  // pages chosen beside the always-on ones; cascade the whole page table; empty for full and
  // window.
  std::vector<std::vector<int32_t>> units;

  int groups() const { return static_cast<int>(runs.size()); }
  static Selection Full(int32_t n);
  // The same, reusing the memory of what was there: a decode step selects once a layer.
  void SetFull(int32_t n);
  // `group_count` empty lists over n tokens, not full; reuses memory.
  void Reset(int32_t n, int group_count);
  // Rows attended, summed over groups and divided by their number, rounded up.
  int64_t RowsPerHead() const;
};

// One sequence at one moment: addresses and counts, valid during the call only.
struct SequenceView {
  std::byte* const* pages = nullptr;         // storage pages in order of position
  std::byte* const* index_blocks = nullptr;  // index blocks in order of position
  int32_t tokens = 0;                        // tokens that all layers hold (committed)
};

// What a selector may use.
struct SelectContext {
  const Geometry* geometry = nullptr;
  PageLayout layout;
  const IndexLayout* index = nullptr;
  SequenceView view;
  const Backend* backend = nullptr;
  Executor* executor = nullptr;
  // Entropy in nats per position, NaN where none was reported; as long as what was reported.
  std::span<const float> entropy;
  int32_t prompt_tokens = -1;  // length of the prompt; -1 until prefill_done
};

// An intermediate array, for kvs_inspect and the vectors. Names are golden/README's without
// "PLAN.".
struct InspectArray {
  enum class Type : uint8_t { kF32 = 1, kU16 = 2, kI32 = 3, kU8 = 4 };
  Type type = Type::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

class Selector {
 public:
  virtual ~Selector() = default;

  // Rare work before a step, for all layers at once; summaries of all complete units below
  // view.tokens are there. CHESS decides and makes its re-selection here (DECISIONS 1, 2).
  virtual void Begin(const SelectContext& context) = 0;

  // The prompt is complete: context.prompt_tokens == context.view.tokens.
  virtual void PrefillDone(const SelectContext& context) = 0;

  // The selection of `layer` for a step whose first new token is row n - 1, so n = view.tokens + 1.
  // q [query_heads][head_dim], unscaled, of that token.
  virtual void Select(const SelectContext& context, int layer, const float* q, Selection* out) = 0;

  // A copy for a forked sequence.
  virtual std::unique_ptr<Selector> Clone() const = 0;

  // NOT_FOUND INSPECT_UNKNOWN lists the names there are.
  virtual Result<InspectArray> Inspect(const SelectContext& context,
                                       std::string_view name) const = 0;
};

// REQUIRES: plan came from ParsePlan.
std::unique_ptr<Selector> NewSelector(const Plan& plan, const Geometry& geometry);

// Union of runs given in any order: ascending, disjoint, adjacent ones joined, empty ones gone.
std::vector<Run> Normalize(std::vector<Run> runs);

// Adds a run that begins at or after the last one's begin; joins it where they touch.
inline void AppendRun(Run run, std::vector<Run>* runs) {
  if (run.begin >= run.end) return;
  if (runs->empty() || run.begin > runs->back().end) {
    runs->push_back(run);
  } else if (run.end > runs->back().end) {
    runs->back().end = run.end;
  }
}

// Whether a common rule asks for full attention (spec/common.md).
inline bool AttendsInFull(int32_t n, int32_t always_on, int32_t budget, int32_t min_tokens) {
  return n < min_tokens || always_on + budget >= n;
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_SELECTOR_H_
