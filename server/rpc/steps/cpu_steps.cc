// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/steps/cpu_steps.h"

#include <cstring>
#include <utility>

namespace kvstrata {
namespace {

class CpuStep final : public StepRunner {
 public:
  CpuStep(std::vector<StepMember> members, const Backend& backend, Executor& executor)
      : step_(std::move(members), backend, executor) {}

  const StepBatch& batch() const override { return step_; }
  Status Append(int layer, const Rows& k, const Rows& v) override {
    return step_.Append(layer, k, v);
  }
  Status Select(int layer, const Rows& q) override {
    step_.Select(layer, q);
    return OkStatus();
  }
  Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse) override {
    step_.Attend(layer, q, out, lse);
    return OkStatus();
  }
  Result<const Selection*> SelectionOf(int member) override { return &step_.selection(member); }
  Result<StepCost> CostOf(int member) override { return step_.cost(member); }
  Status End() override {
    step_.End();
    return OkStatus();
  }
  Status Shadow(int member) override {
    step_.Shadow(member);
    return OkStatus();
  }
  Result<ShadowSample> SampleOf(int member) override { return step_.shadow(member)->sample(); }

 private:
  Step step_;
};

class CpuSteps final : public StepDevice {
 public:
  CpuSteps(const Backend* backend, Executor* executor) : backend_(backend), executor_(executor) {}

  std::string_view backend() const override { return backend_->name; }
  bool on_gpu() const override { return false; }
  Result<std::unique_ptr<StepRunner>> Begin(std::vector<StepMember> members) override {
    return std::unique_ptr<StepRunner>(
        std::make_unique<CpuStep>(std::move(members), *backend_, *executor_));
  }
  Status PrefillDone(SequenceState* state, const SequenceView& view) override {
    return state->PrefillDone(view, *backend_, *executor_);
  }
  void CatchUp(SequenceState* state, const SequenceView& view) override {
    state->CatchUp(view, *backend_, *executor_);
  }
  Result<InspectArray> Inspect(const SequenceState& state, const SequenceView& view,
                               size_t /*blocks*/, std::string_view name) override {
    return state.Inspect(view, *backend_, *executor_, name);
  }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override {
    std::memcpy(to, from, bytes);
    return OkStatus();
  }

 private:
  const Backend* const backend_;
  Executor* const executor_;
};

}  // namespace

std::unique_ptr<StepDevice> NewCpuSteps(const Backend* backend, Executor* executor) {
  return std::make_unique<CpuSteps>(backend, executor);
}

}  // namespace kvstrata
