// SPDX-License-Identifier: Apache-2.0
// Break-even lengths: on either side of one the model says which is faster; how it moves with the
// batch, the plan and the model; what opening a sequence makes of "auto".
#include "kernels/step/break_even.h"

#include <gtest/gtest.h>

#include <string>

namespace kvstrata {
namespace {

constexpr int32_t kNever = 1 << 29;

Geometry Llama() {
  Geometry g;
  g.layers = 32;
  g.query_heads = 32;
  g.kv_heads = 8;
  g.head_dim = 128;
  g.page_tokens = 16;
  g.dtype = DType::kBF16;
  return g;
}

Plan Parsed(const std::string& text) { return ParsePlan(text).value(); }

int32_t OnGpu(const std::string& plan) {
  return BreakEvenTokens(Parsed(plan), Llama(), StepsOn::kGpu);
}
int32_t OnCpu(const std::string& plan) {
  return BreakEvenTokens(Parsed(plan), Llama(), StepsOn::kCpu);
}

TEST(BreakEven, IsWhereSelectingBeginsToSave) {
  for (const char* text :
       {"window", "quest", "quest{group = \"softmax\"}", "bits", "bits{codec = \"packed\"}",
        "chess", "tokenselect", "sentencekv", "sekv", "mosaickv", "quest{codec = \"packed\"}",
        "sentencekv{codec = \"lowrank\"}", "full{codec = \"packed\"}", "quest{rest = \"mean\"}",
        "{selector = \"block\", codec = \"raw\"}", "strata"}) {
    for (const StepsOn where : {StepsOn::kCpu, StepsOn::kGpu}) {
      for (const int batch : {1, 8, 64}) {
        SCOPED_TRACE(std::string(text) +
                     (where == StepsOn::kGpu ? " on a GPU, batch " : ", batch ") +
                     std::to_string(batch));
        Plan plan = Parsed(text);
        plan.batch = batch;
        const int32_t n = BreakEvenTokens(plan, Llama(), where);
        ASSERT_GT(n, 0);
        ASSERT_LT(n, kNever);
        EXPECT_EQ(n % 64, 0);
        EXPECT_GT(SavedBytes(plan, Llama(), where, n), 0);
        EXPECT_LE(SavedBytes(plan, Llama(), where, n - 64), 0);
      }
    }
  }
}

// Kernels are paid once a batch, a CPU's work for every sequence.
TEST(BreakEven, ComesSoonerInLargeBatchesOnAGpu) {
  for (const char* plan : {"quest", "bits", "tokenselect", "sentencekv", "mosaickv"}) {
    Plan one = Parsed(plan), many = one;
    many.batch = 8;
    EXPECT_LT(BreakEvenTokens(many, Llama(), StepsOn::kGpu),
              BreakEvenTokens(one, Llama(), StepsOn::kGpu))
        << plan;
    EXPECT_EQ(BreakEvenTokens(many, Llama(), StepsOn::kCpu),
              BreakEvenTokens(one, Llama(), StepsOn::kCpu))
        << plan;
  }
}

TEST(BreakEven, GrowsWithWhatAPlanReads) {
  EXPECT_LT(OnGpu("quest{budget = 1024}"), OnGpu("quest{budget = 4096}"));
  EXPECT_LT(OnGpu("quest{page = 32}"), OnGpu("quest{page = 4}"));
  EXPECT_LT(OnGpu("quest"), OnGpu("quest{rest = \"mean\"}"));
  EXPECT_LT(OnGpu("bits"), OnGpu("bits{bits = 4}"));
  EXPECT_LT(OnCpu("bits{budget = 1024}"), OnCpu("bits"));
  EXPECT_LT(OnGpu("tokenselect{k = 256}"), OnGpu("tokenselect"));
  EXPECT_LT(OnGpu("sentencekv"), OnGpu("sentencekv{tau = 4096}"));
  EXPECT_LT(OnCpu("mosaickv"), OnCpu("mosaickv{share = 0.6}"));
  // A model of half as many KV heads needs twice the rows to pay for the same kernels.
  Geometry half = Llama();
  half.kv_heads = 4;
  EXPECT_GT(BreakEvenTokens(Parsed("quest"), half, StepsOn::kGpu), OnGpu("quest"));
}

// Nothing is selected by a window but once it is shorter than the sequence.
TEST(BreakEven, OfAWindowIsItsLength) {
  EXPECT_EQ(OnGpu("window{n_sink = 4, n_recent = 2044}"), 2112);
  EXPECT_EQ(OnCpu("window{n_sink = 4, n_recent = 2044}"), 2112);
}

TEST(BreakEven, NeverOrAlways) {
  EXPECT_EQ(OnGpu("quest{page = 1}"), kNever);  // extremes as large as the rows
  EXPECT_EQ(OnCpu("mosaickv{codec = \"raw\", share = 1}"), kNever);
  EXPECT_EQ(OnGpu("full"), 0);
}

TEST(BreakEven, AutoBecomesANumber) {
  const Plan plan =
      WithMinTokens(Parsed("quest{min_tokens = \"auto\", batch = 8}"), Llama(), StepsOn::kGpu);
  Plan eight = Parsed("quest");
  eight.batch = 8;
  EXPECT_EQ(plan.min_tokens, BreakEvenTokens(eight, Llama(), StepsOn::kGpu));
  EXPECT_EQ(Parsed(FormatPlan(plan)), plan) << "a client reads what the daemon formats";
  const Plan fixed = Parsed("quest{min_tokens = 700}");
  EXPECT_EQ(WithMinTokens(fixed, Llama(), StepsOn::kGpu), fixed);
}

}  // namespace
}  // namespace kvstrata
