// Selector: which rows does this query need? (The second axis of docs/plans.md.)
//
// A selector belongs to one sequence and keeps what it needs between steps. It reads summaries and
// scores, never values; it moves no bytes, takes no lock, knows no transport. It only emits a
// Selection. Implementations: fixed_selection.cc (of full.cc and window.cc) minmax.cc cascade.cc
// vote.cc bucket.cc zoom.cc block.cc, one row each in selector_rows.h.
// Threads: one call at a time for a selector. Deterministic: ties go to the lower index.
#ifndef KVSTRATA_KERNELS_SELECT_SELECTOR_H_
#define KVSTRATA_KERNELS_SELECT_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/codec/extent.h"
#include "kernels/page_view.h"
#include "kernels/plan.h"

namespace kvstrata {

class CascadeTrigger;  // kernels/select/cascade_trigger.h
class PackedStorage;   // kernels/codec/packed.h
class SpanStorage;     // kernels/codec/lowrank.h

// Units of one level of the plan's index (0 the finest), or spans (level 0), each attended as one
// row of means.
struct CoarseRun {
  int32_t level = 0;
  Run units;
  bool operator==(const CoarseRun&) const = default;
};

// What one (sequence, layer) attends to in one step.
struct Selection {
  int32_t tokens = 0;  // N, the query's own token included
  bool full = true;    // everything; `runs` is then one run [0, N)
  // Positions, ascending disjoint runs, always-on sets included: one list for all heads, one per KV
  // head, or one per query head. Codec lowrank: the raw rows alone (one list); what is expanded is
  // in `units`.
  std::vector<std::vector<Run>> runs;
  // Ids of the chosen units, ascending, grouped like `runs` (tests/golden/README.md "units"): quest
  // the pages chosen beside the always-on ones; cascade the whole page table; empty for full and
  // window.
  std::vector<std::vector<int32_t>> units;
  // Units attended as one coarse row each, ascending by position, grouped like `units`; empty when
  // the rest is dropped. Rows come from the plan's index (index.rest), or from the spans' means.
  std::vector<std::vector<CoarseRun>> coarse;
  int64_t scored_bytes = 0;  // that selecting read; 0 when an earlier selection was reused

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
  // Storage pages in order of position; nullptr: its rows are held by extents alone.
  std::byte* const* pages = nullptr;
  std::byte* const* index_blocks = nullptr;  // index blocks in order of position
  int32_t tokens = 0;                        // tokens that all layers hold (committed)
  const ExtentView* extents = nullptr;       // what a codec holds, in order of position
  int32_t extent_count = 0;
  uint64_t version = 0;  // of the table; extents change with it alone
  // By page: 1 where it lies in the host's memory, of a sequence whose steps run on a GPU; null:
  // nowhere.
  const uint8_t* far_pages = nullptr;
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
  std::span<const float> surprisal;   // the same, nats
  int32_t surprisal_held = 0;         // leading positions whose surprisal is known elsewhere
  std::span<const uint8_t> boundary;  // 1: this token ends a sentence
  int32_t prompt_tokens = -1;         // length of the prompt; -1 until prefill_done
  // What the extents hold, parsed; null: nothing yet (all rows are raw), or another codec.
  const PackedStorage* packed = nullptr;
  const SpanStorage* spans = nullptr;
};

// An intermediate array, for kvs_inspect and the vectors. Names are tests/golden/README.md's
// without "PLAN.".
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
  // view.tokens are there. CHESS decides and makes its re-selection here (ADR 2).
  virtual void Begin(const SelectContext& context) = 0;

  // The prompt is complete: context.prompt_tokens == context.view.tokens.
  virtual void PrefillDone(const SelectContext& context) = 0;

  // Queries of `count` prompt tokens from position `first` on, before prefill_done: query token i,
  // head h at q + i * q_token + h * head_dim (floats). In order, once per layer and token.
  virtual void Observe(const SelectContext& context, int layer, const float* q, int64_t q_token,
                       int32_t first, int32_t count) {
    (void)context, (void)layer, (void)q, (void)q_token, (void)first, (void)count;
  }

  // The selection of a prompt chunk [start, start + count) from the tokens before it, whose keys
  // are in the pages; the chunk itself is attended causally. False: attend in full.
  virtual bool SelectChunk(const SelectContext& context, int layer, const float* q, int64_t q_token,
                           int32_t start, int32_t count, Selection* out) {
    (void)context, (void)layer, (void)q, (void)q_token, (void)start, (void)count, (void)out;
    return false;
  }

  // The selection of `layer` for a step whose first new token is row n - 1, so n = view.tokens + 1.
  // q [query_heads][head_dim], unscaled, of that token. What it changes in the selector's state
  // takes effect with Advance; without it (an aborted step) the next Select finds the old state.
  virtual void Select(const SelectContext& context, int layer, const float* q, Selection* out) = 0;

  // The step's `count` new tokens are committed; their queries were those of the last Selects.
  virtual void Advance(int32_t count) { (void)count; }

  // Tokens from `tokens` on are taken back: forgets what came of them. What it had chosen by them
  // it chooses anew. Not in a step.
  virtual void Truncate(int32_t tokens) { (void)tokens; }

  // What decides when it selects, for steps on a GPU, which do the rest of its work themselves;
  // null but for selector cascade.
  virtual CascadeTrigger* trigger() { return nullptr; }

  // What the plan's status should say of it; "" nothing.
  virtual std::string StatusText(const SelectContext& context) const {
    (void)context;
    return "";
  }

  // A copy for a forked sequence.
  virtual std::unique_ptr<Selector> Clone() const = 0;

  // NOT_FOUND INSPECT_UNKNOWN lists the names there are.
  virtual Result<InspectArray> Inspect(const SelectContext& context,
                                       std::string_view name) const = 0;
};

// REQUIRES: plan came from ParsePlan.
std::unique_ptr<Selector> NewSelector(const Plan& plan, const Geometry& geometry);

// What its selector asks of the engine: a sum of Needs (kernels/plan_needs.h).
uint32_t SelectorNeeds(const Plan& plan);

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

// Whether a common rule asks for full attention (docs/spec/README.md).
inline bool AttendsInFull(int32_t n, int32_t always_on, int32_t budget, int32_t min_tokens) {
  return n < min_tokens || always_on + budget >= n;
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_SELECTOR_H_
