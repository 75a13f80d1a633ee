// Selector bucket (SentenceKV) of a CudaStep, as kernels/select/bucket.cc does it on a CPU. Which
// sentences are complete follows from counts and reported boundaries, which the host has: so Begin
// closes them, and enqueues what makes their buckets, for all layers at once. Prompt steps keep
// their last queries; the Begin behind the prompt's end asks what these attend to. Graphs hold op
// pick_buckets alone.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/segment/sentence_rule.h"
#include "kernels/select/sentence_status.h"
#include "kernels/step/cuda_sentences.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

using TableEntries =
    std::array<const std::byte*, sizeof(cuda::SentenceTable) / sizeof(const std::byte*)>;
static_assert(std::tuple_size_v<TableEntries> == CudaWorkspace::kSentenceEntries);

// Sentences without the first tokens, which are in no bucket.
void AddWhole(const std::vector<Run>& sentences, const Plan& plan, std::vector<Run>* whole) {
  for (const Run& s : sentences) {
    const Run tokens{std::max(s.begin, plan.bucket.sinks), s.end};
    if (tokens.begin < tokens.end) whole->push_back(tokens);
  }
}

// What of a prompt is kept.
struct Kept {
  Kept(const Plan& plan, int32_t prompt)
      : queries(std::min(plan.bucket.n_obs, prompt)),
        before(prompt - queries),
        first(std::min(plan.bucket.sinks, before)),
        window{std::max(before, plan.bucket.sinks), prompt} {
    const auto most = static_cast<int64_t>(std::floor(plan.bucket.r * plan.bucket.budget + 1e-9));
    ranked = static_cast<int32_t>(std::min<int64_t>(most, before - first));
  }
  bool all() const { return ranked == before - first; }
  int32_t count() const { return ranked + std::max(window.end - window.begin, 0); }

  int32_t queries;  // that judge
  int32_t before;   // tokens [first, before) are judged
  int32_t first;
  int32_t ranked;  // of them the most important ones are kept
  Run window;
};

}  // namespace

bool CudaStep::HasBuckets(const StepMember& m) {
  return m.state->plan().selector == SelectorKind::kBucket;
}

void CudaStep::DecideSentences() {
  for (const StepMember& m : members_) {
    if (!HasBuckets(m)) continue;
    SequenceState& state = *m.state;
    const Plan& plan = state.plan_;
    if (state.sentences_ == nullptr) {
      state.sentences_ = std::make_shared<CudaSentences>(plan, geometry());
    }
    const int32_t prompt = state.prompt_tokens_;
    if (prompt < 0) continue;
    CudaSentences& own = *state.sentences_;
    if (!std::exchange(own.started, true)) own.ends.Start(prompt);
    if (!own.ready) {
      own.listed = !BucketsInFull(plan, prompt);  // a short prompt keeps everything
      if (state.boundary_.size() < static_cast<size_t>(prompt)) continue;
      if (own.listed && !own.Observed(plan, geometry(), prompt)) continue;
      if (!own.listed) {
        AddWhole(SentencesIn(state.boundary_, {0, prompt}, plan.bucket.max_length), plan,
                 &own.whole);
      }
      own.queries_from = m.view.tokens;
      own.ready = true;
    }
    const std::vector<Run> closed = own.ends.Close(state.boundary_, m.view.tokens);
    if (!closed.empty()) own.queries_from = m.view.tokens;
    AddWhole(closed, plan, &own.whole);
  }
}

// The positions between the first tokens and the window, of which the listed ones are attended;
// {0, 0}: all are.
Run CudaStep::BucketList(const StepMember& m) {
  const Plan& plan = m.state->plan();
  const int32_t n = m.view.tokens + 1;
  if (m.state->prompt_tokens() < 0 || !m.state->sentences_->ready || BucketsInFull(plan, n)) {
    return {};
  }
  const int32_t window = std::min(n - plan.bucket.recent, m.state->sentences_->ends.begin());
  return {std::min(plan.bucket.sinks, window), window};
}

// Memory of the members' own, and where it is told to the GPU.
Status CudaStep::StageSentences(const CudaWorkspace::StagingSlot& slot) {
  for (int i = 0; i < members(); ++i) {
    if (!HasBuckets(members_[i])) continue;
    SequenceState& state = *members_[i].state;
    CudaSentences& own = *state.sentences_;
    if (state.prompt_tokens_ >= 0 && !own.ready) continue;
    if (own.memory == nullptr) {
      KVS_ASSIGN_OR_RETURN(own.memory,
                           CudaSentenceMemory::Create(ops_, geometry(), state.plan_.bucket.n_obs));
    } else if (own.memory->shared) {
      KVS_ASSIGN_OR_RETURN(own.memory, CudaSentenceMemory::CopyOf(*own.memory, ops_, stream_));
    }
    if (own.ready) KVS_RETURN_IF_ERROR(FitBuckets(&state));
    const auto entries = std::bit_cast<TableEntries>(own.memory->table());
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.sentences_, CudaWorkspace::kSentenceEntries, i,
                                   entries.data(), CudaWorkspace::kSentenceEntries, slot, stream_));
  }
  return OkStatus();
}

Status CudaStep::FitBuckets(SequenceState* state) {
  CudaSentences& own = *state->sentences_;
  if (own.listed && !own.made) {
    const Kept kept(state->plan_, state->prompt_tokens_);
    const auto sentences =
        SentencesIn(state->boundary_, {0, state->prompt_tokens_}, state->plan_.bucket.max_length);
    KVS_RETURN_IF_ERROR(own.memory->FitPrompt(
        ops_, kept.count(), std::min(kept.count(), static_cast<int32_t>(sentences.size()))));
  }
  return own.memory->FitWhole(ops_, static_cast<int32_t>(own.whole.size()), own.whole_made,
                              stream_);
}

// The buckets that this Begin has to make.
Status CudaStep::MakeBuckets() {
  for (int i = 0; i < members(); ++i) {
    if (!HasBuckets(members_[i]) || members_[i].state->prompt_tokens() < 0) continue;
    CudaSentences& own = *members_[i].state->sentences_;
    if (!own.ready) continue;
    if (own.listed && !own.made) {
      KVS_RETURN_IF_ERROR(MakePromptBuckets(i));
      own.made = true;
    }
    KVS_RETURN_IF_ERROR(MakeWholeBuckets(i));
  }
  return OkStatus();
}

// Of all layers; those that are attended in full have buckets of no meaning.
Status CudaStep::MakePromptBuckets(int member) {
  launched_ = true;
  const SequenceState& state = *members_[member].state;
  const Plan& plan = state.plan();
  const Kept kept(plan, state.prompt_tokens());
  BucketBuffers& buffers = ws_.buckets_;

  std::vector<int32_t> ints;  // where sentences end; tokens that each query sees; kept.before
  for (const Run& s :
       SentencesIn(state.boundary_, {0, state.prompt_tokens()}, plan.bucket.max_length)) {
    ints.push_back(s.end);
  }
  const auto sentences = static_cast<int32_t>(ints.size());
  // Queries lie in a ring: position t at t % n_obs.
  const auto queries = static_cast<size_t>(kept.queries);
  ints.resize(ints.size() + queries + 1);
  for (int32_t t = kept.before; t < state.prompt_tokens(); ++t) {
    ints[static_cast<size_t>(sentences + t % plan.bucket.n_obs)] = t + 1;
  }
  ints.back() = kept.before;
  KVS_RETURN_IF_ERROR(buffers.ints.Reserve(ops_, ints.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(Check(ops_.copy_async(buffers.ints.as<int32_t>(), ints.data(),
                                            ints.size() * sizeof(int32_t), stream_),
                            "copying the sentences of a prompt"));
  if (!kept.all() && kept.ranked > 0) {
    KVS_RETURN_IF_ERROR(buffers.FitPrompt(ops_, geometry(), state.prompt_tokens()));
    for (int layer = plan.n_dense_layers; layer < geometry().layers; ++layer) {
      KVS_RETURN_IF_ERROR(RankPrompt(member, layer, buffers.ints.as<int32_t>() + sentences));
    }
  }
  const Part part{member, 1, 1, false, {}};
  cuda::PromptBucketsBatch w;
  w.keys = cuda::KeyRows(PagesOf(part, 0));
  w.key_layer_stride = PageLayout::Of(geometry()).layer_stride;
  w.layers = geometry().layers;
  w.table = state.sentences_->memory->table();
  w.ranked = kept.ranked;
  w.first = kept.first;
  w.all = kept.all();
  w.window = kept.window;
  w.ends = buffers.ints.as<int32_t>();
  w.sentences = sentences;
  return Check(ops_.prompt_buckets(w, stream_), "op prompt_buckets");
}

// Lists the most important tokens of a layer. lengths: device, of each query, and behind them the
// tokens that are judged.
Status CudaStep::RankPrompt(int member, int layer, const int32_t* lengths) {
  const Plan& plan = members_[member].state->plan();
  const Geometry& g = geometry();
  const Kept kept(plan, members_[member].state->prompt_tokens());
  const cuda::SentenceTable& table = members_[member].state->sentences_->memory->table();
  const BucketBuffers& buffers = ws_.buckets_;
  cuda::VoteBatch vote;
  vote.rows = cuda::KeyRows(PagesOf({member, 1, 1, false, {}}, layer));
  vote.rows.page_stride = 0;  // every query is an item over the same pages
  vote.scale = g.logit_scale();
  vote.q_dtype = DType::kF32;
  vote.query_heads = g.query_heads;
  vote.output_rows = g.kv_heads;
  vote.candidate_stride = buffers.stride;
  vote.votes = buffers.votes.as<float>();
  vote.scratch = buffers.scratch.as<std::byte>();
  cuda::ImportanceBatch sum;
  sum.votes = vote.votes;
  sum.kv_heads = g.kv_heads;
  sum.stride = buffers.stride;
  sum.tokens = kept.before;
  sum.begin = kept.first;
  sum.pool = plan.bucket.pool;
  sum.sums = buffers.sums.as<float>();
  sum.importance = buffers.importance.as<float>();
  const int64_t floats = int64_t{g.query_heads} * g.head_dim;
  for (int32_t i = 0; i < kept.queries; i += buffers.items) {
    vote.batch = sum.items = std::min(buffers.items, kept.queries - i);
    vote.tokens = lengths + i;
    vote.q = table.observed + (int64_t{layer} * plan.bucket.n_obs + i) * floats;
    sum.first = i == 0;
    sum.last = i + sum.items == kept.queries;
    KVS_RETURN_IF_ERROR(Check(ops_.vote(vote, stream_), "op vote"));
    KVS_RETURN_IF_ERROR(Check(ops_.importance(sum, stream_), "op importance"));
  }
  cuda::PickBatch pick;
  pick.scores = sum.importance;
  pick.score_stride = buffers.stride;
  pick.batch = 1;
  pick.groups = g.kv_heads;
  pick.rule = {1, kept.first, 0, kept.ranked, 0};
  pick.tokens = lengths + kept.queries;
  pick.list_stride = table.kept_stride;
  pick.units = table.kept + int64_t{layer} * g.kv_heads * table.kept_stride;
  pick.counts = buffers.picked.as<int32_t>();
  pick.sink_end = pick.counts + g.kv_heads;
  pick.recent_begin = pick.sink_end + 1;
  pick.scratch = buffers.pick.as<std::byte>();
  return Check(ops_.pick(pick, stream_), "op pick");
}

Status CudaStep::MakeWholeBuckets(int member) {
  CudaSentences& own = *members_[member].state->sentences_;
  const auto count = static_cast<int32_t>(own.whole.size());
  cuda::WholeBucketsBatch w;
  w.keys = cuda::KeyRows(PagesOf({member, 1, 1, false, {}}, 0));
  w.key_layer_stride = PageLayout::Of(geometry()).layer_stride;
  w.layers = geometry().layers;
  w.table = own.memory->table();
  while (own.whole_made < count) {
    launched_ = true;
    w.first = own.whole_made;
    w.count = std::min(count - own.whole_made, cuda::WholeBucketsBatch::kMost);
    std::copy_n(own.whole.begin() + w.first, w.count, w.sentences);
    KVS_RETURN_IF_ERROR(Check(ops_.whole_buckets(w, stream_), "op whole_buckets"));
    own.whole_made += w.count;
  }
  return OkStatus();
}

const cuda::SentenceTable* CudaStep::TablesOf(const Part& part) const {
  return ws_.sentences_.device.as<cuda::SentenceTable>() + part.first;
}

// A prompt's queries.
Status CudaStep::Observe(const Part& part, int layer, const std::byte* q, DType dtype) {
  cuda::ObserveBatch w;
  w.tables = TablesOf(part);
  w.layer = layer;
  w.capacity = part.plan.bucket.n_obs;
  w.visible = ws_.visible() + first_row_[part.first];
  w.q = q;
  w.q_dtype = dtype;
  w.batch = part.count;
  w.new_tokens = part.new_tokens;
  w.query_floats = geometry().query_heads * geometry().head_dim;
  KVS_RETURN_IF_ERROR(Check(ops_.observe(w, stream_), "op observe"));
  NoteObserved(part, layer);
  return OkStatus();
}

// Once a step and layer.
void CudaStep::NoteObserved(const Part& part, int layer) {
  observed_.resize(static_cast<size_t>(geometry().layers) * members_.size());
  for (int i = part.first; i < part.first + part.count; ++i) {
    const auto cell = static_cast<size_t>(i) * static_cast<size_t>(geometry().layers);
    if (std::exchange(observed_[cell + static_cast<size_t>(layer)], uint8_t{1}) != 0) continue;
    const StepMember& m = members_[i];
    m.state->sentences_->observed[static_cast<size_t>(layer)].Add(m.view.tokens, m.new_tokens,
                                                                  m.state->plan().bucket.n_obs);
  }
}

Status CudaStep::PickBuckets(const Part& part, int layer, const std::byte* q, DType dtype) {
  const cuda::DeviceSelection selection = BucketSelection(part);
  cuda::PickBucketsBatch w;
  w.tables = TablesOf(part);
  w.layer = layer;
  w.tokens = ws_.visible() + first_row_[part.first];
  w.queries_from = ws_.Ints(PerMember::kQueriesFrom) + part.first;
  w.whole = ws_.Ints(PerMember::kWholeBuckets) + part.first;
  w.recent_begin = selection.recent_begin;
  w.q = q;
  w.q_dtype = dtype;
  w.batch = part.count;
  w.kv_heads = geometry().kv_heads;
  w.group = geometry().group();
  w.head_dim = geometry().head_dim;
  w.tau = part.plan.bucket.budget;
  const int64_t list = int64_t{part.first} * w.kv_heads;
  w.units = ws_.buckets_.units.as<int32_t>() + list * selection.list_stride;
  w.counts = ws_.buckets_.counts.as<int32_t>() + list;
  w.list_stride = selection.list_stride;
  w.counters = ws_.buckets_.counters.as<uint32_t>() + list;
  return Check(ops_.pick_buckets(w, stream_), "op pick_buckets");
}

cuda::DeviceSelection CudaStep::BucketSelection(const Part& part) const {
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  cuda::DeviceSelection selection;
  selection.unit_tokens = 1;
  selection.groups = geometry().kv_heads;
  selection.list_stride = ws_.capacity_.bucket_list;
  selection.units = ws_.buckets_.units.as<int32_t>() + list * selection.list_stride;
  selection.counts = ws_.buckets_.counts.as<int32_t>() + list;
  selection.sink_end = ws_.Ints(PerMember::kSinkEnd) + part.first;
  selection.recent_begin = ws_.Ints(PerMember::kRecentBegin) + part.first;
  return selection;
}

// As BucketSelector makes it.
Result<Selection> CudaStep::ReadBuckets(int member, int32_t n) const {
  const StepMember& m = members_[member];
  const Run list = BucketList(m);
  if (list == Run{}) return Selection::Full(n);
  const Geometry& g = geometry();
  const cuda::DeviceSelection device = BucketSelection({member, 1, 1, true, {}});
  std::vector<int32_t> counts(static_cast<size_t>(g.kv_heads));
  KVS_RETURN_IF_ERROR(CopyToHost(counts.data(), device.counts, counts.size() * sizeof(int32_t)));
  Selection selection;
  selection.Reset(n, g.kv_heads);
  for (int head = 0; head < g.kv_heads; ++head) {
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> ends, ReadBucketEnds(m, head));
    std::vector<int32_t> tokens(static_cast<size_t>(counts[head]));
    KVS_RETURN_IF_ERROR(CopyToHost(tokens.data(), device.units + int64_t{head} * device.list_stride,
                                   tokens.size() * sizeof(int32_t)));
    std::vector<Run>& runs = selection.runs[head];
    std::vector<int32_t>& units = selection.units[head];
    AppendRun({0, list.begin}, &runs);
    for (const int32_t t : tokens) {
      AppendRun({t, t + 1}, &runs);
      const auto unit = static_cast<int32_t>(std::ranges::upper_bound(ends, t) - ends.begin());
      if (units.empty() || units.back() != unit) units.push_back(unit);
    }
    AppendRun({list.end, n}, &runs);
    selection.scored_bytes += static_cast<int64_t>(ends.size()) * g.head_dim * SizeOf(DType::kBF16);
  }
  return selection;
}

// Of a head's buckets, in the layer selected last: the position behind each one's last token.
Result<std::vector<int32_t>> CudaStep::ReadBucketEnds(const StepMember& m, int head) const {
  const CudaSentences& own = *m.state->sentences_;
  const cuda::SentenceTable& table = own.memory->table();
  std::vector<int32_t> ends;
  if (own.listed) {
    const int64_t row = int64_t{selected_layer_} * geometry().kv_heads + head;
    int32_t count = 0;
    KVS_RETURN_IF_ERROR(CopyToHost(&count, table.counts + row, sizeof(count)));
    std::vector<int32_t> firsts(static_cast<size_t>(count) + 1);
    KVS_RETURN_IF_ERROR(CopyToHost(firsts.data(), table.firsts + row * (table.bucket_stride + 1),
                                   firsts.size() * sizeof(int32_t)));
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> kept, ReadKeptOf(m, head));
    for (size_t i = 1; i < firsts.size(); ++i) {
      ends.push_back(kept[static_cast<size_t>(firsts[i]) - 1] + 1);
    }
  }
  for (const Run& tokens : own.whole) ends.push_back(tokens.end);
  return ends;
}

Result<std::vector<int32_t>> CudaStep::ReadKeptOf(const StepMember& m, int head) const {
  const cuda::SentenceTable& table = m.state->sentences_->memory->table();
  const int64_t row = int64_t{selected_layer_} * geometry().kv_heads + head;
  std::vector<int32_t> kept(static_cast<size_t>(table.kept_stride));
  KVS_RETURN_IF_ERROR(
      CopyToHost(kept.data(), table.kept + row * table.kept_stride, kept.size() * sizeof(int32_t)));
  return kept;
}

Result<std::vector<int32_t>> CudaStep::ReadKept(int member, int head) const {
  const StepMember& m = members_[member];
  if (!HasBuckets(m) || selected_layer_ < 0 || !m.state->sentences_->made) {
    return FailedPrecondition("KEPT_NONE", "no prompt tokens are kept for this member");
  }
  KVS_RETURN_IF_ERROR(CheckReadable());
  return ReadKeptOf(m, head);
}

}  // namespace kvstrata
