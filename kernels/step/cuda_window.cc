// Selector window on a GPU: sinks and the last tokens, which follow from counts.
#include "kernels/step/cuda_frame.h"
#include "kernels/step/cuda_selector.h"

namespace kvstrata {
namespace {

// The positions that are left out; {0, 0}: none.
Run LeftOut(const Plan& plan, int32_t n) {
  if (AttendsInFull(n, plan.window.sinks + plan.window.recent, 0, plan.min_tokens)) return {};
  return {plan.window.sinks, n - plan.window.recent};
}

class CudaWindow final : public CudaSelector {
 public:
  explicit CudaWindow(StepMemory* memory)
      : CudaSelector(SelectorKind::kWindow),
        sink_end_(memory->AddColumn()),
        recent_begin_(memory->AddColumn()) {}

  CudaQueries queries() const override { return CudaQueries::kNone; }

  Status Stage(CudaFrame* frame) override {
    for (int i = 0; i < frame->members(); ++i) {
      if (!Has(*frame, i)) continue;
      const Run left_out = LeftOut(frame->plan(i), frame->member(i).view.tokens + 1);
      frame->memory().At(sink_end_, i) = left_out.begin;
      frame->memory().At(recent_begin_, i) = left_out.end;
    }
    return OkStatus();
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame& frame, const CudaPart& part) const override {
    cuda::DeviceSelection selection;
    selection.sink_end = frame.memory().On(sink_end_, part.first);
    selection.recent_begin = frame.memory().On(recent_begin_, part.first);
    return selection;
  }

  Result<Selection> Read(const CudaFrame&, const CudaPart& part, int, int32_t n) const override {
    const Run left_out = LeftOut(part.plan, n);
    if (left_out == Run{}) return Selection::Full(n);
    Selection selection;
    selection.Reset(n, 1);
    AppendRun({0, left_out.begin}, &selection.runs[0]);
    AppendRun({left_out.end, n}, &selection.runs[0]);
    return selection;
  }

 private:
  const StepMemory::Column sink_end_, recent_begin_;
};

}  // namespace

std::unique_ptr<CudaSelector> NewCudaWindow(StepMemory* memory) {
  return std::make_unique<CudaWindow>(memory);
}

}  // namespace kvstrata
