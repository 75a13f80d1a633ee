// SPDX-License-Identifier: Apache-2.0
// A sequence whose pages and index blocks are this process's own memory, and random inputs for it:
// what tests of segmenters, selectors and steps run on, without a daemon.
//
// Inputs are exact in bf16, so that a double-precision oracle starts from the same numbers.
// Threads: none of it is shared.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/step/step.h"
#include "tests/kernels/rows_per_head.h"

namespace kvstrata {

inline Plan PlanOf(const std::string& text) {
  Result<Plan> plan = ParsePlan(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.status().ToString();
  return plan.ok() ? *plan : Plan();
}

// Keys, values [tokens][layers][kv_heads][dim] and queries [tokens][layers][query_heads][dim].
struct Inputs {
  Inputs(const Geometry& geometry, int32_t tokens, uint64_t seed) : g(geometry), n(tokens) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int32_t heads, std::vector<float>* out) {
      out->resize(int64_t{n} * g.layers * heads * g.head_dim);
      for (float& x : *out) x = ToFloat(FromFloat<BF16>(normal(random)));
    };
    fill(g.kv_heads, &keys);
    fill(g.kv_heads, &values);
    fill(g.query_heads, &queries);
  }

  const float* Key(int32_t t, int layer, int head) const {
    return Row(keys, g.kv_heads, t, layer, head);
  }
  const float* Value(int32_t t, int layer, int head) const {
    return Row(values, g.kv_heads, t, layer, head);
  }
  const float* Query(int32_t t, int layer, int head) const {
    return Row(queries, g.query_heads, t, layer, head);
  }
  const float* Row(const std::vector<float>& rows, int32_t heads, int32_t t, int layer,
                   int head) const {
    return rows.data() + ((int64_t{t} * g.layers + layer) * heads + head) * g.head_dim;
  }
  Rows Packed(const std::vector<float>& rows, int32_t heads, int32_t t, int layer) const {
    const int64_t head = g.head_dim * int64_t{sizeof(float)};
    return {reinterpret_cast<const std::byte*>(Row(rows, heads, t, layer, 0)),
            g.layers * heads * head, head, DType::kF32};
  }

  Geometry g;
  int32_t n;
  std::vector<float> keys, values, queries;
};

class HeldSequence {
 public:
  HeldSequence(const Geometry& geometry, const std::string& plan)
      : state(std::make_unique<SequenceState>(geometry, PlanOf(plan), 0, 0)) {}
  // A fork with memory of its own.
  HeldSequence(const HeldSequence& other)
      : state(other.state->Clone()), pages_(other.pages_), blocks_(other.blocks_) {}
  HeldSequence& operator=(const HeldSequence&) = delete;

  // A view that covers `more` new tokens; its addresses are valid until the next call.
  SequenceView View(int32_t more = 0) {
    const int32_t end = state->tokens() + more;
    const Geometry& g = state->geometry();
    Cover((end + g.page_tokens - 1) / g.page_tokens, g.page_bytes(), &pages_, &page_addresses_);
    Cover(state->index().BlocksFor(end), state->index().block_bytes, &blocks_, &block_addresses_);
    return {page_addresses_.data(), block_addresses_.data(), state->tokens()};
  }

  const std::vector<std::vector<std::byte>>& blocks() const { return blocks_; }

  std::unique_ptr<SequenceState> state;

 private:
  static void Cover(int64_t n, int64_t bytes, std::vector<std::vector<std::byte>>* memory,
                    std::vector<std::byte*>* addresses) {
    // 0xFF is NaN in every dtype: what is read before it was written shows.
    while (static_cast<int64_t>(memory->size()) < n) memory->emplace_back(bytes, std::byte{0xFF});
    addresses->clear();
    for (auto& m : *memory) addresses->push_back(m.data());
    addresses->push_back(nullptr);
  }

  std::vector<std::vector<std::byte>> pages_, blocks_;
  std::vector<std::byte*> page_addresses_, block_addresses_;
};

// What one step of one sequence gave.
struct StepResult {
  std::vector<Selection> selections;  // by layer
  std::vector<float> out, lse;        // [layers][tokens][query_heads]([dim])
};

// Runs tokens [state.tokens, + n) of `in` through one step.
inline StepResult RunStep(HeldSequence& sequence, const Inputs& in, int32_t n,
                          const Backend& backend, Executor& executor = InlineExecutor()) {
  const Geometry& g = in.g;
  const int32_t first = sequence.state->tokens();
  const int64_t rows = int64_t{n} * g.query_heads, head = g.head_dim * int64_t{sizeof(float)};
  StepResult result;
  result.out.assign(g.layers * rows * g.head_dim, -1);
  result.lse.assign(g.layers * rows, -1);
  Step step({{sequence.state.get(), sequence.View(n), n}}, backend, executor);
  for (int layer = 0; layer < g.layers; ++layer) {
    EXPECT_TRUE(step.Append(layer, in.Packed(in.keys, g.kv_heads, first, layer),
                            in.Packed(in.values, g.kv_heads, first, layer))
                    .ok());
    auto* out = reinterpret_cast<std::byte*>(result.out.data() + layer * rows * g.head_dim);
    step.Attend(layer, in.Packed(in.queries, g.query_heads, first, layer),
                {out, g.query_heads * head, head, DType::kF32}, result.lse.data() + layer * rows);
    result.selections.push_back(step.selection(0));
  }
  step.End();
  return result;
}

// Appends up to `end` tokens in steps of `chunk`, without attending.
inline void RunTo(HeldSequence& sequence, const Inputs& in, int32_t end, int32_t chunk,
                  const Backend& backend) {
  while (sequence.state->tokens() < end) {
    const int32_t first = sequence.state->tokens(), n = std::min(chunk, end - first);
    Step step({{sequence.state.get(), sequence.View(n), n}}, backend, InlineExecutor());
    for (int layer = 0; layer < in.g.layers; ++layer) {
      EXPECT_TRUE(step.Append(layer, in.Packed(in.keys, in.g.kv_heads, first, layer),
                              in.Packed(in.values, in.g.kv_heads, first, layer))
                      .ok());
    }
    step.End();
  }
}

inline void PrefillDone(HeldSequence& sequence, const Backend& backend) {
  const Status status = sequence.state->PrefillDone(sequence.View(), backend, InlineExecutor());
  ASSERT_TRUE(status.ok()) << status.ToString();
}

inline void Settle(HeldSequence& sequence, const Backend& backend) {
  sequence.state->CatchUp(sequence.View(), backend, InlineExecutor());
}

inline std::vector<int32_t> PositionsOf(const std::vector<Run>& runs) {
  std::vector<int32_t> positions;
  for (const Run& r : runs) {
    for (int32_t t = r.begin; t < r.end; ++t) positions.push_back(t);
  }
  return positions;
}

template <typename T>
std::vector<T> Inspected(HeldSequence& sequence, const Backend& backend, const std::string& name) {
  const Result<InspectArray> array =
      sequence.state->Inspect(sequence.View(), backend, InlineExecutor(), name);
  EXPECT_TRUE(array.ok()) << array.status().ToString();
  if (!array.ok()) return {};
  std::vector<T> values(array->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
  return values;
}

// Tests that hold for every backend.
class EachBackend : public ::testing::TestWithParam<std::string> {
 protected:
  const Backend& backend() const { return **FindBackend(GetParam()); }
};

inline std::vector<std::string> BackendNames() {
  std::vector<std::string> names;
  for (const Backend& b : Backends()) names.emplace_back(b.name);
  return names;
}

#define KVS_FOR_EACH_BACKEND(suite)                                      \
  INSTANTIATE_TEST_SUITE_P(, suite, ::testing::ValuesIn(BackendNames()), \
                           [](const auto& test) { return test.param; })

}  // namespace kvstrata
