// SPDX-License-Identifier: Apache-2.0
// Shadow attention against recall and error in double precision, by their definition; and that who
// is watched answers the same bits.
#include "kernels/step/shadow_attention.h"

#include <cmath>

#include "gmock/gmock.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint64_t kSeed = 47;
constexpr int32_t kPrompt = 1300;  // more than a slice of attention

Geometry SmallGeometry() { return {.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64}; }

struct Softmax {
  std::vector<double> p, out;  // by position; full attention's output
};

Softmax FullAttention(const Inputs& in, int32_t t, int layer, int head) {
  const int d = in.g.head_dim, kv_head = head / in.g.group();
  Softmax s{std::vector<double>(t + 1), std::vector<double>(d)};
  double largest = -INFINITY, sum = 0;
  for (int32_t p = 0; p <= t; ++p) {
    double dot = 0;
    for (int c = 0; c < d; ++c) {
      dot += double{in.Query(t, layer, head)[c]} * in.Key(p, layer, kv_head)[c];
    }
    largest = std::max(largest, s.p[p] = dot / std::sqrt(d));
  }
  for (double& p : s.p) sum += p = std::exp(p - largest);
  for (int32_t p = 0; p <= t; ++p) {
    s.p[p] /= sum;
    for (int c = 0; c < d; ++c) s.out[c] += s.p[p] * in.Value(p, layer, kv_head)[c];
  }
  return s;
}

// One decode token at a time, watched.
struct Watched {
  StepResult result;
  std::vector<std::vector<std::vector<Run>>> attended;  // [layer][group]
  std::vector<int32_t> layers;
  std::vector<float> recall, error;
  bool raw_gone = false;
};

Watched Decode(HeldSequence& sequence, const Inputs& in, const Backend& backend, bool watch,
               DType out_dtype = DType::kF32) {
  const Geometry& g = in.g;
  const int32_t first = sequence.state->tokens();
  const int64_t head = int64_t{g.head_dim} * SizeOf(out_dtype);
  Watched w;
  w.result.out.assign(int64_t{g.layers} * g.query_heads * g.head_dim, -1);
  w.result.lse.assign(int64_t{g.layers} * g.query_heads, -1);
  Step step({{sequence.state.get(), sequence.View(1), 1}}, backend, InlineExecutor());
  if (watch) step.Shadow(0);
  for (int layer = 0; layer < g.layers; ++layer) {
    EXPECT_TRUE(step.Append(layer, in.Packed(in.keys, g.kv_heads, first, layer),
                            in.Packed(in.values, g.kv_heads, first, layer))
                    .ok());
    auto* out = reinterpret_cast<std::byte*>(w.result.out.data() +
                                             int64_t{layer} * g.query_heads * g.head_dim);
    step.Attend(layer, in.Packed(in.queries, g.query_heads, first, layer),
                {out, g.query_heads * head, head, out_dtype},
                w.result.lse.data() + int64_t{layer} * g.query_heads);
    auto& groups = w.attended.emplace_back();
    for (int i = 0; i < step.Groups(0); ++i) groups.push_back(step.Positions(0, i));
  }
  if (watch) {
    const ShadowAttention& shadow = *step.shadow(0);
    w.layers = shadow.layers();
    w.recall = shadow.recall();
    w.error = shadow.error();
    w.raw_gone = shadow.raw_gone();
  } else {
    EXPECT_EQ(step.shadow(0), nullptr);
  }
  step.End();
  return w;
}

void Prefill(HeldSequence& sequence, const Inputs& in, const Backend& backend) {
  RunTo(sequence, in, kPrompt, 500, backend);
  ASSERT_TRUE(sequence.state->PrefillDone(sequence.View(), backend, InlineExecutor()).ok());
}

class Shadow : public ::testing::TestWithParam<const char*> {
 protected:
  const Backend& backend_ = *FindBackend("simd").value();
};

TEST_P(Shadow, IsTheDefinition) {
  const Inputs in(SmallGeometry(), kPrompt + 4, kSeed);
  HeldSequence sequence(in.g, GetParam());
  ASSERT_NO_FATAL_FAILURE(Prefill(sequence, in, backend_));
  double least = 1, largest = 0;
  for (int32_t t = kPrompt; t < kPrompt + 4; ++t) {
    const Watched w = Decode(sequence, in, backend_, true);
    ASSERT_FALSE(w.raw_gone);
    ASSERT_THAT(w.layers, ElementsAre(0, 1));
    for (int i = 0; i < in.g.layers * in.g.query_heads; ++i) {
      const int layer = i / in.g.query_heads, head = i % in.g.query_heads;
      const Softmax full = FullAttention(in, t, layer, head);
      const auto& groups = w.attended[layer];
      double recall = 0, distance = 0, size = 0;
      for (const auto& run : groups[groups.size() * head / in.g.query_heads]) {
        for (int32_t p = run.begin; p < run.end; ++p) recall += full.p[p];
      }
      for (int c = 0; c < in.g.head_dim; ++c) {
        const double plan = w.result.out[int64_t{i} * in.g.head_dim + c];
        distance += (plan - full.out[c]) * (plan - full.out[c]);
        size += full.out[c] * full.out[c];
      }
      ASSERT_NEAR(w.recall[i], recall, 1e-5) << "seed " << kSeed << " row " << i;
      ASSERT_NEAR(w.error[i], std::sqrt(distance / size), 1e-5) << "seed " << kSeed << " row " << i;
      least = std::min(least, recall);
      largest = std::max(largest, std::sqrt(distance / size));
    }
  }
  EXPECT_LT(least, 0.9) << "a plan that loses nothing tests nothing";
  EXPECT_GT(largest, 0.1);
}

TEST_P(Shadow, ChangesNoBitOfTheAnswer) {
  const Inputs in(SmallGeometry(), kPrompt + 3, kSeed);
  HeldSequence sequence(in.g, GetParam());
  ASSERT_NO_FATAL_FAILURE(Prefill(sequence, in, backend_));
  HeldSequence twin(sequence);
  for (int i = 0; i < 3; ++i) {
    const Watched with = Decode(sequence, in, backend_, true);
    const Watched without = Decode(twin, in, backend_, false);
    ASSERT_EQ(with.result.out, without.result.out);
    ASSERT_EQ(with.result.lse, without.result.lse);
    ASSERT_EQ(with.attended, without.attended);
  }
}

// The last one also attends units as coarse rows, which count for the error but not as recalled.
INSTANTIATE_TEST_SUITE_P(
    Plans, Shadow,
    ::testing::Values("window{n_sink = 4, n_recent = 60, min_tokens = 0}",
                      "quest{budget = 64, min_tokens = 0}",
                      "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, "
                      "rho = [0.6, 0.6, 0.5], trigger = \"every\", every = 2, min_tokens = 0}",
                      "quest{budget = 64, rest = \"mean\", min_tokens = 0}"));

TEST(ShadowOfFull, LosesNothingExactly) {
  const Inputs in(SmallGeometry(), kPrompt + 2, kSeed);
  for (const char* name : {"ref", "simd"}) {
    const Backend& backend = *FindBackend(name).value();
    HeldSequence sequence(in.g, "full");
    ASSERT_NO_FATAL_FAILURE(Prefill(sequence, in, backend));
    // What the engine gets rounded is compared before it is.
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Watched w = Decode(sequence, in, backend, true, dtype);
      ASSERT_EQ(w.recall.size(), 12u);
      EXPECT_THAT(w.recall, Each(1.0f)) << name;
      EXPECT_THAT(w.error, Each(0.0f)) << name;
    }
  }
}

TEST(ShadowOfFull, MembersOfABatchAreToldApart) {
  const Backend& backend = *FindBackend("simd").value();
  const Inputs in(SmallGeometry(), kPrompt + 1, kSeed);
  HeldSequence full(in.g, "full"), window(in.g, "window{n_recent = 60, min_tokens = 0}");
  ASSERT_NO_FATAL_FAILURE(Prefill(full, in, backend));
  ASSERT_NO_FATAL_FAILURE(Prefill(window, in, backend));
  HeldSequence alone(window);
  Step step({{full.state.get(), full.View(1), 1}, {window.state.get(), window.View(1), 1}}, backend,
            InlineExecutor());
  ASSERT_TRUE(step.Decodes(0) && step.Decodes(1));
  step.Shadow(1);
  EXPECT_EQ(step.shadow(0), nullptr);
  const auto twice = [](const float* row, int64_t n) {
    std::vector<float> both(row, row + n);
    both.insert(both.end(), row, row + n);
    return both;
  };
  const auto rows = [](const std::vector<float>& x, int32_t heads) {
    return Rows{reinterpret_cast<const std::byte*>(x.data()), heads * 256, 256, DType::kF32};
  };
  for (int layer = 0; layer < 2; ++layer) {
    const auto k = twice(in.Key(kPrompt, layer, 0), 128),
               v = twice(in.Value(kPrompt, layer, 0), 128);
    // The first member asks something else.
    auto q = twice(in.Query(kPrompt, layer, 0), 384);
    for (int i = 0; i < 384; ++i) q[i] = -q[i];
    std::vector<float> out(768);
    EXPECT_TRUE(step.Append(layer, rows(k, 2), rows(v, 2)).ok());
    step.Attend(layer, rows(q, 6),
                {reinterpret_cast<std::byte*>(out.data()), 6 * 256, 256, DType::kF32}, nullptr);
  }
  const Watched w = Decode(alone, in, backend, true);
  EXPECT_EQ(step.shadow(1)->recall(), w.recall);
  EXPECT_EQ(step.shadow(1)->error(), w.error);
}

TEST(ShadowOfNothing, APageThatWasGivenBackIsNoNumber) {
  const Backend& backend = *FindBackend("simd").value();
  const Inputs in(SmallGeometry(), 64, kSeed);
  HeldSequence sequence(in.g, "full");
  RunTo(sequence, in, 64, 64, backend);
  const SequenceView whole = sequence.View(1);
  std::vector<std::byte*> pages(whole.pages, whole.pages + 5);
  pages[1] = nullptr;
  const SequenceView view{pages.data(), whole.index_blocks, whole.tokens};
  ShadowAttention shadow({sequence.state.get(), view, 1}, backend, InlineExecutor());
  EXPECT_TRUE(shadow.raw_gone());
  const std::vector<float> rows(6 * 64, 1.0f);
  shadow.Measure(0, rows.data(), rows.data(), {{{0, 65}}});
  EXPECT_TRUE(shadow.layers().empty());
  EXPECT_TRUE(shadow.recall().empty());
}

TEST(ShadowOfNothing, NaNIsNoRecallAndTheLargestError) {
  const Backend& backend = *FindBackend("simd").value();
  const Inputs in(SmallGeometry(), 65, kSeed);
  HeldSequence sequence(in.g, "full");
  RunTo(sequence, in, 65, 65, backend);
  ShadowAttention shadow({sequence.state.get(), sequence.View(1), 1}, backend, InlineExecutor());
  const std::vector<float> rows(6 * 64, NAN);
  shadow.Measure(1, rows.data(), rows.data(), {{{0, 65}}});
  EXPECT_THAT(shadow.layers(), ElementsAre(1));
  EXPECT_THAT(shadow.recall(), Each(0.0f));
  EXPECT_THAT(shadow.error(), Each(std::numeric_limits<float>::max()));
}

TEST(Decodes, IsOneTokenBehindACompletePrompt) {
  const Backend& backend = *FindBackend("simd").value();
  const Inputs in(SmallGeometry(), 70, kSeed);
  HeldSequence sequence(in.g, "full");
  RunTo(sequence, in, 64, 64, backend);
  const auto decodes = [&](int32_t n) {
    return Step({{sequence.state.get(), sequence.View(n), n}}, backend, InlineExecutor())
        .Decodes(0);
  };
  EXPECT_FALSE(decodes(1));
  ASSERT_TRUE(sequence.state->PrefillDone(sequence.View(), backend, InlineExecutor()).ok());
  EXPECT_TRUE(decodes(1));
  EXPECT_FALSE(decodes(2));
}

}  // namespace
}  // namespace kvstrata
