#include "kernels/step/sequence_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/select/cascade_trigger.h"
#include "kernels/step/cuda_sentences.h"
#include "kernels/step/cuda_vote_cache.h"

namespace kvstrata {
namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kIdsAhead = 4096;

std::string Range(int32_t first, int32_t n) {
  return "[" + std::to_string(first) + ", " + std::to_string(int64_t{first} + n) + ")";
}

// Where a series may go on: at its end, or, behind that, anywhere from there to `held` + `more`.
Status CheckOrder(std::string_view series, size_t length, int32_t first, int32_t held,
                  int32_t more) {
  const auto next = static_cast<int32_t>(length);
  if (first >= next && first <= std::max(next, held + more)) return OkStatus();
  const bool gap = first >= next;
  std::string text = std::string(series) + " from position " + std::to_string(first) +
                     (gap ? ": a gap" : ": already reported") + "; go on at position " +
                     std::to_string(gap ? std::max(next, held) : next);
  if (gap && more > 0 && next <= held) text += " or " + std::to_string(held + more);
  return InvalidArgument("REPORT_ORDER", text);
}

Status CheckValues(std::string_view series, const float* values, int32_t first, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    return InvalidArgument(
        "REPORT_VALUE", std::string(series) + " of position " + std::to_string(first + i) + " is " +
                            std::to_string(values[i]) + "; allowed are finite nats >= 0");
  }
  return OkStatus();
}

Status CheckBoundaries(const uint8_t* values, int32_t first, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (values[i] <= 1) continue;
    return InvalidArgument("REPORT_VALUE", "boundary of position " + std::to_string(first + i) +
                                               " is " + std::to_string(values[i]) +
                                               "; allowed are 0 and 1");
  }
  return OkStatus();
}

template <typename T>
void Extend(const T* values, int32_t first, int32_t n, T none, std::vector<T>* series) {
  if (values == nullptr || n == 0) return;
  series->resize(first, none);
  series->insert(series->end(), values, values + n);
}

template <typename T>
InspectArray SeriesArray(InspectArray::Type type, const std::vector<T>& series) {
  InspectArray array;
  array.type = type;
  array.shape = {static_cast<int64_t>(series.size())};
  array.bytes.resize(series.size() * sizeof(T));
  if (!series.empty()) std::memcpy(array.bytes.data(), series.data(), array.bytes.size());
  return array;
}

}  // namespace

SequenceState::SequenceState(const Geometry& geometry, const Plan& plan, int32_t tokens,
                             int32_t indexed_tokens)
    : geometry_(geometry),
      plan_(plan),
      index_(IndexOf(plan, geometry)),
      rotary_(geometry.pre_rope() ? std::make_shared<const RotaryTable>(geometry.rotary) : nullptr),
      selector_(NewSelector(plan, geometry)),
      held_tokens_(tokens),
      tokens_(tokens),
      indexed_tokens_(indexed_tokens) {
  KVS_CHECK(0 <= indexed_tokens && indexed_tokens <= tokens);
}

std::unique_ptr<SequenceState> SequenceState::Clone() const {
  std::unique_ptr<SequenceState> copy(new SequenceState);
  copy->geometry_ = geometry_;
  copy->plan_ = plan_;
  copy->index_ = index_;
  copy->rotary_ = rotary_;
  copy->selector_ = selector_->Clone();
  copy->on_gpu.vote_cache = on_gpu.vote_cache;
  if (on_gpu.vote_cache != nullptr) on_gpu.vote_cache->shared = true;
  if (on_gpu.sentences != nullptr) {
    copy->on_gpu.sentences = std::make_shared<CudaSentences>(*on_gpu.sentences);
    if (on_gpu.sentences->memory != nullptr) on_gpu.sentences->memory->shared = true;
  }
  copy->entropy_ = entropy_;
  copy->surprisal_ = surprisal_;
  copy->boundary_ = boundary_;
  copy->ids_ = ids_;
  copy->boundary_marked_ = boundary_marked_;
  copy->held_tokens_ = held_tokens_;
  copy->surprisal_held_ = surprisal_held_;
  copy->tokens_ = tokens_;
  copy->indexed_tokens_ = indexed_tokens_;
  copy->prompt_tokens_ = prompt_tokens_;
  return copy;
}

SelectContext SequenceState::Context(const SequenceView& view) const {
  SelectContext context;
  context.geometry = &geometry_;
  context.layout = PageLayout::Of(geometry_);
  context.index = &index_;
  context.view = view;
  context.entropy = entropy_;
  context.surprisal = surprisal_;
  context.surprisal_held = surprisal_held_;
  context.boundary = boundary_;
  context.packed = packed();
  context.spans = spans();
  context.prompt_tokens = prompt_tokens_;
  return context;
}

SelectContext SequenceState::Context(const SequenceView& view, const Backend& backend,
                                     Executor& executor) const {
  SelectContext context = Context(view);
  context.backend = &backend;
  context.executor = &executor;
  return context;
}

Status SequenceState::Refresh(const SequenceView& view) {
  if (view.version == version_ && view.version != 0) return OkStatus();
  packed_.reset();
  spans_.reset();
  version_ = view.version;
  raw_gone_ = false;
  if (view.extent_count == 0) return OkStatus();
  const auto pages = view.pages + view.tokens / geometry_.page_tokens;
  raw_gone_ = prompt_tokens_ < 0 && std::find(view.pages, pages, nullptr) != pages;
  if (plan_.codec == CodecKind::kPacked) {
    KVS_ASSIGN_OR_RETURN(packed_, PackedStorage::Parse(view, geometry_));
  } else if (plan_.codec == CodecKind::kLowRank) {
    KVS_ASSIGN_OR_RETURN(spans_, SpanStorage::Parse(view, geometry_));
  }
  return OkStatus();
}

void SequenceState::CatchUp(const SequenceView& view, const Backend& backend, Executor& executor) {
  KVS_CHECK(view.tokens == tokens_ && view.version == version_);
  if (indexed_tokens_ < tokens_) {
    SegmenterOf(plan_.segmenter())
        .Update(geometry_, index_, view, indexed_tokens_, tokens_, backend, executor);
    indexed_tokens_ = tokens_;
  }
  selector_->Begin(Context(view, backend, executor));
}

Status SequenceState::CheckPrompt() const {
  if (prompt_tokens_ >= 0) {
    return FailedPrecondition("PREFILL_REPEATED", "the prompt was complete already, at token " +
                                                      std::to_string(prompt_tokens_));
  }
  if (tokens_ == 0) {
    return FailedPrecondition("SEQUENCE_EMPTY", "the sequence has no tokens; append the prompt");
  }
  return OkStatus();
}

Status SequenceState::ClosePrompt() {
  KVS_RETURN_IF_ERROR(CheckPrompt());
  prompt_tokens_ = tokens_;
  if (CascadeTrigger* const trigger = selector_->trigger(); trigger != nullptr) {
    trigger->PromptDone(tokens_);
  }
  return OkStatus();
}

Status SequenceState::PrefillDone(const SequenceView& view, const Backend& backend,
                                  Executor& executor) {
  KVS_RETURN_IF_ERROR(CheckPrompt());
  CatchUp(view, backend, executor);
  prompt_tokens_ = tokens_;
  selector_->PrefillDone(Context(view, backend, executor));
  return OkStatus();
}

Status SequenceState::Report(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                             const uint8_t* boundary) {
  if (first < 0 || n < 0 || int64_t{first} + n > tokens_) {
    return InvalidArgument("REPORT_RANGE", "positions " + Range(first, n) + " of a sequence of " +
                                               std::to_string(tokens_) +
                                               " tokens: report tokens that a step has committed");
  }
  if (surprisal != nullptr) {
    KVS_RETURN_IF_ERROR(CheckOrder("surprisal", surprisal_.size(), first, held_tokens_, 1));
    KVS_RETURN_IF_ERROR(CheckValues("surprisal", surprisal, first, n));
  }
  if (entropy != nullptr) {
    KVS_RETURN_IF_ERROR(CheckOrder("entropy", entropy_.size(), first, tokens_, 0));
    KVS_RETURN_IF_ERROR(CheckValues("entropy", entropy, first, n));
  }
  if (boundary != nullptr) {
    if (!boundary_marked_) {
      KVS_RETURN_IF_ERROR(CheckOrder("boundary", boundary_.size(), first, held_tokens_, 0));
    }
    KVS_RETURN_IF_ERROR(CheckBoundaries(boundary, first, n));
  }
  if (const int32_t skipped = SkippedPosition(first, surprisal); skipped >= 0) {
    const float nothing = 0;
    Extend(&nothing, skipped, 1, kNone, &surprisal_);
  }
  Extend(surprisal, first, n, kNone, &surprisal_);
  Extend(entropy, first, n, kNone, &entropy_);
  if (boundary != nullptr && boundary_marked_) {
    boundary_.resize(std::max(boundary_.size(), static_cast<size_t>(first) + n), uint8_t{0});
    std::copy_n(boundary, n, boundary_.begin() + first);
  } else {
    Extend(boundary, first, n, uint8_t{0}, &boundary_);
  }
  return OkStatus();
}

// A report of nothing skips it too: the position may be the prompt's last.
int32_t SequenceState::SkippedPosition(int32_t first, const float* surprisal) const {
  const bool skips = surprisal != nullptr && first == held_tokens_ + 1 &&
                     static_cast<int32_t>(surprisal_.size()) <= held_tokens_;
  return skips ? held_tokens_ : -1;
}

void SequenceState::NoteTokens(int32_t first, std::span<const int32_t> ids,
                               std::span<const int32_t> ends) {
  // What a prompt is opened with is all there: its first step should not have to copy it.
  if (first == 0) ids_.reserve(ids.size() + kIdsAhead);
  ids_.resize(static_cast<size_t>(first));
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  if (ends.empty() || ids.empty()) return;
  boundary_marked_ = true;
  const size_t end = static_cast<size_t>(first) + ids.size();
  if (boundary_.size() < end) boundary_.resize(end, uint8_t{0});
  for (size_t i = 0; i < ids.size(); ++i) {
    boundary_[static_cast<size_t>(first) + i] = std::ranges::binary_search(ends, ids[i]) ? 1 : 0;
  }
}

void SequenceState::HoldBoundaries(std::span<const uint8_t> ends) {
  if (ends.empty()) return;
  boundary_marked_ = true;
  if (boundary_.size() < ends.size()) boundary_.resize(ends.size(), uint8_t{0});
  std::ranges::copy(ends, boundary_.begin());
}

std::span<const int32_t> SequenceState::TailIds(uint32_t tokens) const {
  if (tokens > ids_.size()) return {};
  const size_t tail = tokens % static_cast<uint32_t>(geometry_.page_tokens);
  return std::span(ids_).first(tokens).last(tail);
}

void SequenceState::Truncate(int32_t tokens) {
  KVS_CHECK(tokens >= std::max(prompt_tokens_, 0) && tokens <= tokens_);
  if (tokens == tokens_) return;
  const auto cut = [tokens](auto* series) {
    series->resize(std::min(series->size(), static_cast<size_t>(tokens)));
  };
  cut(&entropy_);
  cut(&surprisal_);
  cut(&boundary_);
  cut(&ids_);
  tokens_ = tokens;
  indexed_tokens_ = std::min(indexed_tokens_, tokens);
  held_tokens_ = std::min(held_tokens_, tokens);
  surprisal_held_ = std::min(surprisal_held_, tokens);
  selector_->Truncate(tokens);
  on_gpu.vote_cache.reset();
  on_gpu.hot_pages.reset();
  if (on_gpu.sentences != nullptr) on_gpu.sentences->Truncate(tokens);
}

Result<InspectArray> SequenceState::Inspect(const SequenceView& view, const Backend& backend,
                                            Executor& executor, std::string_view name) const {
  if (name == "entropy") return SeriesArray(InspectArray::Type::kF32, entropy_);
  if (name == "surprisal") return SeriesArray(InspectArray::Type::kF32, surprisal_);
  if (name == "boundary") return SeriesArray(InspectArray::Type::kU8, boundary_);
  KVS_CHECK(view.version == version_);
  SequenceView indexed = view;
  indexed.tokens = std::min(view.tokens, indexed_tokens_);  // later rows are not written yet
  Result<InspectArray> array = selector_->Inspect(Context(indexed, backend, executor), name);
  if (array.ok() || array.status().reason() != "INSPECT_UNKNOWN") return array;
  return NotFound("INSPECT_UNKNOWN",
                  array.status().message() + "; every plan has entropy, surprisal, boundary");
}

}  // namespace kvstrata
