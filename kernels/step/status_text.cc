// What a sequence says of its plan: the length first, then the prompt, the selector and the codec.
#include <algorithm>

#include "kernels/codec/lowrank.h"
#include "kernels/codec/packed.h"
#include "kernels/select/notice.h"
#include "kernels/select/sentence_status.h"
#include "kernels/step/cuda_sentences.h"
#include "kernels/step/sequence_state.h"

namespace kvstrata {

std::string SequenceState::LengthStatus() const {
  if (tokens_ >= plan_.min_tokens) return "";
  if (plan_.min_tokens == kMostMinTokens) return Say(Notice::kNeverPays, {plan_.min_tokens});
  return Say(Notice::kShort, {tokens_, plan_.min_tokens});
}

// Selector vote chooses for the prompt's chunks, too.
std::string SequenceState::PromptStatus() const {
  if (prompt_tokens_ >= 0 || plan_.selector == SelectorKind::kVote) return "";
  return Say(Notice::kPromptOpen);
}

std::string SequenceState::SelectorStatus(const SequenceView& view) const {
  const SelectContext context = Context(view);
  if (on_gpu.sentences == nullptr || prompt_tokens_ < 0) return selector_->StatusText(context);
  return SentenceStatus(plan_, context,
                        on_gpu.sentences->ready || BucketsInFull(plan_, prompt_tokens_) ||
                            on_gpu.sentences->Observed(plan_, geometry_, prompt_tokens_));
}

// What the codec did otherwise than the plan asks.
std::string SequenceState::CodecStatus() const {
  if (plan_.codec == CodecKind::kRaw || prompt_tokens_ < 0 || tokens_ < plan_.min_tokens) return "";
  if (plan_.codec == CodecKind::kLowRank) return MaxLossText(plan_, geometry_, spans());
  // Generated tokens wait for a whole buffer, and that for its turn.
  return PackedText(plan_, std::max(prompt_tokens_, tokens_ - 2 * plan_.packed.buffer), packed());
}

std::string SequenceState::StatusText(const SequenceView& view) const {
  if (plan_.selector == SelectorKind::kFull && plan_.codec == CodecKind::kRaw) return "ok";
  // A plan that is not at work yet lacks nothing.
  std::string text = LengthStatus();
  if (text.empty()) text = PromptStatus();
  if (text.empty()) text = SelectorStatus(view);
  const std::string codec = CodecStatus();
  if (!text.empty() && !codec.empty()) text += "; ";
  text += codec;
  return text.empty() ? "ok" : text;
}

}  // namespace kvstrata
