// Selector vote (TokenSelect) of a CudaStep, as kernels/select/vote.cc does it on a CPU.
#include <algorithm>

#include "kernels/step/cuda_step.h"
#include "kernels/step/cuda_vote_cache.h"

namespace kvstrata {
namespace {

cuda::PickCacheLayout CacheLayoutOf(const Plan& plan, const Geometry& g) {
  return {int64_t{g.query_heads} * g.head_dim, plan.vote.budget};
}

// Of N tokens, the query's own among them. A prompt chunk selects from the tokens before it: the
// same rule, of one token less.
cuda::CandidateRule VoteRuleOf(const Plan& plan, bool prompt) {
  const int32_t own = prompt ? 1 : 0;
  return {1, plan.vote.sinks, plan.vote.recent + own, plan.vote.budget, plan.min_tokens + own};
}

bool VotesInFull(const Plan& plan, int32_t n) {
  return AttendsInFull(n, plan.vote.sinks + plan.vote.recent, plan.vote.budget, plan.min_tokens);
}

}  // namespace

// A prompt is cut at multiples of vote.chunk from the sequence's start (ADR 3).
void CudaStep::CutPrompt(int member) {
  const StepMember& m = members_[member];
  const Plan& plan = m.state->plan();
  for (int32_t begin = 0, end; begin < m.new_tokens; begin = end) {
    const int64_t start = int64_t{m.view.tokens} + begin;
    const int64_t next = (start / plan.vote.chunk + 1) * plan.vote.chunk - m.view.tokens;
    end = static_cast<int32_t>(std::min<int64_t>(next, m.new_tokens));
    Part part{member, 1, end - begin, !VotesInFull(plan, static_cast<int32_t>(start)), {}, begin};
    part.prompt = true;
    if (part.selects) {
      part.plan = plan;
      part.list = vote_lists_++;
    }
    parts_.push_back(std::move(part));
  }
}

VoteBuffers::Capacity CudaStep::NeedOfVotes() const {
  VoteBuffers::Capacity need;
  for (const Part& part : parts_) {
    if (!part.selects || part.plan.selector != SelectorKind::kVote) continue;
    need.lists = part.list + part.count;
    need.batch = std::max(need.batch, part.count);
    if (part.prompt) need.chunk_lists = std::max(need.chunk_lists, part.plan.vote.budget);
    for (int i = part.first; i < part.first + part.count; ++i) {
      const int32_t tokens = members_[i].view.tokens + members_[i].new_tokens;
      need.tokens = std::max({need.tokens, tokens, ws_.reserve_tokens_});
    }
  }
  return need;
}

// Tells the GPU where the members' caches are; makes those that are missing, or shared.
Status CudaStep::StageVoteCaches(const CudaWorkspace::StagingSlot& slot) {
  for (int i = 0; i < members(); ++i) {
    SequenceState& state = *members_[i].state;
    const bool votes = state.plan_.selector == SelectorKind::kVote && state.prompt_tokens_ >= 0;
    if (!votes || VotesInFull(state.plan_, members_[i].view.tokens + 1)) continue;
    if (state.vote_cache_ == nullptr || state.vote_cache_->shared) {
      KVS_RETURN_IF_ERROR(OwnVoteCache(&state));
    }
    const std::byte* const cache = state.vote_cache_->memory.as<std::byte>();
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.vote_caches_, 1, i, &cache, 1, slot, stream_));
  }
  return OkStatus();
}

Status CudaStep::OwnVoteCache(SequenceState* state) {
  auto own = std::make_shared<CudaVoteCache>();
  const auto bytes = static_cast<uint64_t>(CacheLayoutOf(state->plan_, geometry()).layer_bytes() *
                                           geometry().layers);
  KVS_RETURN_IF_ERROR(own->memory.Reserve(ops_, bytes));
  if (state->vote_cache_ != nullptr) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.copy_async(own->memory.as<std::byte>(),
                              state->vote_cache_->memory.as<std::byte>(), bytes, stream_),
              "copying a selection cache"));
  }
  state->vote_cache_ = std::move(own);
  return OkStatus();
}

cuda::DeviceSelection CudaStep::VotedSelection(const Part& part) const {
  const VoteBuffers& votes = ws_.votes_;
  cuda::DeviceSelection selection;
  selection.unit_tokens = 1;
  if (part.prompt) {
    selection.list_stride = ws_.capacity_.votes.chunk_lists;
    selection.units = votes.units.as<int32_t>() + int64_t{part.list} * selection.list_stride;
  } else {
    selection.list_stride = part.plan.vote.budget;
    selection.lists = votes.lists.as<uint64_t>() + part.list;
  }
  selection.counts = votes.counts.as<int32_t>() + part.list;
  selection.sink_end = votes.sink_end.as<int32_t>() + part.list;
  selection.recent_begin = votes.recent_begin.as<int32_t>() + part.list;
  return selection;
}

// Of each member's first new token, or of the mean query of a prompt chunk.
Status CudaStep::SelectVotes(const Part& part, int layer, const std::byte* q, DType dtype) {
  const int32_t* tokens = ws_.visible() + first_row_[part.first] + part.begin;
  cuda::Reuse reuse;
  if (part.prompt) {
    KVS_RETURN_IF_ERROR(MeanQuery(part, q, dtype));
    q = ws_.votes_.mean.as<std::byte>();
    dtype = DType::kF32;
  } else {
    reuse = ReuseOf(part, layer, tokens);
    tokens = reuse.voting;
  }
  KVS_RETURN_IF_ERROR(CountVotes(part, layer, q, dtype, tokens, reuse));
  return PickVoted(part, tokens);
}

Status CudaStep::MeanQuery(const Part& part, const std::byte* q, DType dtype) {
  cuda::MeanQueryBatch w;
  w.q = q;
  w.q_dtype = dtype;
  w.rows = part.new_tokens;
  w.row_floats = geometry().query_heads * geometry().head_dim;
  w.mean = ws_.votes_.mean.as<float>();
  return Check(ops_.mean_query(w, stream_), "op mean_query");
}

cuda::Reuse CudaStep::ReuseOf(const Part& part, int layer, const int32_t* tokens) const {
  const VoteBuffers& votes = ws_.votes_;
  cuda::Reuse reuse;
  reuse.caches = ws_.vote_caches_.device.as<uint64_t>() + part.first;
  reuse.layer = layer;
  reuse.theta = part.plan.vote.theta;
  reuse.per_head = part.plan.vote.cosine_per_head;
  reuse.append_departed = part.plan.vote.append_departed;
  reuse.tokens = tokens;
  reuse.ahead = true;
  reuse.voting = votes.voting.as<int32_t>() + part.list;
  reuse.lists = votes.lists.as<uint64_t>() + part.list;
  reuse.counts = votes.counts.as<int32_t>() + part.list;
  reuse.sink_end = votes.sink_end.as<int32_t>() + part.list;
  reuse.recent_begin = votes.recent_begin.as<int32_t>() + part.list;
  return reuse;
}

Status CudaStep::CountVotes(const Part& part, int layer, const std::byte* q, DType dtype,
                            const int32_t* tokens, const cuda::Reuse& reuse) {
  cuda::VoteBatch w;
  w.rows = cuda::KeyRows(PagesOf(part, layer));
  w.scale = geometry().logit_scale();
  w.rule = VoteRuleOf(part.plan, part.prompt);
  w.tokens = tokens;
  w.q = q;
  w.q_dtype = dtype;
  w.batch = part.count;
  w.query_heads = geometry().query_heads;
  w.output_rows = 1;
  w.candidate_stride = ws_.capacity_.votes.tokens;
  w.votes = ws_.votes_.votes.as<float>();
  w.scratch = ws_.votes_.scratch.as<std::byte>();
  w.reuse = reuse;
  return Check(ops_.vote(w, stream_), "op vote");
}

Status CudaStep::PickVoted(const Part& part, const int32_t* tokens) {
  const VoteBuffers& votes = ws_.votes_;
  const int32_t list_stride = ws_.capacity_.votes.chunk_lists;
  cuda::PickBatch w;
  w.scores = votes.votes.as<float>();
  w.score_stride = ws_.capacity_.votes.tokens;
  w.batch = part.count;
  w.rule = VoteRuleOf(part.plan, part.prompt);
  w.tokens = tokens;
  if (part.prompt) {
    w.units = votes.units.as<int32_t>() + int64_t{part.list} * list_stride;
    w.list_stride = list_stride;
  } else {
    w.lists = votes.lists.as<uint64_t>() + part.list;
    w.list_stride = part.plan.vote.budget;
  }
  w.counts = votes.counts.as<int32_t>() + part.list;
  w.sink_end = votes.sink_end.as<int32_t>() + part.list;
  w.recent_begin = votes.recent_begin.as<int32_t>() + part.list;
  w.scratch = votes.pick.as<std::byte>();
  w.scratch_lists = ws_.capacity_.votes.batch;
  return Check(ops_.pick(w, stream_), "op pick");
}

// A selection as VoteSelector makes it; n: the tokens that it is made of.
Result<Selection> CudaStep::ReadVotes(const Part& part, int member, int32_t n) const {
  const int64_t list = part.list + member - part.first;
  const VoteBuffers& votes = ws_.votes_;
  const auto read = [&](const DeviceBuffer& from, int32_t* to) {
    return CopyToHost(to, from.as<int32_t>() + list, sizeof(*to));
  };
  int32_t count = 0, sink_end = 0, recent_begin = 0, voting = cuda::kNoQuery;
  KVS_RETURN_IF_ERROR(read(votes.counts, &count));
  KVS_RETURN_IF_ERROR(read(votes.sink_end, &sink_end));
  KVS_RETURN_IF_ERROR(read(votes.recent_begin, &recent_begin));
  if (!part.prompt) KVS_RETURN_IF_ERROR(read(votes.voting, &voting));
  if (VotesInFull(part.plan, n)) return Selection::Full(n);

  uint64_t at = reinterpret_cast<uint64_t>(VotedSelection(part).units);
  if (!part.prompt) {
    KVS_RETURN_IF_ERROR(CopyToHost(&at, votes.lists.as<uint64_t>() + list, sizeof(at)));
  }
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  if (count > 0) {
    KVS_RETURN_IF_ERROR(CopyToHost(tokens.data(), reinterpret_cast<const void*>(at),
                                   tokens.size() * sizeof(int32_t)));
  }
  Selection selection;
  selection.Reset(n, 1);
  AppendRun({0, sink_end}, &selection.runs[0]);
  for (const int32_t t : tokens) AppendRun({t, t + 1}, &selection.runs[0]);
  AppendRun({recent_begin, n}, &selection.runs[0]);
  if (voting != cuda::kNoQuery) {
    selection.scored_bytes =
        int64_t{recent_begin - sink_end} * geometry().kv_heads * geometry().row_bytes();
  }
  return selection;
}

}  // namespace kvstrata
