// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/sequence_state.h"

#include <algorithm>
#include <optional>

namespace kvstrata {
namespace {

std::string Range(int32_t first, int32_t n) {
  return "[" + std::to_string(first) + ", " + std::to_string(int64_t{first} + n) + ")";
}

Status CheckPrompt(const SequenceState& state) {
  if (state.prompt_tokens() >= 0) {
    return FailedPrecondition("PREFILL_REPEATED", "the prompt was complete already, at token " +
                                                      std::to_string(state.prompt_tokens()));
  }
  if (state.tokens() == 0) {
    return FailedPrecondition("SEQUENCE_EMPTY", "the sequence has no tokens; append the prompt");
  }
  return OkStatus();
}

void NotePrefillDone(Selector* selector, const SelectContext& context) {
  if (SelectorHistory* const history = selector->history(); history != nullptr) {
    history->PrefillDone(context);
  }
}

}  // namespace

SequenceState::SequenceState(const Geometry& geometry, const Plan& plan, int32_t tokens,
                             int32_t indexed_tokens, const Codec* codec)
    : geometry_(geometry),
      plan_(plan),
      codec_(codec != nullptr ? codec : &CodecOf(plan)),
      index_(IndexOf(plan, geometry)),
      rotary_(geometry.pre_rope() ? std::make_shared<const RotaryTable>(geometry.rotary) : nullptr),
      selector_(NewSelector(plan, geometry)),
      reported_(tokens),
      tokens_(tokens),
      indexed_tokens_(indexed_tokens) {
  KVS_CHECK(0 <= indexed_tokens && indexed_tokens <= tokens);
}

std::unique_ptr<SequenceState> SequenceState::Clone() const {
  std::unique_ptr<SequenceState> copy(new SequenceState);
  copy->geometry_ = geometry_;
  copy->plan_ = plan_;
  copy->codec_ = codec_;
  copy->index_ = index_;
  copy->rotary_ = rotary_;
  copy->selector_ = selector_->Clone();
  if (on_gpu.history != nullptr) copy->on_gpu.history = on_gpu.history->Fork();
  copy->reported_ = reported_;
  copy->tokens_ = tokens_;
  copy->indexed_tokens_ = indexed_tokens_;
  copy->prompt_tokens_ = prompt_tokens_;
  return copy;
}

SelectContext SequenceState::Context(const SequenceView& view, const Backend* backend,
                                     Executor* executor) const {
  SelectContext context;
  context.geometry = &geometry_;
  context.layout = PageLayout::Of(geometry_);
  context.index = &index_;
  context.view = view;
  context.backend = backend;
  context.executor = executor;
  context.entropy = reported_.entropy();
  context.surprisal = reported_.surprisal();
  context.surprisal_held = reported_.surprisal_held();
  context.boundary = reported_.boundary();
  context.stored = stored();
  context.prompt_tokens = prompt_tokens_;
  return context;
}

Status SequenceState::Refresh(const SequenceView& view) {
  if (view.version == parsed_.version && view.version != 0) return OkStatus();
  parsed_ = {};
  if (view.extent_count == 0 || !codec_->stores()) {
    parsed_.version = view.version;
    return OkStatus();
  }
  const auto pages = view.pages + view.tokens / geometry_.page_tokens;
  parsed_.raw_gone = prompt_tokens_ < 0 && std::find(view.pages, pages, nullptr) != pages;
  KVS_ASSIGN_OR_RETURN(parsed_.stored, codec_->parse(view, geometry_));
  parsed_.version = view.version;  // what could not be parsed is refused again
  return OkStatus();
}

void SequenceState::CatchUp(const SequenceView& view, const Backend& backend, Executor& executor) {
  KVS_CHECK(view.tokens == tokens_ && view.version == parsed_.version);
  if (indexed_tokens_ < tokens_) {
    SegmenterOf(plan_.segmenter())
        .Update(geometry_, index_, view, indexed_tokens_, tokens_, backend, executor);
    indexed_tokens_ = tokens_;
  }
  if (SelectorHistory* const history = selector_->history(); history != nullptr) {
    history->Begin(Context(view, &backend, &executor));
  }
}

Status SequenceState::ClosePrompt() {
  KVS_RETURN_IF_ERROR(CheckPrompt(*this));
  prompt_tokens_ = tokens_;
  NotePrefillDone(selector_.get(), Context({.tokens = tokens_}));
  return OkStatus();
}

Status SequenceState::PrefillDone(const SequenceView& view, const Backend& backend,
                                  Executor& executor) {
  KVS_RETURN_IF_ERROR(CheckPrompt(*this));
  CatchUp(view, backend, executor);
  prompt_tokens_ = tokens_;
  NotePrefillDone(selector_.get(), Context(view, &backend, &executor));
  return OkStatus();
}

Status SequenceState::Report(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                             const uint8_t* boundary) {
  if (first < 0 || n < 0 || int64_t{first} + n > tokens_) {
    return InvalidArgument("REPORT_RANGE", "positions " + Range(first, n) + " of a sequence of " +
                                               std::to_string(tokens_) +
                                               " tokens: report tokens that a step has committed");
  }
  return reported_.Add(first, n, surprisal, entropy, boundary);
}

void SequenceState::Advance(int32_t count) {
  if (SelectorHistory* const history = selector_->history(); history != nullptr) {
    history->Advance(count);
  }
  tokens_ += count;
}

void SequenceState::Truncate(int32_t tokens) {
  KVS_CHECK(tokens >= std::max(prompt_tokens_, 0) && tokens <= tokens_);
  if (tokens == tokens_) return;
  reported_.Truncate(tokens);
  tokens_ = tokens;
  indexed_tokens_ = std::min(indexed_tokens_, tokens);
  if (SelectorHistory* const history = selector_->history(); history != nullptr) {
    history->Truncate(tokens);
  }
  on_gpu.hot_pages.reset();
  if (on_gpu.history != nullptr && !on_gpu.history->Truncate(tokens)) on_gpu.history.reset();
}

Result<InspectArray> SequenceState::Inspect(const SequenceView& view, const Backend& backend,
                                            Executor& executor, std::string_view name) const {
  if (std::optional<InspectArray> series = reported_.Inspect(name); series) return *series;
  KVS_CHECK(view.version == parsed_.version);
  SequenceView indexed = view;
  indexed.tokens = std::min(view.tokens, indexed_tokens_);  // later rows are not written yet
  const SelectContext context = Context(indexed, &backend, &executor);
  Result<InspectArray> array = selector_->Inspect(context, name);
  if (array.ok() || array.status().reason() != "INSPECT_UNKNOWN") return array;
  std::string text = array.status().message();
  if (text.empty()) {
    text = "array '" + std::string(name) + "': selector '" + std::string(NameOf(plan_.selector)) +
           "' keeps no arrays";
  }
  std::string_view before = "; its codec keeps ";
  for (const std::string_view known : codec_->arrays) {
    if (name == known) return codec_->inspect(context, name);
    text.append(before).append(known);
    before = ", ";
  }
  return NotFound("INSPECT_UNKNOWN", text + "; every plan has entropy, surprisal, boundary");
}

}  // namespace kvstrata
