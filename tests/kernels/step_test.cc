// SPDX-License-Identifier: Apache-2.0
// Steps against attention in double precision, and what must not change their bits: how a batch is
// composed, how many threads there are, how tokens are cut into steps, a budget that holds it all.
#include "kernels/step/step.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "kernels/step/finite_rows.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr uint64_t kSeed = 41;

Geometry SmallGeometry() { return {.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64}; }

struct Truth {
  std::vector<double> out;
  double lse;
};

// Attention of token t's query head over positions, in double.
Truth AttendTo(const Inputs& in, const Ints& positions, int32_t t, int layer, int head) {
  const int d = in.g.head_dim, kv_head = head / in.g.group();
  const float* q = in.Query(t, layer, head);
  std::vector<double> logits;
  double largest = -INFINITY;
  for (const int32_t p : positions) {
    double dot = 0;
    for (int c = 0; c < d; ++c) dot += double{q[c]} * in.Key(p, layer, kv_head)[c];
    logits.push_back(dot / std::sqrt(d));
    largest = std::max(largest, logits.back());
  }
  Truth truth{std::vector<double>(d), 0};
  double sum = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    const double p = std::exp(logits[i] - largest);
    sum += p;
    for (int c = 0; c < d; ++c) truth.out[c] += p * in.Value(positions[i], layer, kv_head)[c];
  }
  for (double& x : truth.out) x /= sum;
  truth.lse = largest + std::log(sum);
  return truth;
}

double RelativeError(const float* out, const std::vector<double>& truth) {
  double error = 0, size = 0;
  for (size_t c = 0; c < truth.size(); ++c) {
    error += (out[c] - truth[c]) * (out[c] - truth[c]);
    size += truth[c] * truth[c];
  }
  return std::sqrt(error / size);
}

// What new token `t` of a step that began at `history` attends: the selection, then causally.
Ints Attended(const Selection& s, int head_group, int32_t history, int32_t t) {
  Ints positions;
  for (const int32_t p : PositionsOf(s.runs[s.groups() == 1 ? 0 : head_group])) {
    if (p < history) positions.push_back(p);
  }
  for (int32_t p = history; p <= t; ++p) positions.push_back(p);
  return positions;
}

// Checks a step's outputs against its own selections; every `stride`-th token.
void CheckOutputs(const Inputs& in, const StepResult& result, int32_t history, int32_t n,
                  int32_t stride = 1) {
  const Geometry& g = in.g;
  for (int layer = 0; layer < g.layers; ++layer) {
    for (int32_t t = 0; t < n; t += stride) {
      for (int head = 0; head < g.query_heads; ++head) {
        const Ints positions =
            Attended(result.selections[layer], head / g.group(), history, history + t);
        const Truth truth = AttendTo(in, positions, history + t, layer, head);
        const int64_t row = (int64_t{layer} * n + t) * g.query_heads + head;
        ASSERT_LT(RelativeError(result.out.data() + row * g.head_dim, truth.out), 1e-5)
            << "seed " << kSeed << " layer " << layer << " token " << t << " head " << head;
        ASSERT_NEAR(result.lse[row], truth.lse, 1e-5);
      }
    }
  }
}

// Decodes to `end`; all outputs.
Floats DecodeTo(HeldSequence& sequence, const Inputs& in, int32_t end, const Backend& backend,
                Executor& executor = InlineExecutor()) {
  Floats outs;
  while (sequence.state->tokens() < end) {
    const StepResult r = RunStep(sequence, in, 1, backend, executor);
    outs.insert(outs.end(), r.out.begin(), r.out.end());
    outs.insert(outs.end(), r.lse.begin(), r.lse.end());
  }
  return outs;
}

constexpr const char* kSparse[] = {
    "window{n_sink = 4, n_recent = 60, min_tokens = 0}", "quest{budget = 64, min_tokens = 0}",
    ("chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, rho = [0.6, 0.6, 0.5], "
     "trigger = \"every\", every = 2, min_tokens = 0}")};

class Steps : public EachBackend {};

TEST_P(Steps, PrefillAndDecodeOfFullAreCausalAttention) {
  // Crosses slices (1024 rows), query tiles (64) and storage pages.
  const Inputs in(SmallGeometry(), 1200, kSeed);
  HeldSequence sequence(in.g, "full");
  const auto check = [&](int32_t n) {
    const int32_t history = sequence.state->tokens();
    const StepResult result = RunStep(sequence, in, n, backend());
    for (const Selection& s : result.selections) EXPECT_TRUE(s.full);
    CheckOutputs(in, result, history, n, n < 10 ? 1 : 31);
    ASSERT_EQ(sequence.state->tokens(), history + n);
  };
  for (const int32_t n : {1, 5, 100, 1}) ASSERT_NO_FATAL_FAILURE(check(n)) << n;
  RunTo(sequence, in, 1000, 1000, backend());
  for (const int32_t n : {1, 150, 1}) ASSERT_NO_FATAL_FAILURE(check(n)) << n;
}

// Twice the usual one of 1/8, so that the products are the same numbers.
TEST_P(Steps, AScaleOfItsOwnIsAScaledQuery) {
  const Inputs in(SmallGeometry(), 330, kSeed);
  Inputs doubled = in;
  for (float& x : doubled.queries) x *= 2;
  Geometry scaled = in.g;
  scaled.scale = 0.25f;
  std::vector<std::string> plans(std::begin(kSparse), std::end(kSparse));
  plans.insert(plans.end(),
               {"full", "tokenselect{k = 40, n_init = 4, n_local = 16, min_tokens = 0}",
                "quest{budget = 64, group = \"softmax\", min_tokens = 0}"});
  for (const std::string& plan : plans) {
    HeldSequence usual(in.g, plan), own(scaled, plan);
    for (HeldSequence* s : {&usual, &own}) {
      RunStep(*s, s == &usual ? doubled : in, 300, backend());
      PrefillDone(*s, backend());
    }
    ASSERT_EQ(DecodeTo(own, in, 330, backend()), DecodeTo(usual, doubled, 330, backend())) << plan;
  }
}

TEST_P(Steps, EverythingIsAttendedBeforeThePromptIsDone) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  for (const char* plan : kSparse) {
    HeldSequence sequence(in.g, plan);
    RunStep(sequence, in, 250, backend());
    const StepResult before = RunStep(sequence, in, 30, backend());
    EXPECT_TRUE(before.selections[1].full) << plan;
    ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, before, 250, 30, 7));
    PrefillDone(sequence, backend());
    const StepResult after = RunStep(sequence, in, 1, backend());
    EXPECT_FALSE(after.selections[1].full) << plan;
    EXPECT_LT(RowsPerHead(after.selections[1]), 200) << plan;
    ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, after, 280, 1));
  }
}

TEST_P(Steps, ChunkAfterThePromptSelectsForItsFirstToken) {
  const Inputs in(SmallGeometry(), 420, kSeed);
  for (const char* plan : kSparse) {
    HeldSequence sequence(in.g, plan);
    RunTo(sequence, in, 300, 300, backend());
    PrefillDone(sequence, backend());
    HeldSequence single(sequence);
    const StepResult chunk = RunStep(sequence, in, 100, backend());
    const StepResult first = RunStep(single, in, 1, backend());
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(chunk.selections[layer].runs, first.selections[layer].runs) << plan;
      EXPECT_EQ(chunk.selections[layer].tokens, 301);
    }
    ASSERT_NO_FATAL_FAILURE(CheckOutputs(in, chunk, 300, 100, 9));
  }
}

TEST_P(Steps, BudgetThatHoldsEverythingIsFullBitForBit) {
  const Inputs in(SmallGeometry(), 1200, kSeed);
  HeldSequence full(in.g, "full");
  RunTo(full, in, 1190, 1190, backend());
  const Floats expected = DecodeTo(full, in, 1200, backend());
  for (const char* plan :
       {"window{n_sink = 1, n_recent = 1199, min_tokens = 0}",
        "quest{budget = 1200, min_tokens = 0}", "quest{n_recent = 1200, min_tokens = 0}",
        "chess{window = 38, min_tokens = 0}", "chess{window = 1, rho = [1, 1, 1], min_tokens = 0}",
        "chess{min_tokens = 1201}", "quest{n_dense_layers = 2, min_tokens = 0}"}) {
    HeldSequence sequence(in.g, plan);
    RunTo(sequence, in, 1190, 1190, backend());
    PrefillDone(sequence, backend());
    EXPECT_TRUE(DecodeTo(sequence, in, 1200, backend()) == expected) << plan;
  }
}

TEST_P(Steps, ThreadsDoNotChangeBits) {
  const Inputs in(SmallGeometry(), 700, kSeed);
  const auto one = NewThreadPool(1), four = NewThreadPool(4);
  for (const char* plan : kSparse) {
    std::vector<Floats> results;
    for (Executor* executor : {&InlineExecutor(), one.get(), four.get()}) {
      HeldSequence sequence(in.g, plan);
      RunTo(sequence, in, 470, 470, backend());
      Floats all = RunStep(sequence, in, 130, backend(), *executor).out;
      ASSERT_TRUE(sequence.state->PrefillDone(sequence.View(), backend(), *executor).ok());
      const Floats decoded = DecodeTo(sequence, in, 620, backend(), *executor);
      all.insert(all.end(), decoded.begin(), decoded.end());
      results.push_back(all);
    }
    EXPECT_TRUE(results[1] == results[0]) << plan;
    EXPECT_TRUE(results[2] == results[0]) << plan;
  }
}

TEST_P(Steps, HowTokensWereAppendedDoesNotChangeBits) {
  const Inputs in(SmallGeometry(), 520, kSeed);
  for (const char* plan : kSparse) {
    std::vector<Floats> results;
    for (const int32_t chunk : {1, 37, 500}) {
      HeldSequence sequence(in.g, plan);
      RunTo(sequence, in, 500, chunk, backend());
      PrefillDone(sequence, backend());
      results.push_back(DecodeTo(sequence, in, 520, backend()));
    }
    EXPECT_TRUE(results[1] == results[0]) << plan;
    EXPECT_TRUE(results[2] == results[0]) << plan;
  }
}

TEST_P(Steps, ForksGoTheirOwnWays) {
  const Inputs in(SmallGeometry(), 460, kSeed);
  Inputs other(SmallGeometry(), 460, kSeed + 1);
  for (const char* plan : kSparse) {
    HeldSequence alone(in.g, plan), parent(in.g, plan);
    for (HeldSequence* s : {&alone, &parent}) {
      RunTo(*s, in, 400, 400, backend());
      PrefillDone(*s, backend());
    }
    const Floats expected = DecodeTo(alone, in, 460, backend());
    Floats got = DecodeTo(parent, in, 420, backend());
    HeldSequence child(parent);
    const Floats of_child = DecodeTo(child, other, 450, backend());
    const Floats rest = DecodeTo(parent, in, 460, backend());
    got.insert(got.end(), rest.begin(), rest.end());
    EXPECT_TRUE(got == expected) << plan;
    const Floats same_rows(expected.end() - static_cast<std::ptrdiff_t>(of_child.size()),
                           expected.end());
    EXPECT_FALSE(of_child == same_rows) << plan;
  }
}

// A ragged batch of a prefill chunk and decodes under different plans: each as if alone.
TEST_P(Steps, MembersOfABatchAreAsIfAlone) {
  const Geometry g = SmallGeometry();
  std::vector<Inputs> inputs;
  for (int i = 0; i < 4; ++i) inputs.emplace_back(g, 370, kSeed + i);
  const char* plans[] = {"full", kSparse[0], kSparse[1], kSparse[2]};
  const int32_t news[] = {70, 1, 3, 1};
  std::vector<HeldSequence> batch;
  batch.reserve(4);
  std::vector<StepResult> alone;
  std::vector<StepMember> members;
  for (int i = 0; i < 4; ++i) {
    HeldSequence& sequence = batch.emplace_back(g, plans[i]);
    RunTo(sequence, inputs[i], 300, 300, backend());
    if (i > 0) PrefillDone(sequence, backend());
    HeldSequence copy(sequence);
    alone.push_back(RunStep(copy, inputs[i], news[i], backend()));
    members.push_back({sequence.state.get(), sequence.View(news[i]), news[i]});
  }
  const auto pack = [&](Floats Inputs::*rows, int32_t heads, int layer) {
    Floats packed;
    for (int i = 0; i < 4; ++i) {
      for (int32_t t = 300; t < 300 + news[i]; ++t) {
        const float* row = inputs[i].Row(inputs[i].*rows, heads, t, layer, 0);
        packed.insert(packed.end(), row, row + heads * g.head_dim);
      }
    }
    return packed;
  };
  const auto rows_of = [&](const Floats& packed, int32_t heads) {
    return Rows{reinterpret_cast<const std::byte*>(packed.data()), heads * g.head_dim * 4,
                g.head_dim * 4, DType::kF32};
  };
  Step step(members, backend(), InlineExecutor());
  EXPECT_EQ(step.tokens(), 75);
  for (int layer = 0; layer < g.layers; ++layer) {
    const Floats k = pack(&Inputs::keys, g.kv_heads, layer),
                 v = pack(&Inputs::values, g.kv_heads, layer);
    const Floats q = pack(&Inputs::queries, g.query_heads, layer);
    EXPECT_TRUE(step.Append(layer, rows_of(k, g.kv_heads), rows_of(v, g.kv_heads)).ok());
    Floats out(q.size()), lse(75 * g.query_heads);
    step.Attend(layer, rows_of(q, g.query_heads),
                {reinterpret_cast<std::byte*>(out.data()), g.query_heads * g.head_dim * 4,
                 g.head_dim * 4, DType::kF32},
                lse.data());
    int64_t row = 0;
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(step.selection(i).runs, alone[i].selections[layer].runs);
      const int64_t n = int64_t{news[i]} * g.query_heads;
      const float* expected = alone[i].out.data() + layer * n * g.head_dim;
      EXPECT_TRUE(std::equal(expected, expected + n * g.head_dim, out.data() + row * g.head_dim))
          << plans[i] << " layer " << layer;
      EXPECT_TRUE(std::equal(alone[i].lse.data() + layer * n, alone[i].lse.data() + (layer + 1) * n,
                             lse.data() + row));
      row += n;
    }
  }
  step.End();
  EXPECT_EQ(batch[2].state->tokens(), 303);
}

// An fp32 that overflows fp16 pages, a NaN, and rows that somebody wrote to their pages: each is
// named by its place in the batch, and the layer can be appended again.
TEST_P(Steps, WhatIsNotFiniteIsNamed) {
  Geometry g = SmallGeometry();
  g.dtype = DType::kF16;
  Inputs in(g, 90, kSeed);
  HeldSequence first(g, "full"), second(g, "full");
  const int32_t tokens = 40;
  Step step({{first.state.get(), first.View(tokens), tokens},
             {second.state.get(), second.View(tokens), tokens}},
            backend(), InlineExecutor());
  const auto append = [&] {
    return step.Append(0, in.Packed(in.keys, g.kv_heads, 0, 0),
                       in.Packed(in.values, g.kv_heads, 0, 0));
  };
  ASSERT_TRUE(append().ok());
  EXPECT_TRUE(CheckWritten(step, 0).ok());
  const auto at = [&](int32_t token, int head) {
    return ((int64_t{token} * g.layers) * g.kv_heads + head) * g.head_dim;
  };
  float& value = in.values[at(60, 1) + 5];
  value = -70000;
  Status refused = append();
  EXPECT_EQ(refused.reason(), "TENSOR_NOT_FINITE");
  EXPECT_NE(refused.message().find("v[60][1][5] is -70000, and the pages' dtype f16 holds at most "
                                   "65504; register the model with a wider one"),
            std::string::npos)
      << refused.ToString();
  refused = CheckWritten(step, 0);  // an infinity by now
  EXPECT_NE(refused.message().find("v[60][1][5] is -inf; "), std::string::npos)
      << refused.ToString();
  in.keys[at(79, 0) + 63] = std::numeric_limits<float>::quiet_NaN();
  refused = append();  // keys before values
  EXPECT_NE(refused.message().find("k[79][0][63] is nan; "), std::string::npos)
      << refused.ToString();
  in.keys[at(79, 0) + 63] = value = 1;
  EXPECT_TRUE(append().ok());
  EXPECT_TRUE(CheckWritten(step, 0).ok());
}

template <typename T>
void CheckConversion(DType dtype, double tolerance, const Backend& backend) {
  const Inputs in(SmallGeometry(), 90, kSeed);
  const Geometry& g = in.g;
  // Heads outermost, so that neither stride is the packed one; more rows than one thread converts.
  for (const int32_t n : {1, 90}) {
    HeldSequence sequence(g, "full");
    if (n == 1) RunTo(sequence, in, 80, 80, backend);
    HeldSequence packed(sequence);
    const int32_t first = sequence.state->tokens();
    const StepResult expected = RunStep(packed, in, n, backend);
    std::vector<T> q(g.query_heads * n * g.head_dim), out(q.size(), FromFloat<T>(-1));
    for (int head = 0; head < g.query_heads; ++head) {
      for (int32_t t = 0; t < n; ++t) {
        for (int c = 0; c < g.head_dim; ++c) {
          q[(int64_t{head} * n + t) * g.head_dim + c] =
              FromFloat<T>(in.Query(first + t, 0, head)[c]);
        }
      }
    }
    const int64_t row = g.head_dim * int64_t{sizeof(T)};
    Step step({{sequence.state.get(), sequence.View(n), n}}, backend, InlineExecutor());
    EXPECT_TRUE(step.Append(0, in.Packed(in.keys, g.kv_heads, first, 0),
                            in.Packed(in.values, g.kv_heads, first, 0))
                    .ok());
    step.Attend(0, {reinterpret_cast<std::byte*>(q.data()), row, n * row, dtype},
                {reinterpret_cast<std::byte*>(out.data()), row, n * row, dtype}, nullptr);
    for (int32_t t = 0; t < n; ++t) {
      for (int head = 0; head < g.query_heads; ++head) {
        for (int c = 0; c < g.head_dim; ++c) {
          const float want = expected.out[(int64_t{t} * g.query_heads + head) * g.head_dim + c];
          ASSERT_NEAR(ToFloat(out[(int64_t{head} * n + t) * g.head_dim + c]), want,
                      tolerance * std::abs(want) + 1e-7)
              << NameOf(dtype) << " n " << n;
        }
      }
    }
  }
}

TEST_P(Steps, QueriesAndOutputsOfAnyTypeAndStride) {
  CheckConversion<float>(DType::kF32, 0, backend());
  CheckConversion<F16>(DType::kF16, 1e-3, backend());
  CheckConversion<BF16>(DType::kBF16, 8e-3, backend());
}

TEST_P(Steps, MassRecallIsTheDifferenceOfTheTwoLse) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  for (const char* plan : kSparse) {
    HeldSequence full(in.g, "full"), sparse(in.g, plan);
    for (HeldSequence* s : {&full, &sparse}) {
      RunTo(*s, in, 399, 399, backend());
      PrefillDone(*s, backend());
    }
    const StepResult all = RunStep(full, in, 1, backend()),
                     some = RunStep(sparse, in, 1, backend());
    for (size_t i = 0; i < all.lse.size(); ++i) {
      const double recall = std::exp(some.lse[i] - all.lse[i]);
      EXPECT_GT(recall, 0);
      EXPECT_LT(recall, 1);
    }
  }
}

TEST_P(Steps, SelectAloneFixesWhatAttendUses) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  HeldSequence sequence(in.g, kSparse[1]);
  RunTo(sequence, in, 398, 398, backend());
  PrefillDone(sequence, backend());
  HeldSequence copy(sequence);
  const StepResult expected = RunStep(copy, in, 1, backend());
  Step step({{sequence.state.get(), sequence.View(1), 1}}, backend(), InlineExecutor());
  EXPECT_TRUE(step.Append(0, in.Packed(in.keys, 2, 398, 0), in.Packed(in.values, 2, 398, 0)).ok());
  step.Select(0, in.Packed(in.queries, 6, 398, 0));
  EXPECT_EQ(step.selection(0).runs, expected.selections[0].runs);
  // Another query attends over what Select chose.
  Floats out(6 * 64), lse(6);
  step.Attend(0, in.Packed(in.queries, 6, 399, 0),
              {reinterpret_cast<std::byte*>(out.data()), 6 * 64 * 4, 64 * 4, DType::kF32},
              lse.data());
  EXPECT_EQ(step.selection(0).runs, expected.selections[0].runs);
}

TEST_P(Steps, AbandonedStepLeavesTheSequenceAsItWas) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  for (const char* plan : kSparse) {
    HeldSequence disturbed(in.g, plan), calm(in.g, plan);
    for (HeldSequence* s : {&disturbed, &calm}) {
      RunTo(*s, in, 350, 350, backend());
      PrefillDone(*s, backend());
    }
    {
      const Inputs garbage(in.g, 400, kSeed + 2);
      Step step({{disturbed.state.get(), disturbed.View(40), 40}}, backend(), InlineExecutor());
      EXPECT_TRUE(step.Append(0, garbage.Packed(garbage.keys, 2, 350, 0),
                              garbage.Packed(garbage.values, 2, 350, 0))
                      .ok());
    }
    EXPECT_EQ(disturbed.state->tokens(), 350);
    EXPECT_TRUE(DecodeTo(disturbed, in, 380, backend()) == DecodeTo(calm, in, 380, backend()))
        << plan;
  }
}

KVS_FOR_EACH_BACKEND(Steps);

}  // namespace
}  // namespace kvstrata
