// SPDX-License-Identifier: Apache-2.0
// A selector on a GPU whose choice no query decides (kernels/select/fixed_selection.h): what is
// chosen follows from counts, so Stage fills it in, and graphs read what is there.
#include "kernels/select/fixed_selection.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector.h"

namespace kvstrata {
namespace {

class CudaFixed final : public CudaSelector {
 public:
  CudaFixed(const FixedSelection& fixed, StepMemory* memory)
      : fixed_(fixed),
        sink_end_(memory->AddColumn()),
        recent_begin_(memory->AddColumn()),
        count_(fixed.unit_tokens == 0 ? sink_end_ : memory->AddColumn()) {
    if (fixed.unit_tokens > 0) memory->Add(&units_);
  }

  CudaSelectorTraits traits(const Plan&) override { return {.queries = CudaQueries::kNone}; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    constexpr int32_t kMultiple = 64;  // words, in growing
    int32_t stride = units_.stride();
    for (int i = 0; i < frame.members() && fixed_.unit_tokens > 0; ++i) {
      if (!Has(frame, i)) continue;
      const int32_t words = frame.RoomFor(i) / fixed_.unit_tokens / kUnitsOfWord + 1;
      Raise(&stride, words, Generous(words, kMultiple));
    }
    if (stride == 0) return OkStatus();
    return frame.memory().Fit(&units_, frame.memory().members(), stride);
  }

  Status Stage(CudaFrame* frame) override {
    for (int i = 0; i < frame->members(); ++i) {
      if (!Has(*frame, i)) continue;
      FixedChoice choice = fixed_.choose(frame->plan(i), frame->member(i).view.tokens + 1);
      StepMemory& memory = frame->memory();
      memory.At(sink_end_, i) = choice.sink_end;
      memory.At(recent_begin_, i) = choice.recent_begin;
      if (fixed_.unit_tokens == 0) continue;
      memory.At(count_, i) = static_cast<int32_t>(choice.units.size());
      choice.units.resize((choice.units.size() + 1) / kUnitsOfWord * kUnitsOfWord);
      KVS_RETURN_IF_ERROR(
          memory.Write(&units_, i, std::as_bytes(std::span(choice.units)), frame->stream()));
    }
    return OkStatus();
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame& frame, const CudaPart& part) const override {
    cuda::DeviceSelection selection;
    selection.sink_end = frame.memory().On(sink_end_, part.first);
    selection.recent_begin = frame.memory().On(recent_begin_, part.first);
    if (fixed_.unit_tokens == 0) return selection;
    selection.unit_tokens = fixed_.unit_tokens;
    selection.list_stride = units_.stride() * kUnitsOfWord;
    selection.units = units_.Row<int32_t>(part.first);
    selection.counts = frame.memory().On(count_, part.first);
    return selection;
  }

  Result<Selection> Read(const CudaFrame&, const CudaPart& part, int, int32_t n) const override {
    Selection selection;
    SelectFixed(fixed_, part.plan, n, &selection);
    return selection;
  }

 private:
  static constexpr int32_t kUnitsOfWord = sizeof(uint64_t) / sizeof(int32_t);

  const FixedSelection& fixed_;
  const StepMemory::Column sink_end_, recent_begin_, count_;
  WordTable units_;  // by member
};

}  // namespace

std::unique_ptr<CudaSelector> NewCudaFixed(const FixedSelection& fixed, StepMemory* memory) {
  return std::make_unique<CudaFixed>(fixed, memory);
}

}  // namespace kvstrata
