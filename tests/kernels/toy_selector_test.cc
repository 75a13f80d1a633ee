// SPDX-License-Identifier: Apache-2.0
// What it takes to add a selector: a toy of one file and one row in each table (every_nth_page.h)
// runs in steps on a CPU and on a GPU's frame, here on a table of ops that is a GPU in host memory,
// and both attend the same rows.
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/every_nth_page.h"

namespace kvstrata {
namespace {

constexpr int32_t kPrompt = 330;  // twenty pages, and ten tokens
constexpr char kPlan[] = "window{min_tokens = 0}";

Geometry Shape() {
  return {.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64, .dtype = DType::kBF16};
}

// The token behind the prompt, on the CPU: `held` ends with it.
StepResult DecodeOnCpu(HeldSequence& held, const Inputs& in) {
  const Backend& backend = **FindBackend("ref");
  RunTo(held, in, kPrompt, 64, backend);
  PrefillDone(held, backend);
  return RunStep(held, in, 1, backend);
}

// A step on the GPU's frame over the pages of a sequence that has the token already, which the
// table's append does not write.
class OnGpu {
 public:
  OnGpu(HeldSequence& held, const Inputs& in, const char* plan)
      : g_(in.g), in_(in), state_(in.g, PlanOf(plan), kPrompt, kPrompt), view_(held.View()) {
    view_.tokens = kPrompt;
    EXPECT_TRUE(state_.ClosePrompt().ok());
  }
  Selection Decode() {
    auto begun = CudaStep::Begin({{&state_, view_, 1}}, &workspace_, nullptr, {});
    EXPECT_TRUE(begun.ok()) << begun.status().ToString();
    if (!begun.ok()) return {};
    out.clear();
    for (int layer = 0; layer < g_.layers; ++layer) {
      const Rows q = Tensor(g_.query_heads, layer);
      const Rows kv = Tensor(g_.kv_heads, layer);
      EXPECT_TRUE((*begun)->Append(layer, kv, kv).ok());
      std::vector<float> rows(static_cast<size_t>(g_.query_heads * g_.head_dim));
      const MutableRows to{reinterpret_cast<std::byte*>(rows.data()), g_.query_heads * Row() * 2,
                           Row() * 2, DType::kF32};
      const Status attended = (*begun)->Attend(layer, q, to, nullptr);
      EXPECT_TRUE(attended.ok()) << attended.ToString();
      out.insert(out.end(), rows.begin(), rows.end());
    }
    const Result<Selection> selection = (*begun)->ReadSelection(0);
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    return selection.ok() ? *selection : Selection();
  }
  std::vector<float> out;  // [layers][query_heads][dim]

 private:
  int64_t Row() const { return g_.head_dim * 2; }
  // The queries of a layer in bf16; for keys and values it does not matter what.
  Rows Tensor(int32_t heads, int layer) {
    tensor_.clear();
    const float* const from = in_.Query(kPrompt, layer, 0);
    for (int i = 0; i < g_.query_heads * g_.head_dim; ++i) {
      tensor_.push_back(FromFloat<BF16>(from[i]));
    }
    return {reinterpret_cast<const std::byte*>(tensor_.data()), heads * Row(), Row(), DType::kBF16};
  }

  const Geometry g_;
  const Inputs& in_;
  CudaWorkspace workspace_{testing::FakeOps(), g_};
  SequenceState state_;
  SequenceView view_;
  std::vector<BF16> tensor_;
};

TEST(ToySelector, IsOneRowInEachTable) {
  ASSERT_EQ(SelectorRows().size(), std::size(kSelectorRows));
  ASSERT_EQ(CudaSelectorRows().size(), std::size(kCudaSelectorRows));
  int rows = 0, cuda_rows = 0;
  for (size_t i = 0; i < std::size(kSelectorRows); ++i) {
    rows += SelectorRows()[i] != kSelectorRows[i] ? 1 : 0;
    cuda_rows += CudaSelectorRows()[i] != kCudaSelectorRows[i] ? 1 : 0;
  }
  EXPECT_EQ(rows, 1);
  EXPECT_EQ(cuda_rows, 1);
}

TEST(ToySelector, ChoosesAndAttendsTheSameOnBothMachines) {
  const Inputs in(Shape(), kPrompt + 1, 71);
  HeldSequence held(in.g, kPlan);
  const StepResult cpu = DecodeOnCpu(held, in);
  OnGpu gpu(held, in, kPlan);
  const Selection got = gpu.Decode();
  EXPECT_EQ(got.units, (std::vector<std::vector<int32_t>>{{0, 3, 6, 9, 12, 15, 18}}));
  ASSERT_EQ(got.runs.size(), 1u);
  EXPECT_EQ(got.runs[0].front(), (kvstrata::Run{0, 16}));
  EXPECT_EQ(got.runs[0].back(), (kvstrata::Run{18 * 16, kPrompt + 1}));  // page 19 and on join it
  for (const Selection& selection : cpu.selections) {
    EXPECT_EQ(selection.units, got.units);
    EXPECT_EQ(selection.runs, got.runs);
    EXPECT_FALSE(selection.full);
  }
  ASSERT_EQ(gpu.out.size(), cpu.out.size());
  for (size_t i = 0; i < gpu.out.size(); ++i) ASSERT_NEAR(gpu.out[i], cpu.out[i], 1e-4) << i;
}

TEST(ToySelector, AttendsEverythingBelowMinTokens) {
  constexpr char kLonger[] = "window{min_tokens = 1000}";
  const Inputs in(Shape(), kPrompt + 1, 72);
  HeldSequence held(in.g, kLonger);
  const StepResult cpu = DecodeOnCpu(held, in);
  OnGpu gpu(held, in, kLonger);
  EXPECT_TRUE(gpu.Decode().full);
  EXPECT_TRUE(cpu.selections[0].full);
  for (size_t i = 0; i < gpu.out.size(); ++i) ASSERT_NEAR(gpu.out[i], cpu.out[i], 1e-4) << i;
}

}  // namespace
}  // namespace kvstrata
