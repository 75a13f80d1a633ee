// Selector `window`: the first n_sink and the last n_recent tokens (StreamingLLM;
// docs/spec/beyond.md, "Baselines").
#include "kernels/select/no_inspection.h"
#include "kernels/select/selector.h"

namespace kvstrata {
namespace {

class WindowSelector final : public Selector {
 public:
  explicit WindowSelector(const Plan& plan)
      : sink_(plan.n_sink), recent_(plan.n_recent), min_tokens_(plan.min_tokens) {}

  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}

  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    if (AttendsInFull(n, sink_ + recent_, 0, min_tokens_)) return out->SetFull(n);
    out->Reset(n, 1);
    AppendRun({0, sink_}, &out->runs[0]);
    AppendRun({n - recent_, n}, &out->runs[0]);
  }

  std::unique_ptr<Selector> Clone() const override {
    return std::make_unique<WindowSelector>(*this);
  }
  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    return NothingToInspect("window", name);
  }

 private:
  int32_t sink_, recent_, min_tokens_;
};

}  // namespace

std::unique_ptr<Selector> NewWindowSelector(const Plan& plan, const Geometry&) {
  return std::make_unique<WindowSelector>(plan);
}

}  // namespace kvstrata
