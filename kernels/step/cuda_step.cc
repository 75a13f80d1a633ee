#include "kernels/step/cuda_step.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "kernels/step/cuda_sentences.h"

namespace kvstrata {
cuda::CandidateRule CudaStep::RuleOf(const Plan& plan) {
  const MinMaxOptions& own = plan.minmax;
  const int32_t unit = plan.index.unit;
  return {unit, own.sinks, own.recent, own.budget / unit, plan.min_tokens};
}

int64_t CudaStep::FieldStride(const IndexLayout& index) {
  return index.RowOffset(0, 0, 1, 0, 0) - index.RowOffset(0, 0, 0, 0, 0);
}

CudaStep::CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
                   Exit exit)
    : StepBatch(std::move(members)),
      ws_(*workspace),
      ops_(workspace->ops_),
      stream_(stream),
      exit_(exit) {
  CutParts();
}

Result<std::unique_ptr<CudaStep>> CudaStep::Begin(std::vector<StepMember> members,
                                                  CudaWorkspace* workspace, cuda::Stream stream,
                                                  Exit exit) {
  for (const StepMember& m : members) {
    KVS_RETURN_IF_ERROR(CudaServes(m.state->plan(), m.state->geometry()));
  }
  if (workspace->in_step_) {
    return FailedPrecondition("WORKSPACE_BUSY",
                              "the last step of this workspace is open; end it, or use another");
  }
  std::unique_ptr<CudaStep> step(new CudaStep(std::move(members), workspace, stream, exit));
  KVS_CHECK(step->geometry() == workspace->geometry_);
  KVS_ASSIGN_OR_RETURN(const bool capturing, step->IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_BEGIN",
                              "the stream is being captured; begin the step before its layers are "
                              "captured: its copies differ from step to step");
  }
  KVS_RETURN_IF_ERROR(step->CheckPacked());
  KVS_RETURN_IF_ERROR(workspace->Fit(step->Need()));
  KVS_RETURN_IF_ERROR(workspace->Follow(stream));
  KVS_RETURN_IF_ERROR(step->Prepare());
  step->begun_ = workspace->in_step_ = true;
  return step;
}

// Members that follow each other and attend alike share launches.
void CudaStep::CutParts() {
  for (int i = 0; i < members(); ++i) {
    const SequenceState& state = *members_[i].state;
    const SelectorKind selector = state.plan().selector;
    if (state.prompt_tokens() < 0 && selector == SelectorKind::kVote) {
      CutPrompt(i);
      continue;
    }
    Part part{i, 1, members_[i].new_tokens, false, {}};
    part.selects =
        state.prompt_tokens() >= 0 && (selector != SelectorKind::kFull || IsPacked(members_[i]));
    part.observes = state.prompt_tokens() < 0 && selector == SelectorKind::kBucket;
    if (part.selects || part.observes) part.plan = state.plan();
    part.promotes = part.selects && part.new_tokens == 1 && MayPromote(members_[i]);
    if (part.selects && selector == SelectorKind::kVote) part.list = vote_lists_++;
    Part* const last = parts_.empty() ? nullptr : &parts_.back();
    if (last != nullptr && part.new_tokens == 1 && last->new_tokens == 1 &&
        part.selects == last->selects && part.observes == last->observes &&
        part.plan == last->plan && !last->prompt) {
      ++last->count;
      last->promotes |= part.promotes;
    } else {
      parts_.push_back(std::move(part));
    }
  }
  decodes_ = std::ranges::all_of(parts_, [](const Part& part) {
    return part.new_tokens == 1 && !part.prompt && !part.observes;
  });
  const bool idle = IsShort();
  for (Part& part : parts_) part.idle = idle && ScoresByQuery(part);
}

bool CudaStep::ScoresByQuery(const Part& part) {
  return part.selects && !part.prompt && part.plan.codec == CodecKind::kRaw &&
         (part.plan.selector == SelectorKind::kMinMax || part.plan.selector == SelectorKind::kVote);
}

bool CudaStep::IsShort() const {
  return std::ranges::all_of(parts_, [this](const Part& part) {
    const auto members = std::span(members_).subspan(static_cast<size_t>(part.first),
                                                     static_cast<size_t>(part.count));
    return !ScoresByQuery(part) || std::ranges::all_of(members, [&part](const StepMember& m) {
      return m.view.tokens + 1 < part.plan.min_tokens;
    });
  });
}

CudaWorkspace::Capacity CudaStep::Need() const {
  CudaWorkspace::Capacity need;
  need.members = members();
  need.votes = NeedOfVotes();
  NeedOfSpans(&need);
  need.packed = NeedOfPacked();
  need.rows = tokens_;
  for (const StepMember& m : members_) {
    const IndexLayout& index = m.state->index();
    const int32_t tokens = std::max(m.view.tokens + m.new_tokens, ws_.reserve_tokens_);
    if (m.new_tokens > CudaWorkspace::kItemsOfMember) {
      need.chunk = std::max(need.chunk, std::min(m.new_tokens, cuda::kAttendChunkRows));
    }
    need.pages = std::max(need.pages, tokens / geometry().page_tokens + 1);
    if (MayPromote(m) || ws_.capacity_.far_pages > 0) need.far_pages = need.pages;
    if (HasBuckets(m)) {
      need.bucket_list = std::max({need.bucket_list, m.state->plan().bucket.budget, 1});
    }
    if (index.kind == IndexLayout::Kind::kNone) continue;
    const cuda::CandidateRule rule = RuleOf(m.state->plan());
    need.blocks = std::max(need.blocks, index.BlocksFor(tokens));
    if (Cascades(m)) {
      need.cascade_pages = std::max(need.cascade_pages, tokens / m.state->plan().index.unit + 1);
      continue;
    }
    need.units = std::max(need.units, tokens / rule.unit_tokens + 1);
    need.list = std::max(need.list, rule.take);
  }
  return need;
}

// What Begin does on the stream.
Status CudaStep::Prepare() {
  KVS_ASSIGN_OR_RETURN(const CudaWorkspace::StagingSlot* const slot, ws_.NextSlot());
  DecideCascades();
  DecideSentences();
  Status status = Stage(*slot);
  if (status.ok()) status = Summarize();
  if (status.ok()) status = SelectCascades();
  if (status.ok()) status = MakeBuckets();
  if (status.ok()) status = SeparateOps(*slot);
  if (status.ok()) status = Check(ops_.record_event(slot->done, stream_), "marking a begun step");
  if (!status.ok()) (void)ops_.synchronize(stream_);  // a part of it may be under way
  return status;
}

// Ops read what Begin made ahead of the kernels before them (launch.cuh): no op may start while a
// kernel of Begin's runs. Nothing but a copy (of what is there) keeps every kernel behind it back.
Status CudaStep::SeparateOps(const CudaWorkspace::StagingSlot& slot) {
  if (!launched_) return OkStatus();
  return Check(ops_.copy_async(ws_.ints_.as<int32_t>(), slot.data, sizeof(int32_t), stream_),
               "separating a step's ops from its begin");
}

Status CudaStep::Stage(const CudaWorkspace::StagingSlot& slot) {
  KVS_RETURN_IF_ERROR(StageInts(slot));
  KVS_RETURN_IF_ERROR(StageVoteCaches(slot));
  KVS_RETURN_IF_ERROR(StagePacked(slot));
  KVS_RETURN_IF_ERROR(StageSentences(slot));
  KVS_RETURN_IF_ERROR(StageSpans(slot));
  KVS_RETURN_IF_ERROR(StageHotPages(slot));
  for (int i = 0; i < members(); ++i) {
    const SequenceView& view = members_[i].view;
    const int32_t tokens = view.tokens + members_[i].new_tokens;
    const int32_t page = geometry().page_tokens;
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.pages_, ws_.capacity_.pages, i, view.pages,
                                   (tokens + page - 1) / page, slot, stream_));
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.blocks_, ws_.capacity_.blocks, i, view.index_blocks,
                                   members_[i].state->index().BlocksFor(view.tokens), slot,
                                   stream_));
  }
  return OkStatus();
}

// Lengths of this step, and what follows from them.
Status CudaStep::StageInts(const CudaWorkspace::StagingSlot& slot) {
  auto* const ints = reinterpret_cast<int32_t*>(slot.data);
  const int64_t room = ws_.capacity_.members;
  const auto at = [ints, room](PerMember array, int i) -> int32_t& {
    return ints[static_cast<int>(array) * room + i];
  };
  int32_t* const visible = ints + ws_.IntsBeforeRows();
  for (int i = 0; i < members(); ++i) {
    const StepMember& m = members_[i];
    const Plan& plan = m.state->plan();
    const int32_t n = m.view.tokens + 1;
    const WindowOptions& ends = plan.window;  // read of selector window alone
    const bool in_full = AttendsInFull(n, ends.sinks + ends.recent, 0, plan.min_tokens);
    const Run window = in_full ? Run{} : Run{ends.sinks, n - ends.recent};
    const bool buckets = HasBuckets(m);
    const Run between = Cascades(m)   ? CascadeList(m)
                        : buckets     ? BucketList(m)
                        : IsPacked(m) ? Run{0, PackedEnd(m)}
                                      : window;  // not always on
    const PackedCounts packed = PackedCountsOf(i);
    const SpanCounts spans = SpanCountsOf(m);
    const CudaSentences* const sentences = buckets ? m.state->sentences_.get() : nullptr;
    const bool ready = buckets && sentences->ready;
    at(PerMember::kLengths, i) = m.view.tokens + m.new_tokens;
    at(PerMember::kFrom, i) = m.state->indexed_tokens_;
    at(PerMember::kTo, i) = m.view.tokens;
    at(PerMember::kSinkEnd, i) = between.begin;
    at(PerMember::kRecentBegin, i) = between.end;
    at(PerMember::kSelectAt, i) = CascadeAt(i);
    at(PerMember::kSegments, i) = packed.segments;
    at(PerMember::kBlocks, i) = packed.blocks;
    at(PerMember::kTake, i) = packed.take;
    at(PerMember::kQueriesFrom, i) = ready ? sentences->queries_from : -1;
    at(PerMember::kWholeBuckets, i) = ready ? static_cast<int32_t>(sentences->whole.size()) : 0;
    at(PerMember::kSpanParts, i) = spans.parts;
    at(PerMember::kSpanRoom, i) = spans.room;
    at(PerMember::kSpanEnd, i) = spans.end;
    at(PerMember::kAllRows, i) = cuda::kExpandAll;
    at(PerMember::kCount, i) = first_row_[i];
    for (int32_t t = 0; t < m.new_tokens; ++t) visible[first_row_[i] + t] = n + t;
  }
  at(PerMember::kCount, members()) = tokens_;
  const auto bytes = static_cast<uint64_t>(ws_.IntsBeforeRows() + tokens_) * sizeof(int32_t);
  return Check(ops_.copy_async(ws_.ints_.as<int32_t>(), ints, bytes, stream_),
               "copying the lengths of a step");
}

// Rows of the units that were completed since the index was written last, in all layers.
Status CudaStep::Summarize() {
  for (int first = 0, last; first < members(); first = last) {
    const IndexLayout& index = members_[first].state->index();
    for (last = first + 1; last < members() && members_[last].state->index() == index;) ++last;
    if (index.kind == IndexLayout::Kind::kNone) continue;
    KVS_RETURN_IF_ERROR(SummarizeMembers(first, last - first));
  }
  for (const StepMember& m : members_) m.state->indexed_tokens_ = m.state->tokens_;
  return OkStatus();
}

Status CudaStep::SummarizeMembers(int first, int count) {
  for (int level = 0; level < members_[first].state->index().level_count; ++level) {
    KVS_RETURN_IF_ERROR(SummarizeLevel({first, count, 1, false, {}}, level));
  }
  return OkStatus();
}

// A coarser level's rows from those of the level below, which are written before.
Status CudaStep::SummarizeLevel(const Part& part, int level) {
  const IndexLayout& index = members_[part.first].state->index();
  int32_t units = 0;
  for (int i = part.first; i < part.first + part.count; ++i) {
    const SequenceState& state = *members_[i].state;
    units = std::max(
        units, index.UnitsFor(level, state.tokens_) - index.UnitsFor(level, state.indexed_tokens_));
  }
  const bool means = index.kind == IndexLayout::Kind::kMean;
  cuda::SummarizeBatch w;
  w.kind = means ? cuda::SummarizeBatch::Kind::kMean : cuda::SummarizeBatch::Kind::kMinMax;
  w.source = level == 0 ? cuda::KeyRows(PagesOf(part, 0)) : IndexRowsOf(part, level - 1, 0);
  w.summary = IndexRowsOf(part, level, 0);
  w.field_stride = means ? 0 : FieldStride(index);
  w.row_tokens = level == 0 ? 1 : index.levels[level - 1].unit_tokens;
  w.unit_rows = index.levels[level].unit_tokens / w.row_tokens;
  w.from = ws_.Ints(PerMember::kFrom) + part.first;
  w.to = ws_.Ints(PerMember::kTo) + part.first;
  w.batch = part.count;
  w.units_max = units;
  w.layers = geometry().layers;
  const auto layer_stride = [&index](int of) {
    return index.RowOffset(of, 1, 0, 0, 0) - index.RowOffset(of, 0, 0, 0, 0);
  };
  w.source_layer_stride =
      level == 0 ? PageLayout::Of(geometry()).layer_stride : layer_stride(level - 1);
  w.summary_layer_stride = layer_stride(level);
  launched_ |= units > 0;
  return Check(ops_.summarize(w, stream_), "op summarize");
}

CudaStep::~CudaStep() {
  if (!begun_) return;
  ws_.in_step_ = false;
  if (ended_) return;
  const Result<bool> capturing = IsCapturing(stream_);
  if (capturing.ok() && !capturing.value()) {
    (void)WriteExit(stream_);
    return;
  }
  // Nothing captured has run: only Begin's own work is to be waited for.
  (void)AwaitBegin();
  if (exit_.address == nullptr) return;
  std::atomic_ref<uint64_t>(*exit_.address).store(exit_.value, std::memory_order_release);
}

Status CudaStep::AwaitBegin() const {
  const size_t slot = (ws_.next_slot_ + ws_.slots_.size() - 1) % ws_.slots_.size();
  return ws_.AwaitOnHost(ws_.slots_[slot].done);
}

Result<bool> CudaStep::IsCapturing(cuda::Stream stream) const {
  bool capturing = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_capturing(stream, &capturing), "asking for a capture"));
  return capturing;
}

Status CudaStep::WriteExit(cuda::Stream stream) {
  if (exit_.address != nullptr) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.write_value(exit_.address, exit_.value, stream), "leaving the epoch"));
  }
  return Check(ops_.record_event(ws_.last_work_, stream), "marking the end of a step");
}

Status CudaStep::CopyMovedPages(cuda::Stream stream) {
  const auto bytes = static_cast<uint64_t>(geometry().page_bytes());
  for (const MovedPage& page : moved_pages_) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.copy_async(page.to, page.from, bytes, stream), "copying a forked page"));
  }
  return OkStatus();
}

Status CudaStep::End(cuda::Stream stream) {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_END",
                              "the stream is being captured; end the capture, launch its graph, "
                              "then end the step");
  }
  KVS_RETURN_IF_ERROR(AppendPending());
  KVS_RETURN_IF_ERROR(CopyMovedPages(stream));
  CopyShadows(stream);
  KVS_RETURN_IF_ERROR(WriteExit(stream));
  ended_ = true;
  ws_.in_step_ = false;
  for (const StepMember& m : members_) {
    if (!m.kept) continue;
    m.state->selector_->Advance(m.new_tokens);
    m.state->tokens_ += m.new_tokens;
  }
  return OkStatus();
}

// What the ops of this call are captured for; null: nothing is captured.
CudaWorkspace::CapturedShape* CudaStep::ShapeUnderCapture() {
  const Result<bool> capturing = IsCapturing(stream_);
  if (!capturing.ok() || !capturing.value()) return nullptr;
  for (CudaWorkspace::CapturedShape& shape : ws_.captured_) {
    if (shape.parts == parts_) return &shape;
  }
  const std::vector<uint8_t> none(geometry().layers);
  return &ws_.captured_.emplace_back(CudaWorkspace::CapturedShape{parts_, none, none});
}

// Whether a graph of `captured` does all that this step does: one that promotes serves members
// without pages in the host's memory, too, and one that selects short members.
bool CudaStep::Serves(std::vector<Part> captured) const {
  for (size_t i = 0; i < captured.size() && i < parts_.size(); ++i) {
    captured[i].promotes = captured[i].promotes && parts_[i].promotes;
    captured[i].idle = captured[i].idle || parts_[i].idle;
  }
  return captured == parts_;
}

Status CudaStep::Replay() {
  const auto all = [](const std::vector<uint8_t>& layers) {
    return std::ranges::all_of(layers, [](uint8_t done) { return done != 0; });
  };
  for (const CudaWorkspace::CapturedShape& shape : ws_.captured_) {
    if (!Serves(shape.parts) || !all(shape.appended) || !all(shape.attended)) continue;
    selected_layer_ = geometry().layers - 1;
    NoteCapturedShadows();
    for (const Part& part : parts_) {
      for (int layer = 0; layer < geometry().layers; ++layer) {
        if (Observes(part, layer)) NoteObserved(part, layer);
      }
    }
    return OkStatus();
  }
  return FailedPrecondition("GRAPH_STALE",
                            "no graph of all layers was captured of such a batch at generation " +
                                std::to_string(ws_.generation_) +
                                " of its workspace; run the layers, or capture them anew");
}

}  // namespace kvstrata
