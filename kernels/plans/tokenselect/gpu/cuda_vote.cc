// SPDX-License-Identifier: Apache-2.0
// Selector vote (TokenSelect) on a GPU, as kernels/plans/tokenselect/vote.cc does it on a CPU.
// Whether a cached selection is used is the GPU's decision (ops/reuse), so that a graph serves hits
// and misses.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>

#include "kernels/cuda/device_buffer.h"
#include "kernels/select/cuda_history.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/lists/cuda_lists.h"

namespace kvstrata {
namespace {

constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float);

// CudaVoteCache: TokenSelect's selection cache of one sequence on a GPU, what VoteSelector keeps on
// a CPU: of each layer the query and the tokens of the last re-selection (op reuse knows the
// layout). Kernels of the sequence's steps read and write it; it goes with the sequence, whatever
// batch, workspace or stream that is in.
//
// A fork shares it: from then on nobody writes it, and who steps next, parent or child, takes a
// copy of his own (CudaStep::Begin).
//
// Cost: 2 * layers * (4 * query_heads * head_dim + 4 * k) bytes: 1.6 MB with Llama-3.1-8B; one
// allocation, in the first step that selects.
struct CudaVoteCache final : CudaHistory, std::enable_shared_from_this<CudaVoteCache> {
  std::shared_ptr<CudaHistory> Fork() override {
    shared = true;
    return shared_from_this();
  }
  bool Truncate(int32_t) override { return false; }
  std::string StatusText(const Plan&, const SelectContext&) const override { return ""; }

  DeviceBuffer memory;
  std::atomic<bool> shared = false;  // forked: read only
};

cuda::PickCacheLayout CacheLayoutOf(const Plan& plan, const Geometry& g) {
  return {int64_t{g.query_heads} * g.head_dim, plan.vote.budget};
}

// A prompt chunk selects from the tokens before it: the same rule, of one token less.
cuda::CandidateRule RuleOf(const Plan& plan, bool prompt) {
  cuda::CandidateRule rule = VoteCandidates(plan);
  if (!prompt) return rule;
  ++rule.recent_tokens;
  ++rule.min_tokens;
  return rule;
}

bool InFull(const Plan& plan, int32_t n) {
  return cuda::CandidatesOf(VoteCandidates(plan), n).full;
}

class CudaVote final : public CudaSelector {
 public:
  explicit CudaVote(StepMemory* memory) { memory->Add(&caches_); }

  CudaSelectorTraits traits(const Plan& plan) override {
    return {.idles_when_short = true,
            .attends_newest = plan.vote.recent > 0,
            .prompt_chunk = plan.vote.chunk};
  }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart> parts) override {
    Room room = room_;
    for (const CudaPart& part : parts) {
      if (part.selector != this || !part.selects) continue;
      const int32_t lists = part.list + part.count;
      Raise(&room.lists, lists, PowerOfTwo(lists));
      Raise(&room.batch, part.count, PowerOfTwo(part.count));
      if (part.prompt) room.chunk_list = std::max(room.chunk_list, part.plan.vote.budget);
      for (int i = part.first; i < part.first + part.count; ++i) {
        const int32_t tokens = frame.RoomFor(i);
        Raise(&room.tokens, tokens, Generous(tokens, kMultiple));
      }
    }
    if (room.lists == 0) return OkStatus();
    KVS_RETURN_IF_ERROR(frame.memory().Fit(&caches_, frame.memory().members(), 1));
    if (room == room_) return OkStatus();
    room_ = {};  // until all of it is there
    KVS_RETURN_IF_ERROR(FitTo(room, frame));
    room_ = room;
    return OkStatus();
  }

  // Tells the GPU where the members' caches are; makes those that are missing, or shared.
  Status Stage(CudaFrame* frame) override {
    for (int i = 0; i < frame->members(); ++i) {
      SequenceState& state = frame->state(i);
      const bool votes = Has(*frame, i) && state.prompt_tokens() >= 0;
      if (!votes || InFull(state.plan(), frame->member(i).view.tokens + 1)) continue;
      auto cache = std::static_pointer_cast<CudaVoteCache>(state.on_gpu.history);
      if (cache == nullptr || cache->shared) {
        KVS_RETURN_IF_ERROR(Own(*frame, state.plan(), &cache));
        state.on_gpu.history = cache;
      }
      const std::byte* const at = cache->memory.as<std::byte>();
      KVS_RETURN_IF_ERROR(
          frame->memory().Write(&caches_, i, std::as_bytes(std::span(&at, 1)), frame->stream()));
    }
    return OkStatus();
  }

  // By the queries of each member's first new token, or the mean query of a prompt chunk.
  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const int32_t* tokens = frame->VisibleFrom(frame->FirstRow(part));
    if (part.prompt) {
      KVS_RETURN_IF_ERROR(MeanQuery(*frame, part, q));
      const Rows mean{mean_.as<std::byte>(), 0, 0, DType::kF32};
      KVS_RETURN_IF_ERROR(Count(*frame, part, layer, mean, tokens, {}));
    } else {
      const cuda::Reuse reuse = ReuseOf(part, layer, tokens);
      tokens = reuse.voting;
      KVS_RETURN_IF_ERROR(Count(*frame, part, layer, q, tokens, reuse));
    }
    return Pick(*frame, part, tokens);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    cuda::DeviceSelection selection;
    selection.unit_tokens = 1;
    if (part.prompt) {
      selection.list_stride = room_.chunk_list;
      selection.units = units_.as<int32_t>() + int64_t{part.list} * room_.chunk_list;
    } else {
      selection.list_stride = part.plan.vote.budget;
      selection.lists = lists_.as<uint64_t>() + part.list;
    }
    selection.counts = counts_.as<int32_t>() + part.list;
    selection.sink_end = sink_end_.as<int32_t>() + part.list;
    selection.recent_begin = recent_begin_.as<int32_t>() + part.list;
    return selection;
  }

  // A prompt chunk selects from the tokens before its first.
  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t tokens) const override {
    const int32_t n = part.prompt ? tokens - 1 : tokens;
    if (InFull(part.plan, n)) return Selection::Full(n);
    const int64_t list = part.list + member - part.first;
    const auto read = [&](const DeviceBuffer& from, int32_t* to) {
      return frame.CopyToHost(to, from.as<int32_t>() + list, sizeof(*to));
    };
    int32_t count = 0, sink_end = 0, recent_begin = 0, voting = cuda::kNoQuery;
    KVS_RETURN_IF_ERROR(read(counts_, &count));
    KVS_RETURN_IF_ERROR(read(sink_end_, &sink_end));
    KVS_RETURN_IF_ERROR(read(recent_begin_, &recent_begin));
    if (!part.prompt) KVS_RETURN_IF_ERROR(read(voting_, &voting));
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> taken, ReadList(frame, part, list, count));
    Selection selection;
    selection.Reset(n, 1);
    AppendRun({0, sink_end}, &selection.runs[0]);
    for (const int32_t t : taken) AppendRun({t, t + 1}, &selection.runs[0]);
    AppendRun({recent_begin, n}, &selection.runs[0]);
    const Geometry& g = frame.geometry();
    if (voting != cuda::kNoQuery) {
      selection.scored_bytes = int64_t{recent_begin - sink_end} * g.kv_heads * g.row_bytes();
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 64;  // tokens, in growing

  struct Room {
    int32_t batch = 0;   // sequences that one launch serves
    int32_t lists = 0;   // lists of a step: one a decoding sequence, one a prompt chunk
    int32_t tokens = 0;  // candidates of a sequence
    int32_t chunk_list =
        0;  // entries of a prompt chunk's list; a sequence has its own in its cache
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame) {
    const Geometry& g = frame.geometry();
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    KVS_RETURN_IF_ERROR(memory.Fit(&votes_, int64_t{room.batch} * room.tokens * kFloat));
    cuda::VoteBatch vote;
    vote.rows.kv_heads = g.kv_heads;
    vote.query_heads = g.query_heads;
    vote.output_rows = 1;
    vote.candidate_stride = room.tokens;
    KVS_RETURN_IF_ERROR(
        memory.Fit(&vote_scratch_, VoteScratchBytes(frame.ops(), vote, room.batch)));
    KVS_RETURN_IF_ERROR(memory.FitZeroed(
        &pick_scratch_, PickScratchBytes(frame.ops(), room.batch, 1, room.tokens)));
    KVS_RETURN_IF_ERROR(memory.Fit(&mean_, int64_t{g.query_heads} * g.head_dim * kFloat));
    KVS_RETURN_IF_ERROR(memory.Fit(&lists_, room.lists * int64_t{sizeof(uint64_t)}));
    for (DeviceBuffer* const ints : {&voting_, &counts_, &sink_end_, &recent_begin_}) {
      KVS_RETURN_IF_ERROR(memory.Fit(ints, room.lists * kInt));
    }
    return memory.Fit(&units_, int64_t{room.lists} * room.chunk_list * kInt);
  }

  // A cache of the sequence's own, with what the one that it shares holds.
  static Status Own(const CudaFrame& frame, const Plan& plan,
                    std::shared_ptr<CudaVoteCache>* cache) {
    auto own = std::make_shared<CudaVoteCache>();
    const Geometry& g = frame.geometry();
    const auto bytes = static_cast<uint64_t>(CacheLayoutOf(plan, g).layer_bytes() * g.layers);
    KVS_RETURN_IF_ERROR(own->memory.Reserve(frame.ops(), bytes));
    if (*cache != nullptr) {
      KVS_RETURN_IF_ERROR(frame.Check(
          frame.ops().copy_async(own->memory.as<std::byte>(), (*cache)->memory.as<std::byte>(),
                                 bytes, frame.stream()),
          "copying a selection cache"));
    }
    *cache = std::move(own);
    return OkStatus();
  }

  Status MeanQuery(const CudaFrame& frame, const CudaPart& part, const Rows& q) {
    cuda::MeanQueryBatch w;
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.rows = part.new_tokens;
    w.row_floats = frame.geometry().query_heads * frame.geometry().head_dim;
    w.mean = mean_.as<float>();
    return frame.Check(frame.ops().mean_query(w, frame.stream()), "op mean_query");
  }

  cuda::Reuse ReuseOf(const CudaPart& part, int layer, const int32_t* tokens) const {
    cuda::Reuse reuse;
    reuse.caches = caches_.Row<uint64_t>(part.first);
    reuse.layer = layer;
    reuse.theta = part.plan.vote.theta;
    reuse.per_head = part.plan.vote.cosine_per_head;
    reuse.append_departed = part.plan.vote.append_departed;
    reuse.tokens = tokens;
    reuse.ahead = true;
    reuse.voting = voting_.as<int32_t>() + part.list;
    reuse.lists = lists_.as<uint64_t>() + part.list;
    reuse.counts = counts_.as<int32_t>() + part.list;
    reuse.sink_end = sink_end_.as<int32_t>() + part.list;
    reuse.recent_begin = recent_begin_.as<int32_t>() + part.list;
    return reuse;
  }

  Status Count(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q,
               const int32_t* tokens, const cuda::Reuse& reuse) {
    cuda::VoteBatch w;
    w.rows = cuda::KeyRows(frame.PagesOf(part.first, layer));
    w.scale = frame.geometry().logit_scale();
    w.rule = RuleOf(part.plan, part.prompt);
    w.tokens = tokens;
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = frame.geometry().query_heads;
    w.output_rows = 1;
    w.candidate_stride = room_.tokens;
    w.votes = votes_.as<float>();
    w.scratch = vote_scratch_.as<std::byte>();
    w.reuse = reuse;
    return frame.Check(frame.ops().vote(w, frame.stream()), "op vote");
  }

  Status Pick(const CudaFrame& frame, const CudaPart& part, const int32_t* tokens) {
    cuda::PickBatch w;
    w.scores = votes_.as<float>();
    w.score_stride = room_.tokens;
    w.batch = part.count;
    w.rule = RuleOf(part.plan, part.prompt);
    w.tokens = tokens;
    if (part.prompt) {
      w.units = units_.as<int32_t>() + int64_t{part.list} * room_.chunk_list;
      w.list_stride = room_.chunk_list;
    } else {
      w.lists = lists_.as<uint64_t>() + part.list;
      w.list_stride = part.plan.vote.budget;
    }
    w.counts = counts_.as<int32_t>() + part.list;
    w.sink_end = sink_end_.as<int32_t>() + part.list;
    w.recent_begin = recent_begin_.as<int32_t>() + part.list;
    w.scratch = pick_scratch_.as<std::byte>();
    w.scratch_lists = room_.batch;
    return frame.Check(frame.ops().pick(w, frame.stream()), "op pick");
  }

  // The tokens of list number `list`, which lies in the sequence's cache, or is a chunk's.
  Result<std::vector<int32_t>> ReadList(const CudaFrame& frame, const CudaPart& part, int64_t list,
                                        int32_t count) const {
    const void* at = units_.as<int32_t>() + list * room_.chunk_list;
    if (!part.prompt) {
      KVS_RETURN_IF_ERROR(frame.CopyToHost(&at, lists_.as<uint64_t>() + list, sizeof(at)));
    }
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    if (count == 0) return tokens;
    KVS_RETURN_IF_ERROR(frame.CopyToHost(tokens.data(), at, tokens.size() * sizeof(int32_t)));
    return tokens;
  }

  Room room_;
  WordTable caches_;  // a member's cache
  // Scratch for one launch.
  DeviceBuffer votes_;                        // float [batch][tokens]
  DeviceBuffer vote_scratch_, pick_scratch_;  // for the ops
  DeviceBuffer mean_;                         // float [query_heads][head_dim], of a prompt chunk
  // By list: what op reuse writes, and the selection.
  DeviceBuffer voting_, lists_, counts_, sink_end_, recent_begin_;
  DeviceBuffer units_;  // int32_t [lists][chunk_list]
};

Status Serves(const Plan& plan) {
  if (plan.vote.max_pool > 1)
    return PlanUnserved("max_pool", std::to_string(plan.vote.max_pool),
                        "op vote with a maximum over neighbours");
  // Op vote keeps weights down to e^-20 of a block's.
  if (!plan.vote.scale) return PlanUnserved("scale", "false", "op vote over logits of any size");
  return OkStatus();
}

}  // namespace

constinit const CudaSelectorRow kCudaVote = {kOverRaw, "op vote over packed keys", Serves,
                                             MakeCudaSelector<CudaVote>};

}  // namespace kvstrata
