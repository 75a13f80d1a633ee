// SPDX-License-Identifier: Apache-2.0
// Selector bucket (SentenceKV) on a GPU, as kernels/plans/sentencekv/bucket.cc does it on a CPU.
// Which sentences are complete follows from counts and reported boundaries, which the host has: so
// Stage closes them, and what it gives to OnceIndexed makes their buckets, for all layers at once.
// Prompt steps keep their last queries; the Begin behind the prompt's end asks what these attend
// to, which takes the GPU about as long as attending n_obs of them in full. Graphs hold op
// pick_buckets alone.
//
// Prompt tokens that no layer was given queries of are not observed (docs/spec/sentencekv.md 2).
#include <algorithm>
#include <cmath>

#include "kernels/plans/sentencekv/bucket_rule.h"
#include "kernels/plans/sentencekv/cuda_sentences.h"
#include "kernels/plans/sentencekv/sentence_status.h"
#include "kernels/segment/sentence_rule.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/lists/cuda_lists.h"

namespace kvstrata {
namespace {

constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float);
constexpr int32_t kTableWords = sizeof(cuda::SentenceTable) / sizeof(uint64_t);

void AddWhole(const std::vector<Run>& sentences, const Plan& plan, std::vector<Run>* whole) {
  for (const Run& s : sentences) {
    const Run tokens = BucketTokens(plan, s);
    if (tokens.begin < tokens.end) whole->push_back(tokens);
  }
}

std::vector<Run> PromptSentences(const SequenceState& state) {
  return SentencesIn(state.reported().boundary(), {0, state.prompt_tokens()},
                     state.plan().bucket.max_length);
}

CudaSentences& SentencesOf(const CudaFrame& frame, int member) {
  return static_cast<CudaSentences&>(*frame.state(member).on_gpu.history);
}

// The memory that ranking a prompt's tokens takes, which no graph knows.
class PromptRanking {
 public:
  // Room for a prompt of `tokens`. May wait for the GPU.
  Status Fit(const CudaFrame& frame, int32_t tokens);
  // Lists the most important tokens of a layer of `member`. lengths: device, of each query, and
  // behind them the tokens that are judged.
  Status Rank(const CudaFrame& frame, int member, int layer, const int32_t* lengths) const;

 private:
  // Votes of several queries at a time, with the scratch that they take; one query may take more.
  static constexpr int64_t kVoteBytes = int64_t{256} << 20;
  static constexpr int32_t kMostItems = 32;  // queries at a time

  Status Vote(const CudaFrame& frame, int member, int layer, const int32_t* lengths) const;
  Status Pick(const CudaFrame& frame, int member, int layer, const int32_t* tokens) const;

  int32_t stride_ = 0, items_ = 0;
  DeviceBuffer votes_;              // float [items][kv_heads][stride]
  DeviceBuffer vote_scratch_;       // for op vote
  DeviceBuffer sums_, importance_;  // float [kv_heads][stride]
  DeviceBuffer pick_scratch_;       // for op pick
  DeviceBuffer picked_;             // int32_t [kv_heads + 2], what op pick says of its lists
};

Status PromptRanking::Fit(const CudaFrame& frame, int32_t tokens) {
  if (tokens <= stride_) return OkStatus();
  const cuda::CudaOps& ops = frame.ops();
  const int64_t heads = frame.geometry().kv_heads;
  const int32_t larger = Generous(tokens, 64);
  const int64_t list_bytes = heads * larger * kFloat;
  cuda::VoteBatch vote;
  vote.rows.kv_heads = frame.geometry().kv_heads;
  vote.query_heads = frame.geometry().query_heads;
  vote.output_rows = vote.rows.kv_heads;
  vote.candidate_stride = larger;
  stride_ = 0;  // until all of it is there
  const int64_t item_bytes = list_bytes + VoteScratchBytes(ops, vote, 1);
  items_ = static_cast<int32_t>(std::clamp<int64_t>(kVoteBytes / item_bytes, 1, kMostItems));
  cuda::PickBatch pick;
  pick.score_stride = larger;
  pick.batch = 1;
  pick.groups = vote.rows.kv_heads;
  const auto reserve = [&ops](DeviceBuffer* buffer, int64_t bytes) {
    return buffer->Reserve(ops, static_cast<uint64_t>(bytes));
  };
  KVS_RETURN_IF_ERROR(reserve(&votes_, items_ * list_bytes));
  KVS_RETURN_IF_ERROR(reserve(&vote_scratch_, VoteScratchBytes(ops, vote, items_)));
  KVS_RETURN_IF_ERROR(reserve(&sums_, list_bytes));
  KVS_RETURN_IF_ERROR(reserve(&importance_, list_bytes));
  KVS_RETURN_IF_ERROR(pick_scratch_.Free());  // its counters must be zero
  KVS_RETURN_IF_ERROR(reserve(&pick_scratch_, ops.pick_scratch_bytes(pick)));
  KVS_RETURN_IF_ERROR(reserve(&picked_, (heads + 2) * kInt));
  stride_ = larger;
  return OkStatus();
}

Status PromptRanking::Rank(const CudaFrame& frame, int member, int layer,
                           const int32_t* lengths) const {
  const KeptOfPrompt kept(frame.plan(member), frame.state(member).prompt_tokens());
  KVS_RETURN_IF_ERROR(Vote(frame, member, layer, lengths));
  return Pick(frame, member, layer, lengths + kept.queries);
}

// Importance of each token that is judged: what the prompt's last queries attend to, summed.
Status PromptRanking::Vote(const CudaFrame& frame, int member, int layer,
                           const int32_t* lengths) const {
  const Plan& plan = frame.plan(member);
  const Geometry& g = frame.geometry();
  const KeptOfPrompt kept(plan, frame.state(member).prompt_tokens());
  const cuda::SentenceTable& table = SentencesOf(frame, member).memory->table();
  cuda::VoteBatch vote;
  vote.rows = cuda::KeyRows(frame.PagesOf(member, layer));
  vote.rows.page_stride = 0;  // every query is an item over the same pages
  vote.scale = g.logit_scale();
  vote.q_dtype = DType::kF32;
  vote.query_heads = g.query_heads;
  vote.output_rows = g.kv_heads;
  vote.candidate_stride = stride_;
  vote.votes = votes_.as<float>();
  vote.scratch = vote_scratch_.as<std::byte>();
  cuda::ImportanceBatch sum;
  sum.votes = vote.votes;
  sum.kv_heads = g.kv_heads;
  sum.stride = stride_;
  sum.tokens = kept.before;
  sum.begin = kept.first;
  sum.pool = plan.bucket.pool;
  sum.sums = sums_.as<float>();
  sum.importance = importance_.as<float>();
  const int64_t floats = int64_t{g.query_heads} * g.head_dim;
  for (int32_t i = 0; i < kept.queries; i += items_) {
    vote.batch = sum.items = std::min(items_, kept.queries - i);
    vote.tokens = lengths + i;
    vote.q = table.observed + (int64_t{layer} * plan.bucket.n_obs + i) * floats;
    sum.first = i == 0;
    sum.last = i + sum.items == kept.queries;
    KVS_RETURN_IF_ERROR(frame.Check(frame.ops().vote(vote, frame.stream()), "op vote"));
    KVS_RETURN_IF_ERROR(frame.Check(frame.ops().importance(sum, frame.stream()), "op importance"));
  }
  return OkStatus();
}

Status PromptRanking::Pick(const CudaFrame& frame, int member, int layer,
                           const int32_t* tokens) const {
  const Geometry& g = frame.geometry();
  const KeptOfPrompt kept(frame.plan(member), frame.state(member).prompt_tokens());
  const cuda::SentenceTable& table = SentencesOf(frame, member).memory->table();
  cuda::PickBatch pick;
  pick.scores = importance_.as<float>();
  pick.score_stride = stride_;
  pick.batch = 1;
  pick.groups = g.kv_heads;
  pick.rule = {1, kept.first, 0, kept.ranked, 0};
  pick.tokens = tokens;
  pick.list_stride = table.kept_stride;
  pick.units = table.kept + int64_t{layer} * g.kv_heads * table.kept_stride;
  pick.counts = picked_.as<int32_t>();
  pick.sink_end = pick.counts + g.kv_heads;
  pick.recent_begin = pick.sink_end + 1;
  pick.scratch = pick_scratch_.as<std::byte>();
  return frame.Check(frame.ops().pick(pick, frame.stream()), "op pick");
}

class CudaBucket final : public CudaSelector, private CudaObserver {
 public:
  explicit CudaBucket(StepMemory* memory)
      : sink_end_(memory->AddColumn()),
        recent_begin_(memory->AddColumn()),
        queries_from_(memory->AddColumn()),
        whole_(memory->AddColumn()) {
    memory->Add(&tables_);
  }

  CudaSelectorTraits traits(const Plan& plan) override {
    return {.attends_newest = plan.bucket.recent > 0, .observer = this};
  }
  Status Fit(const CudaFrame& frame, std::span<const CudaPart> parts) override;
  Status Stage(CudaFrame* frame) override;

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    return part.observes ? Observe(*frame, part, layer, q) : Pick(*frame, part, layer, q);
  }
  cuda::DeviceSelection SelectionOf(const CudaFrame& frame, const CudaPart& part) const override;
  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override;

 private:
  // Notes, once a step, that queries of a layer are kept.
  void NoteReplayed(const CudaFrame& frame, const CudaPart& part, int layer) override;
  Result<std::vector<int32_t>> ReadKept(const CudaFrame& frame, int member,
                                        int head) const override;

  // The positions between the first tokens and the window, of which the listed ones are attended;
  // {0, 0}: all are.
  static Run ListedRange(const CudaFrame& frame, int member);
  // Closes the sentences that are complete.
  static void Close(const CudaFrame& frame, int member);
  static Status FitMemory(const CudaFrame& frame, int member);
  static Status MakeWholeBuckets(CudaFrame* frame, int member);
  Status MakePromptBuckets(CudaFrame* frame, int member);
  Status MakeBuckets(CudaFrame* frame);

  Status Observe(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q);
  Status Pick(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) const;

  // A head's buckets: the position behind each one's last token; its kept prompt tokens.
  static Result<std::vector<int32_t>> ReadEnds(const CudaFrame& frame, int member, int head);
  static Result<std::vector<int32_t>> ReadKeptOf(const CudaFrame& frame, int member, int head);

  const StepMemory::Column sink_end_, recent_begin_, queries_from_, whole_;
  WordTable tables_;                // a cuda::SentenceTable a member
  int32_t members_ = 0, list_ = 0;  // room; list: tokens chosen of a (member, KV head)
  DeviceBuffer units_, counts_;     // a DeviceSelection
  DeviceBuffer counters_;           // for op pick_buckets
  PromptRanking ranking_;
  DeviceBuffer prompt_ints_;    // sentence ends, lengths
  std::vector<uint8_t> noted_;  // [members][layers]: queries of a prompt were kept
};

Status CudaBucket::Fit(const CudaFrame& frame, std::span<const CudaPart>) {
  int32_t members = members_, list = list_;
  for (int i = 0; i < frame.members(); ++i) {
    if (!Has(frame, i)) continue;
    list = std::max({list, frame.plan(i).bucket.budget, 1});
    members = std::max(members, frame.memory().members());
  }
  if (members == members_ && list == list_) return OkStatus();
  members_ = list_ = 0;  // until all of it is there
  StepMemory& memory = frame.memory();
  memory.NoteGrowth();
  const int64_t lists = int64_t{members} * frame.geometry().kv_heads;
  KVS_RETURN_IF_ERROR(memory.Fit(&tables_, members, kTableWords));
  KVS_RETURN_IF_ERROR(memory.Fit(&units_, lists * list * kInt));
  KVS_RETURN_IF_ERROR(memory.Fit(&counts_, lists * kInt));
  KVS_RETURN_IF_ERROR(memory.Fit(&counters_, lists * kInt));
  members_ = members;
  list_ = list;
  return OkStatus();
}

void CudaBucket::Close(const CudaFrame& frame, int member) {
  SequenceState& state = frame.state(member);
  const Plan& plan = state.plan();
  std::shared_ptr<CudaHistory>& history = state.on_gpu.history;
  if (history == nullptr) history = std::make_shared<CudaSentences>(plan, frame.geometry());
  const int32_t prompt = state.prompt_tokens();
  if (prompt < 0) return;
  CudaSentences& own = SentencesOf(frame, member);
  const int32_t tokens = frame.member(member).view.tokens;
  if (!std::exchange(own.started, true)) own.ends.Start(prompt);
  if (!own.ready) {
    own.listed = !BucketsInFull(plan, prompt);  // a short prompt keeps everything
    if (state.reported().boundary().size() < static_cast<size_t>(prompt)) return;
    if (own.listed && !own.Observed(plan, frame.geometry(), prompt)) return;
    if (!own.listed) AddWhole(PromptSentences(state), plan, &own.whole);
    own.queries_from = tokens;
    own.ready = true;
  }
  const std::vector<Run> closed = own.ends.Close(state.reported().boundary(), tokens);
  if (!closed.empty()) own.queries_from = tokens;
  AddWhole(closed, plan, &own.whole);
}

Run CudaBucket::ListedRange(const CudaFrame& frame, int member) {
  const Plan& plan = frame.plan(member);
  const int32_t n = frame.member(member).view.tokens + 1;
  const CudaSentences& own = SentencesOf(frame, member);
  if (frame.state(member).prompt_tokens() < 0 || !own.ready || BucketsInFull(plan, n)) return {};
  const int32_t window = std::min(n - plan.bucket.recent, own.ends.begin());
  return {std::min(plan.bucket.sinks, window), window};
}

// Memory of the members' own, and where it is told to the GPU.
Status CudaBucket::Stage(CudaFrame* frame) {
  noted_.assign(static_cast<size_t>(frame->members() * frame->geometry().layers), 0);
  frame->OnceIndexed([this, frame] { return MakeBuckets(frame); });
  for (int i = 0; i < frame->members(); ++i) {
    if (!Has(*frame, i)) continue;
    Close(*frame, i);
    CudaSentences& own = SentencesOf(*frame, i);
    const Run listed = ListedRange(*frame, i);
    StepMemory& memory = frame->memory();
    memory.At(sink_end_, i) = listed.begin;
    memory.At(recent_begin_, i) = listed.end;
    memory.At(queries_from_, i) = own.ready ? own.queries_from : -1;
    memory.At(whole_, i) = own.ready ? static_cast<int32_t>(own.whole.size()) : 0;
    if (frame->state(i).prompt_tokens() >= 0 && !own.ready) continue;
    KVS_RETURN_IF_ERROR(FitMemory(*frame, i));
    const cuda::SentenceTable& table = own.memory->table();
    KVS_RETURN_IF_ERROR(
        memory.Write(&tables_, i, std::as_bytes(std::span(&table, 1)), frame->stream()));
  }
  return OkStatus();
}

Status CudaBucket::FitMemory(const CudaFrame& frame, int member) {
  const SequenceState& state = frame.state(member);
  CudaSentences& own = SentencesOf(frame, member);
  if (own.memory == nullptr) {
    KVS_ASSIGN_OR_RETURN(own.memory, CudaSentenceMemory::Create(frame.ops(), frame.geometry(),
                                                                state.plan().bucket.n_obs));
  } else if (own.memory->shared) {
    KVS_ASSIGN_OR_RETURN(own.memory,
                         CudaSentenceMemory::CopyOf(*own.memory, frame.ops(), frame.stream()));
  }
  if (!own.ready) return OkStatus();
  if (own.listed && !own.made) {
    const KeptOfPrompt kept(state.plan(), state.prompt_tokens());
    const auto sentences = static_cast<int32_t>(PromptSentences(state).size());
    KVS_RETURN_IF_ERROR(
        own.memory->FitPrompt(frame.ops(), kept.count(), std::min(kept.count(), sentences)));
  }
  return own.memory->FitWhole(frame.ops(), static_cast<int32_t>(own.whole.size()), own.whole_made,
                              frame.stream());
}

// The buckets that are to be made.
Status CudaBucket::MakeBuckets(CudaFrame* frame) {
  for (int i = 0; i < frame->members(); ++i) {
    if (!Has(*frame, i) || frame->state(i).prompt_tokens() < 0) continue;
    CudaSentences& own = SentencesOf(*frame, i);
    if (!own.ready) continue;
    if (own.listed && !own.made) {
      KVS_RETURN_IF_ERROR(MakePromptBuckets(frame, i));
      own.made = true;
    }
    KVS_RETURN_IF_ERROR(MakeWholeBuckets(frame, i));
  }
  return OkStatus();
}

// Makes them for all layers; in layers attended in full they mean nothing.
Status CudaBucket::MakePromptBuckets(CudaFrame* frame, int member) {
  frame->NoteLaunch();
  const SequenceState& state = frame->state(member);
  const Plan& plan = state.plan();
  const KeptOfPrompt kept(plan, state.prompt_tokens());
  std::vector<int32_t> ints;  // where sentences end; tokens that each query sees; kept.before
  for (const Run& s : PromptSentences(state)) ints.push_back(s.end);
  const auto sentences = static_cast<int32_t>(ints.size());
  // Queries lie in a ring: position t at t % n_obs.
  ints.resize(ints.size() + static_cast<size_t>(kept.queries) + 1);
  for (int32_t t = kept.before; t < state.prompt_tokens(); ++t) {
    ints[static_cast<size_t>(sentences + t % plan.bucket.n_obs)] = t + 1;
  }
  ints.back() = kept.before;
  KVS_RETURN_IF_ERROR(prompt_ints_.Reserve(frame->ops(), ints.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(
      frame->Check(frame->ops().copy_async(prompt_ints_.as<int32_t>(), ints.data(),
                                           ints.size() * sizeof(int32_t), frame->stream()),
                   "copying the sentences of a prompt"));
  if (!kept.all() && kept.ranked > 0) {
    KVS_RETURN_IF_ERROR(ranking_.Fit(*frame, state.prompt_tokens()));
    for (int layer = plan.n_dense_layers; layer < frame->geometry().layers; ++layer) {
      KVS_RETURN_IF_ERROR(
          ranking_.Rank(*frame, member, layer, prompt_ints_.as<int32_t>() + sentences));
    }
  }
  cuda::PromptBucketsBatch w;
  w.keys = cuda::KeyRows(frame->PagesOf(member, 0));
  w.key_layer_stride = PageLayout::Of(frame->geometry()).layer_stride;
  w.layers = frame->geometry().layers;
  w.table = SentencesOf(*frame, member).memory->table();
  w.ranked = kept.ranked;
  w.first = kept.first;
  w.all = kept.all();
  w.window = kept.window;
  w.ends = prompt_ints_.as<int32_t>();
  w.sentences = sentences;
  return frame->Check(frame->ops().prompt_buckets(w, frame->stream()), "op prompt_buckets");
}

Status CudaBucket::MakeWholeBuckets(CudaFrame* frame, int member) {
  CudaSentences& own = SentencesOf(*frame, member);
  const auto count = static_cast<int32_t>(own.whole.size());
  cuda::WholeBucketsBatch w;
  w.keys = cuda::KeyRows(frame->PagesOf(member, 0));
  w.key_layer_stride = PageLayout::Of(frame->geometry()).layer_stride;
  w.layers = frame->geometry().layers;
  w.table = own.memory->table();
  while (own.whole_made < count) {
    frame->NoteLaunch();
    w.first = own.whole_made;
    w.count = std::min(count - own.whole_made, cuda::WholeBucketsBatch::kMost);
    std::copy_n(own.whole.begin() + w.first, w.count, w.sentences);
    KVS_RETURN_IF_ERROR(
        frame->Check(frame->ops().whole_buckets(w, frame->stream()), "op whole_buckets"));
    own.whole_made += w.count;
  }
  return OkStatus();
}

// A prompt's queries.
Status CudaBucket::Observe(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) {
  cuda::ObserveBatch w;
  w.tables = tables_.Row<cuda::SentenceTable>(part.first);
  w.layer = layer;
  w.capacity = part.plan.bucket.n_obs;
  w.visible = frame.VisibleFrom(frame.FirstRow(part));
  w.q = q.data;
  w.q_dtype = q.dtype;
  w.batch = part.count;
  w.new_tokens = part.new_tokens;
  w.query_floats = frame.geometry().query_heads * frame.geometry().head_dim;
  KVS_RETURN_IF_ERROR(frame.Check(frame.ops().observe(w, frame.stream()), "op observe"));
  NoteReplayed(frame, part, layer);
  return OkStatus();
}

void CudaBucket::NoteReplayed(const CudaFrame& frame, const CudaPart& part, int layer) {
  for (int i = part.first; i < part.first + part.count; ++i) {
    const auto cell = static_cast<size_t>(i * frame.geometry().layers + layer);
    if (std::exchange(noted_[cell], uint8_t{1}) != 0) continue;
    const StepMember& m = frame.member(i);
    SentencesOf(frame, i).observed[static_cast<size_t>(layer)].Add(m.view.tokens, m.new_tokens,
                                                                   frame.plan(i).bucket.n_obs);
  }
}

Status CudaBucket::Pick(const CudaFrame& frame, const CudaPart& part, int layer,
                        const Rows& q) const {
  cuda::PickBucketsBatch w;
  w.tables = tables_.Row<cuda::SentenceTable>(part.first);
  w.layer = layer;
  w.tokens = frame.VisibleFrom(frame.FirstRow(part));
  w.queries_from = frame.memory().On(queries_from_, part.first);
  w.whole = frame.memory().On(whole_, part.first);
  w.recent_begin = frame.memory().On(recent_begin_, part.first);
  w.q = q.data;
  w.q_dtype = q.dtype;
  w.batch = part.count;
  w.kv_heads = frame.geometry().kv_heads;
  w.group = frame.geometry().group();
  w.head_dim = frame.geometry().head_dim;
  w.tau = part.plan.bucket.budget;
  const int64_t list = int64_t{part.first} * w.kv_heads;
  w.units = units_.as<int32_t>() + list * list_;
  w.counts = counts_.as<int32_t>() + list;
  w.list_stride = list_;
  w.counters = counters_.as<uint32_t>() + list;
  return frame.Check(frame.ops().pick_buckets(w, frame.stream()), "op pick_buckets");
}

cuda::DeviceSelection CudaBucket::SelectionOf(const CudaFrame& frame, const CudaPart& part) const {
  const int64_t list = int64_t{part.first} * frame.geometry().kv_heads;
  cuda::DeviceSelection selection;
  selection.unit_tokens = 1;
  selection.groups = frame.geometry().kv_heads;
  selection.list_stride = list_;
  selection.units = units_.as<int32_t>() + list * list_;
  selection.counts = counts_.as<int32_t>() + list;
  selection.sink_end = frame.memory().On(sink_end_, part.first);
  selection.recent_begin = frame.memory().On(recent_begin_, part.first);
  return selection;
}

Result<Selection> CudaBucket::Read(const CudaFrame& frame, const CudaPart&, int member,
                                   int32_t n) const {
  const Run listed = ListedRange(frame, member);
  if (listed == Run{}) return Selection::Full(n);
  const Geometry& g = frame.geometry();
  CudaPart own;
  own.first = member;
  const cuda::DeviceSelection device = SelectionOf(frame, own);
  std::vector<int32_t> counts(static_cast<size_t>(g.kv_heads));
  KVS_RETURN_IF_ERROR(
      frame.CopyToHost(counts.data(), device.counts, counts.size() * sizeof(int32_t)));
  Selection selection;
  selection.Reset(n, g.kv_heads);
  for (int head = 0; head < g.kv_heads; ++head) {
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> ends, ReadEnds(frame, member, head));
    std::vector<int32_t> tokens(static_cast<size_t>(counts[head]));
    KVS_RETURN_IF_ERROR(frame.CopyToHost(tokens.data(),
                                         device.units + int64_t{head} * device.list_stride,
                                         tokens.size() * sizeof(int32_t)));
    std::vector<Run>& runs = selection.runs[head];
    std::vector<int32_t>& units = selection.units[head];
    AppendRun({0, listed.begin}, &runs);
    for (const int32_t t : tokens) {
      AppendRun({t, t + 1}, &runs);
      const auto unit = static_cast<int32_t>(std::ranges::upper_bound(ends, t) - ends.begin());
      if (units.empty() || units.back() != unit) units.push_back(unit);
    }
    AppendRun({listed.end, n}, &runs);
    selection.scored_bytes += static_cast<int64_t>(ends.size()) * g.head_dim * SizeOf(DType::kBF16);
  }
  return selection;
}

Result<std::vector<int32_t>> CudaBucket::ReadEnds(const CudaFrame& frame, int member, int head) {
  const CudaSentences& own = SentencesOf(frame, member);
  const cuda::SentenceTable& table = own.memory->table();
  std::vector<int32_t> ends;
  if (own.listed) {
    const int64_t row = int64_t{frame.selected_layer()} * frame.geometry().kv_heads + head;
    int32_t count = 0;
    KVS_RETURN_IF_ERROR(frame.CopyToHost(&count, table.counts + row, sizeof(count)));
    std::vector<int32_t> firsts(static_cast<size_t>(count) + 1);
    KVS_RETURN_IF_ERROR(frame.CopyToHost(firsts.data(),
                                         table.firsts + row * (table.bucket_stride + 1),
                                         firsts.size() * sizeof(int32_t)));
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> kept, ReadKeptOf(frame, member, head));
    for (size_t i = 1; i < firsts.size(); ++i) {
      ends.push_back(kept[static_cast<size_t>(firsts[i]) - 1] + 1);
    }
  }
  for (const Run& tokens : own.whole) ends.push_back(tokens.end);
  return ends;
}

Result<std::vector<int32_t>> CudaBucket::ReadKeptOf(const CudaFrame& frame, int member, int head) {
  const cuda::SentenceTable& table = SentencesOf(frame, member).memory->table();
  const int64_t row = int64_t{frame.selected_layer()} * frame.geometry().kv_heads + head;
  std::vector<int32_t> kept(static_cast<size_t>(table.kept_stride));
  KVS_RETURN_IF_ERROR(frame.CopyToHost(kept.data(), table.kept + row * table.kept_stride,
                                       kept.size() * sizeof(int32_t)));
  return kept;
}

Result<std::vector<int32_t>> CudaBucket::ReadKept(const CudaFrame& frame, int member,
                                                  int head) const {
  if (frame.selected_layer() < 0 || !SentencesOf(frame, member).made) {
    return FailedPrecondition("KEPT_NONE", "no prompt tokens are kept for this member");
  }
  return ReadKeptOf(frame, member, head);
}

Status Serves(const Plan& plan) {
  if (plan.bucket.keep_rest)
    return PlanUnserved("keep_rest", "true", "op buckets of sentences without kept tokens");
  if (plan.bucket.per_query_head)
    return PlanUnserved("per_query_head", "true", "op pick_buckets with a list a query head");
  return OkStatus();
}

}  // namespace

constinit const CudaSelectorRow kCudaBucket = {kOverRaw, "op expand_spans by buckets", Serves,
                                               MakeCudaSelector<CudaBucket>};

}  // namespace kvstrata
