// SPDX-License-Identifier: Apache-2.0
// What a sequence says of its plan: the length first, then the prompt, the selector and the codec.
#include "kernels/select/notice.h"
#include "kernels/select/why_in_full.h"
#include "kernels/step/sequence_state.h"

namespace kvstrata {

namespace {

// "": nothing to say, as of the other.
std::string SelectorStatus(const SequenceState& state, const SequenceView& view) {
  const SelectContext context = state.Context(view);
  const CudaHistory* const on_gpu = state.on_gpu.history.get();
  return on_gpu == nullptr || state.prompt_tokens() < 0 ? state.selector().StatusText(context)
                                                        : on_gpu->StatusText(state.plan(), context);
}

// What the codec does or did otherwise than the plan asks.
std::string CodecStatus(const SequenceState& state, const Codec& codec) {
  const Plan& plan = state.plan();
  const int32_t prompt = state.prompt_tokens(), tokens = state.tokens();
  if (const StoredRows* const stored = state.stored(); stored != nullptr && stored->rest_due()) {
    return Say(Notice::kRestDue, {stored->end()});
  }
  if (!codec.stores() || prompt < 0 || tokens < plan.min_tokens) return "";
  return codec.status({plan, state.geometry(), prompt, tokens, state.stored()});
}

}  // namespace

std::string SequenceState::StatusText(const SequenceView& view) const {
  if (plan_.selector == SelectorKind::kFull && !codec_->stores()) return "ok";
  // A plan that is not at work yet lacks nothing.
  std::string text = WhyNotAtWork(plan_, tokens_, prompt_tokens_ >= 0);
  if (text.empty()) text = SelectorStatus(*this, view);
  const std::string codec = CodecStatus(*this, *codec_);
  if (!text.empty() && !codec.empty()) text += "; ";
  text += codec;
  return text.empty() ? "ok" : text;
}

}  // namespace kvstrata
