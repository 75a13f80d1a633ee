// SPDX-License-Identifier: Apache-2.0
// Steps of models whose keys are stored before rotary embedding, against tests/reference/core.py's
// attend_pre_rope written out in double: rows at their positions, or compact at their ranks.
#include <cmath>
#include <complex>

#include "gmock/gmock.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using Ints = std::vector<int32_t>;
using Doubles = std::vector<double>;

constexpr uint64_t kSeed = 43;

Geometry RotaryGeometry(Rotary rotary) {
  return {.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64, .rotary = rotary};
}

// Rope.rotate: channels [0, dim) as dim / 2 complex numbers, rotated.
Doubles Rotate(const float* x, int64_t position, const Geometry& g) {
  const Rotary& r = g.rotary;
  Doubles y(x, x + g.head_dim);
  for (int i = 0; i < r.pairs(); ++i) {
    const int a = r.interleaved ? 2 * i : i, b = r.interleaved ? 2 * i + 1 : r.pairs() + i;
    const double frequency = std::exp(-std::log(r.theta) * 2 * i / r.dim);
    const auto z = std::complex<double>(x[a], x[b]) *
                   std::polar(1.0, static_cast<double>(position) * frequency);
    y[a] = z.real(), y[b] = z.imag();
  }
  return y;
}

// attend_pre_rope of token t's query head over `rows`, the last of which is t.
Doubles AttendPreRope(const Inputs& in, const Ints& rows, int layer, int head, bool compact) {
  const int d = in.g.head_dim, kv_head = head / in.g.group();
  const int64_t here = compact ? static_cast<int64_t>(rows.size()) - 1 : rows.back();
  const Doubles q = Rotate(in.Query(rows.back(), layer, head), here, in.g);
  Doubles logits, out(d);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t place = compact ? static_cast<int64_t>(i) : rows[i];
    const Doubles k = Rotate(in.Key(rows[i], layer, kv_head), place, in.g);
    double dot = 0;
    for (int c = 0; c < d; ++c) dot += q[c] * k[c];
    logits.push_back(dot / std::sqrt(d));
  }
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double p = std::exp(logits[i] - largest);
    sum += p;
    for (int c = 0; c < d; ++c) out[c] += p * in.Value(rows[i], layer, kv_head)[c];
  }
  for (double& x : out) x /= sum;
  return out;
}

// The selected rows before a step that began at `history`, then causally up to token t.
Ints Attended(const Selection& s, int kv_head, int32_t history, int32_t t) {
  Ints rows;
  for (const int32_t p : PositionsOf(s.runs[s.groups() == 1 ? 0 : kv_head])) {
    if (p < history) rows.push_back(p);
  }
  for (int32_t p = history; p <= t; ++p) rows.push_back(p);
  return rows;
}

// Every `stride`-th token of a step of n tokens that is one chunk.
void CheckOutputs(const Inputs& in, const StepResult& result, int32_t history, int32_t n,
                  bool compact, int32_t stride = 1) {
  const Geometry& g = in.g;
  for (int layer = 0; layer < g.layers; ++layer) {
    for (int32_t t = 0; t < n; t += stride) {
      for (int head = 0; head < g.query_heads; ++head) {
        const Ints rows =
            Attended(result.selections[layer], head / g.group(), history, history + t);
        const Doubles truth = AttendPreRope(in, rows, layer, head, compact);
        const int64_t row = (int64_t{layer} * n + t) * g.query_heads + head;
        double error = 0, size = 0;
        for (int c = 0; c < g.head_dim; ++c) {
          const double off = result.out[row * g.head_dim + c] - truth[c];
          error += off * off, size += truth[c] * truth[c];
        }
        ASSERT_LT(std::sqrt(error / size), 2e-5)
            << "seed " << kSeed << " layer " << layer << " token " << t << " head " << head;
      }
    }
  }
}

constexpr const char* kSparse[] = {
    "window{n_sink = 4, n_recent = 60, min_tokens = 0, compact = ",
    "quest{budget = 64, min_tokens = 0, compact = ",
    ("chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, rho = [0.6, 0.6, 0.5], "
     "trigger = \"every\", every = 2, min_tokens = 0, compact = "),
    "tokenselect{k = 40, n_init = 4, n_local = 20, min_tokens = 0, compact = "};

std::string With(const char* plan, bool compact) {
  return std::string(plan) + (compact ? "true}" : "false}");
}

class RotarySteps : public EachBackend {};

TEST_P(RotarySteps, FullIsCausalAttentionAtOriginalPositions) {
  for (const Rotary& rotary :
       {Rotary{10000, 64, false}, Rotary{500000, 64, true}, Rotary{10000, 24, false}}) {
    const Inputs in(RotaryGeometry(rotary), 1130, kSeed);  // crosses a slice of 1024 rows
    HeldSequence sequence(in.g, "full");
    ASSERT_NO_FATAL_FAILURE(
        CheckOutputs(in, RunStep(sequence, in, 40, backend()), 0, 40, false, 7));
    RunTo(sequence, in, 1000, 1000, backend());
    ASSERT_NO_FATAL_FAILURE(
        CheckOutputs(in, RunStep(sequence, in, 100, backend()), 1000, 100, false, 33));
    ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, RunStep(sequence, in, 1, backend()), 1100, 1, false));
  }
}

TEST_P(RotarySteps, SelectionsAreAttendedAtOriginalOrCompactPlaces) {
  const Inputs in(RotaryGeometry({10000, 64}), 420, kSeed);
  for (const char* plan : kSparse) {
    for (const bool compact : {false, true}) {
      SCOPED_TRACE(With(plan, compact));
      HeldSequence sequence(in.g, With(plan, compact));
      RunTo(sequence, in, 300, 300, backend());
      PrefillDone(sequence, backend());
      const StepResult one = RunStep(sequence, in, 1, backend());
      EXPECT_FALSE(one.selections[1].full);
      ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, one, 300, 1, compact));
      // Several new tokens: each sees its own rows in order, the chunk's after the history's.
      ASSERT_NO_FATAL_FAILURE(
          CheckOutputs(in, RunStep(sequence, in, 90, backend()), 301, 90, compact, 11));
    }
  }
}

TEST_P(RotarySteps, PromptChunksOfTokenSelectStandAfterTheirHistory) {
  const Inputs in(RotaryGeometry({10000, 64}), 320, kSeed);
  for (const bool compact : {false, true}) {
    HeldSequence sequence(
        in.g, With("tokenselect{k = 40, n_init = 4, n_local = 20, chunk = 128, min_tokens = 0, "
                   "compact = ",
                   compact));
    RunTo(sequence, in, 256, 128, backend());
    const StepResult chunk = RunStep(sequence, in, 64, backend());
    EXPECT_EQ(RowsPerHead(chunk.selections[0]), 64);
    ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, chunk, 256, 64, compact, 9));
  }
}

TEST_P(RotarySteps, AStepOverSeveralPromptChunksPlacesEach) {
  const Inputs in(RotaryGeometry({10000, 64}), 320, kSeed);
  const std::string plan =
      "tokenselect{k = 40, n_init = 4, n_local = 20, chunk = 32, min_tokens = 0, compact = true}";
  HeldSequence at_once(in.g, plan), apart(in.g, plan);
  for (HeldSequence* s : {&at_once, &apart}) RunTo(*s, in, 256, 256, backend());
  const StepResult both = RunStep(at_once, in, 64, backend());
  RunStep(apart, in, 32, backend());
  const StepResult second = RunStep(apart, in, 32, backend());
  const int64_t half = int64_t{32} * in.g.query_heads * in.g.head_dim;
  for (int64_t layer = 0; layer < in.g.layers; ++layer) {
    const auto from = both.out.begin() + (2 * layer + 1) * half;
    EXPECT_TRUE(std::equal(from, from + half, second.out.begin() + layer * half)) << layer;
  }
}

// core.py's test_compact_positions: a gap attended at compact places is a short sequence of the
// attended rows, attended in full. So no place reaches the number of attended rows, however long
// the sequence is.
TEST_P(RotarySteps, CompactIsAShortSequenceOfTheAttendedRows) {
  const Geometry g = RotaryGeometry({10000, 64});
  const Inputs in(g, 306, kSeed);
  HeldSequence gap(g, "window{n_sink = 8, n_recent = 32, min_tokens = 0, compact = true}");
  RunTo(gap, in, 305, 305, backend());
  PrefillDone(gap, backend());
  const StepResult compact = RunStep(gap, in, 1, backend());

  Inputs rows(g, 40, kSeed);
  for (int32_t i = 0; i < 40; ++i) {
    const int32_t from = i < 8 ? i : 306 - 40 + i;
    const auto copy = [&](const std::vector<float>& source, int32_t heads, std::vector<float>* to) {
      const int64_t token = int64_t{g.layers} * heads * g.head_dim;
      std::copy_n(source.begin() + from * token, token, to->begin() + i * token);
    };
    copy(in.keys, g.kv_heads, &rows.keys);
    copy(in.values, g.kv_heads, &rows.values);
    copy(in.queries, g.query_heads, &rows.queries);
  }
  HeldSequence brief(g, "full");
  RunTo(brief, rows, 39, 39, backend());
  const StepResult full = RunStep(brief, rows, 1, backend());
  EXPECT_EQ(compact.out, full.out);
  EXPECT_EQ(compact.lse, full.lse);
}

TEST_P(RotarySteps, CompactOfEverythingIsOriginalBitForBit) {
  const Inputs in(RotaryGeometry({10000, 64}), 1100, kSeed);
  std::vector<std::vector<float>> outs;
  for (const char* plan : {"full", "window{n_recent = 2000, min_tokens = 0, compact = true}",
                           "quest{min_tokens = 4096, compact = true}"}) {
    HeldSequence sequence(in.g, plan);
    RunTo(sequence, in, 1090, 1090, backend());
    PrefillDone(sequence, backend());
    outs.push_back(RunStep(sequence, in, 9, backend()).out);
  }
  EXPECT_EQ(outs[1], outs[0]);
  EXPECT_EQ(outs[2], outs[0]);
}

// Selectors score what is stored with the query as it comes (docs/spec/README.md).
TEST_P(RotarySteps, SelectorsSeeNoRotation) {
  const Geometry plain = RotaryGeometry({});
  const Inputs in(RotaryGeometry({10000, 64}), 301, kSeed);
  for (const char* plan : kSparse) {
    std::vector<Selection> chosen;
    for (const Geometry& g : {plain, in.g}) {
      HeldSequence sequence(g, With(plan, false));
      RunTo(sequence, in, 300, 300, backend());
      PrefillDone(sequence, backend());
      chosen.push_back(RunStep(sequence, in, 1, backend()).selections[1]);
    }
    EXPECT_EQ(chosen[0].runs, chosen[1].runs) << plan;
  }
}

TEST_P(RotarySteps, ThreadsAndForksDoNotChangeBits) {
  const Inputs in(RotaryGeometry({10000, 64}), 401, kSeed);
  const auto four = NewThreadPool(4);
  for (const char* plan : kSparse) {
    HeldSequence sequence(in.g, With(plan, true));
    RunTo(sequence, in, 400, 400, backend());
    PrefillDone(sequence, backend());
    HeldSequence fork(sequence);
    const StepResult one = RunStep(sequence, in, 1, backend());
    EXPECT_EQ(RunStep(fork, in, 1, backend(), *four).out, one.out) << plan;
  }
}

KVS_FOR_EACH_BACKEND(RotarySteps);

}  // namespace
}  // namespace kvstrata
