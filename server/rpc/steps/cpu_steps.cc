// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>

#include "server/rpc/steps/step_runner.h"

namespace kvstrata {
namespace {

class CpuStep final : public StepRunner {
 public:
  explicit CpuStep(std::unique_ptr<Step> step) : StepRunner(*step), step_(std::move(step)) {}

  Status Append(int layer, const Rows& k, const Rows& v) override {
    return step_->Append(layer, k, v);
  }
  Status Select(int layer, const Rows& q) override {
    step_->Select(layer, q);
    return OkStatus();
  }
  Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse) override {
    step_->Attend(layer, q, out, lse);
    return OkStatus();
  }
  Result<Chosen> ChosenOf(int member, bool with_cost) override {
    return Chosen{&step_->selection(member), with_cost ? step_->cost(member) : StepCost()};
  }
  Status End() override {
    step_->End();
    return OkStatus();
  }
  Result<ReadSample> Shadow(int member) override {
    step_->Shadow(member);
    return ReadSample([this, member] { return step_->shadow(member)->sample(); });
  }

 private:
  const std::unique_ptr<Step> step_;
};

class CpuSteps final : public StepDevice {
 public:
  CpuSteps(const Backend* backend, Executor* executor)
      : StepDevice(backend->name, nullptr), backend_(backend), executor_(executor) {}

  Result<std::unique_ptr<StepRunner>> Begin(std::vector<StepMember> members) override {
    return std::unique_ptr<StepRunner>(std::make_unique<CpuStep>(
        std::make_unique<Step>(std::move(members), *backend_, *executor_)));
  }
  Status CatchUp(SequenceState* state, const SequenceView& view, bool prefill_done) override {
    if (prefill_done) return state->PrefillDone(view, *backend_, *executor_);
    state->CatchUp(view, *backend_, *executor_);
    return OkStatus();
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
