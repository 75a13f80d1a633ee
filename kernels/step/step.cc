#include "kernels/step/step.h"

#include <algorithm>

#include "kernels/step/dense_rows.h"
#include "kernels/step/shadow_attention.h"
#include "kernels/step/step_cost.h"

namespace kvstrata {
namespace {

// New tokens that one append item copies.
constexpr int32_t kAppendTile = 64;
// Partials in flight: 32 MiB of outputs. A prefill chunk over a long history goes in several
// rounds.
constexpr int64_t kPartialFloats = int64_t{8} << 20;

SourceRows SourceFrom(const Rows& rows, int64_t token) {
  return {rows.data + token * rows.token_stride, rows.token_stride, rows.head_stride, rows.dtype};
}

// Grows only: what is there need not be kept, nor cleared.
void Reserve(std::vector<float>* scratch, int64_t n) {
  if (static_cast<int64_t>(scratch->size()) < n) scratch->resize(static_cast<size_t>(n));
}

}  // namespace

Step::Step(std::vector<StepMember> members, const Backend& backend, Executor& executor)
    : StepBatch(std::move(members)), backend_(backend), executor_(executor) {
  for (int i = 0; i < this->members(); ++i) {
    AddChunks(i);
    members_[i].state->CatchUp(members_[i].view, backend_, executor_);
  }
  cost_.resize(members_.size());
}

Step::~Step() = default;

// A prompt is cut at multiples of vote.chunk from the sequence's start; everything else is one
// chunk.
void Step::AddChunks(int member) {
  const StepMember& m = members_[member];
  const Plan& plan = m.state->plan_;
  const bool cut = m.state->prompt_tokens_ < 0 && plan.selector == SelectorKind::kVote;
  for (int32_t begin = 0, end; begin < m.new_tokens; begin = end) {
    const int64_t position = int64_t{m.view.tokens} + begin;
    const int64_t next =
        cut ? (position / plan.vote.chunk + 1) * plan.vote.chunk : position + m.new_tokens;
    end = static_cast<int32_t>(std::min<int64_t>(next - m.view.tokens, m.new_tokens));
    chunks_.push_back({member, begin, end - begin, {}});
  }
  last_chunk_.push_back(static_cast<int>(chunks_.size()) - 1);
}

void Step::Append(int layer, const Rows& k, const Rows& v) {
  std::vector<AppendWork> works;
  works.reserve(members_.size() + static_cast<size_t>(tokens_) / kAppendTile);
  for (size_t i = 0; i < members_.size(); ++i) {
    const StepMember& m = members_[i];
    for (int32_t t = 0; t < m.new_tokens; t += kAppendTile) {
      AppendWork& w = works.emplace_back();
      w.pages = m.view.pages;
      w.layout = PageLayout::Of(geometry());
      w.layer = layer;
      w.position = m.view.tokens + t;
      w.tokens = std::min(kAppendTile, m.new_tokens - t);
      w.k = SourceFrom(k, first_row_[i] + t);
      w.v = SourceFrom(v, first_row_[i] + t);
    }
  }
  backend_.append(works.data(), static_cast<int64_t>(works.size()), executor_);
}

// `count` tokens' queries from `first` on as fp32, copied to q_ unless they are usable in place.
Rows Step::DenseQueries(const Rows& q, int32_t first, int32_t count) {
  const int32_t heads = geometry().query_heads, dim = geometry().head_dim;
  const std::byte* data = q.data + first * q.token_stride;
  if (IsDense(q.dtype, data, q.token_stride, q.head_stride, dim)) {
    return {data, q.token_stride, q.head_stride, DType::kF32};
  }
  const int64_t token = int64_t{heads} * dim;
  Reserve(&q_, count * token);
  ForRows(executor_, count, heads, [&](int64_t t) {
    for (int32_t h = 0; h < heads; ++h) {
      Load(q.dtype, data + t * q.token_stride + h * q.head_stride, dim,
           q_.data() + t * token + int64_t{h} * dim);
    }
  });
  constexpr int64_t kFloat = sizeof(float);
  return {reinterpret_cast<const std::byte*>(q_.data()), token * kFloat, dim * kFloat, DType::kF32};
}

void Step::SelectChunkOf(int layer, const Rows& q, Chunk* chunk) {
  const StepMember& m = members_[chunk->member];
  SequenceState& state = *m.state;
  const int32_t start = m.view.tokens + chunk->begin;
  const bool prompt = state.prompt_tokens_ < 0;
  const Rows dense =
      DenseQueries(q, first_row_[chunk->member] + chunk->begin, prompt ? chunk->count : 1);
  const auto* queries = reinterpret_cast<const float*>(dense.data);
  const int64_t q_token = dense.token_stride / static_cast<int64_t>(sizeof(float));
  const SelectContext context = state.Context(m.view, backend_, executor_);
  if (prompt && layer != selected_layer_) {
    state.selector_->Observe(context, layer, queries, q_token, start, chunk->count);
  }
  if (layer < state.plan_.n_dense_layers) return chunk->selection.SetFull(start + 1);
  if (!prompt) return state.selector_->Select(context, layer, queries, &chunk->selection);
  if (!state.selector_->SelectChunk(context, layer, queries, q_token, start, chunk->count,
                                    &chunk->selection)) {
    chunk->selection.SetFull(start + 1);
  }
}

void Step::Select(int layer, const Rows& q) {
  for (Chunk& chunk : chunks_) SelectChunkOf(layer, q, &chunk);
  selected_layer_ = layer;
}

void Step::Choose(int layer, Selection selection) {
  KVS_CHECK(chunks_.size() == 1);
  chunks_[0].selection = std::move(selection);
  selected_layer_ = layer;
}

// Cuts the selected history [from, history) and the new tokens [history, end) into slices. Rows
// below `from` are not on pages. The number of rows before the new tokens.
int32_t Step::CutRuns(const std::vector<Run>& selected, int32_t from, int32_t history,
                      int32_t end) {
  int32_t room = 0;  // rows that the last slice can still take
  int32_t rows = 0;
  const auto add = [&](Run run) {
    run.begin = std::max(run.begin, from);
    while (run.begin < run.end) {
      if (room == 0) {
        slices_.push_back({runs_.size(), 0, run.begin, run.begin, rows});
        room = kAttendSliceRows;
      }
      const int32_t taken = std::min(room, run.end - run.begin);
      runs_.push_back({run.begin, run.begin + taken});
      ++slices_.back().run_count;
      slices_.back().end = run.begin + taken;
      run.begin += taken;
      room -= taken;
      rows += taken;
    }
  };
  int32_t last = history;  // begin of the run that goes on into the new tokens
  for (const Run& run : selected) {
    if (run.end >= history) {
      last = std::min(run.begin, history);
      break;
    }
    add(run);
  }
  add({last, end});
  return rows - (end - history);
}

// Where the tile's queries and the slice's rows stand for rotary embedding.
void Step::PlaceRows(const Tile& tile, const Slice& slice, AttendWork* work) const {
  const SequenceState& state = *MemberOf(tile).state;
  work->rotary = state.rotary();
  work->query_place = work->position;
  if (!state.plan_.compact) return;
  work->query_place = tile.history + tile.begin - chunks_[tile.chunk].begin;
  work->row_place = slice.rank;
}

// Positions that the tile's last query sees end here.
int32_t Step::VisibleEnd(const Tile& tile) const {
  return MemberOf(tile).view.tokens + tile.begin + tile.queries;
}

int64_t Step::PartialRows(const Tile& tile) const {
  return static_cast<int64_t>(tile.slices + tile.parts) * tile.queries * tile.group;
}

// Rows below this are attended where a codec holds them, others on pages. If a prompt was opened
// without its raw pages, a segment may reach into the new tokens.
int32_t Step::StoredEnd(const Chunk& chunk) const {
  const StepMember& m = members_[chunk.member];
  const int32_t end = m.state->packed() != nullptr  ? m.state->packed()->end()
                      : m.state->spans() != nullptr ? m.state->spans()->end()
                                                    : 0;
  return std::min(end, m.view.tokens);
}

// Slices, stored parts and tiles of one chunk.
void Step::PlanChunk(int index) {
  const Chunk& chunk = chunks_[index];
  const Geometry& g = geometry();
  const StepMember& m = members_[chunk.member];
  const Selection& selection = chunk.selection;
  const int lists = selection.groups();
  const int tiles = lists == g.query_heads ? g.query_heads : g.kv_heads;
  const int32_t group = g.query_heads / tiles;
  const int32_t from = StoredEnd(chunk);
  const int32_t start = m.view.tokens + chunk.begin;
  for (int i = 0; i < tiles; ++i) {
    Tile tile{index, i * group / g.group(), i * group, group, chunk.begin, 0, 0, slices_.size(),
              0,     parts_.size(),         0};
    if (i < lists) {
      tile.history = CutRuns(selection.runs[i], from, start, start + chunk.count);
    } else {
      tile.history = tiles_.back().history;
      tile.first_slice = tiles_.back().first_slice;  // one list for all heads
    }
    PlanStored(&tile);
    for (const int32_t end = chunk.begin + chunk.count; tile.begin < end;
         tile.begin += kAttendQueryTile) {
      tile.queries = std::min(kAttendQueryTile, end - tile.begin);
      const int32_t visible = VisibleEnd(tile);
      const auto first = slices_.begin() + static_cast<std::ptrdiff_t>(tile.first_slice);
      tile.slices = static_cast<size_t>(
          std::partition_point(first, slices_.end(),
                               [visible](const Slice& s) { return s.begin < visible; }) -
          first);
      tiles_.push_back(tile);
    }
  }
}

void Step::CountCosts(int layer) {
  std::vector<ReadChunk> read;
  for (size_t first = 0; first < chunks_.size(); first += read.size()) {
    const int member = chunks_[first].member;
    read.clear();
    for (size_t i = first; i < chunks_.size() && chunks_[i].member == member; ++i) {
      read.push_back({&chunks_[i].selection, members_[member].view.tokens + chunks_[i].begin,
                      chunks_[i].count});
    }
    cost_[member] = kvstrata::CostOf(members_[member], layer, StoredEnd(chunks_[first]), read);
  }
}

// The first query of a tile.
const float* Step::QueriesOf(const Rows& q, const Tile& tile) const {
  const int64_t token = first_row_[chunks_[tile.chunk].member] + tile.begin;
  return reinterpret_cast<const float*>(q.data + token * q.token_stride) +
         int64_t{tile.first_head} * geometry().head_dim;
}

// One work item a slice. Their partials begin at `partial_row`, slice by slice.
void Step::AddWorks(int layer, const Rows& q, const Tile& tile, int64_t partial_row) {
  const Geometry& g = geometry();
  const StepMember& m = MemberOf(tile);
  const PageLayout layout = PageLayout::Of(g);
  AttendWork w;
  w.k = KeysOf(m.view.pages, layout, layer, tile.kv_head);
  w.v = ValuesOf(m.view.pages, layout, layer, tile.kv_head);
  w.q = QueriesOf(q, tile);
  w.q_token = q.token_stride / static_cast<int64_t>(sizeof(float));
  w.queries = tile.queries;
  w.group = tile.group;
  w.position = m.view.tokens + tile.begin;
  w.scale = g.logit_scale();
  const int32_t end = VisibleEnd(tile);
  for (size_t i = 0; i < tile.slices; ++i, partial_row += int64_t{tile.queries} * tile.group) {
    const Slice& slice = slices_[tile.first_slice + i];
    PlaceRows(tile, slice, &w);
    size_t first_run = slice.first_run;
    w.run_count = static_cast<int32_t>(slice.run_count);
    if (slice.end > end) {  // rows behind the last query would be read for nothing
      first_run = runs_.size();
      for (size_t r = 0; r < slice.run_count && runs_[slice.first_run + r].begin < end; ++r) {
        const Run run = runs_[slice.first_run + r];
        runs_.push_back({run.begin, std::min(run.end, end)});
      }
      w.run_count = static_cast<int32_t>(runs_.size() - first_run);
    }
    w.m = partial_m_.data() + partial_row;
    w.l = partial_l_.data() + partial_row;
    w.o = partial_o_.data() + partial_row * g.head_dim;
    attend_.push_back(w);
    attend_run_.push_back(first_run);
  }
  for (size_t i = 0; i < tile.parts; ++i, partial_row += int64_t{tile.queries} * tile.group) {
    AddStored(layer, q, tile, parts_[tile.first_part + i], partial_row);
  }
}

void Step::AddMerge(const Tile& tile, int64_t partial_row, const MutableRows& out, float* lse) {
  const Geometry& g = geometry();
  const int64_t token = first_row_[chunks_[tile.chunk].member] + tile.begin;
  MergeWork w;
  w.m = partial_m_.data() + partial_row;
  w.l = partial_l_.data() + partial_row;
  w.o = partial_o_.data() + partial_row * g.head_dim;
  w.parts = static_cast<int32_t>(tile.slices + tile.parts);
  w.rows = tile.queries * tile.group;
  w.group = tile.group;
  w.dim = g.head_dim;
  w.out = reinterpret_cast<float*>(out.data + token * out.token_stride) +
          int64_t{tile.first_head} * g.head_dim;
  w.out_token = out.token_stride / static_cast<int64_t>(sizeof(float));
  w.lse = lse == nullptr ? nullptr : lse + token * g.query_heads + tile.first_head;
  w.lse_token = g.query_heads;
  merge_.push_back(w);
}

void Step::RunWorks() {
  const auto run = [this](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor_);
  };
  run(rotate_, backend_.rotate);
  run(attend_, backend_.attend_raw);
  run(packed_, backend_.attend_packed);
  run(lowrank_, backend_.attend_lowrank);
  run(coarse_, backend_.attend_coarse);
  run(merge_, backend_.merge);
}

void Step::RunTiles(int layer, const Rows& q, const MutableRows& out, float* lse,
                    std::span<const Tile> tiles) {
  int64_t rows = 0;
  for (const Tile& tile : tiles) rows += PartialRows(tile);
  Reserve(&partial_m_, rows);
  Reserve(&partial_l_, rows);
  Reserve(&partial_o_, rows * geometry().head_dim);
  ClearWorks();
  const size_t runs = runs_.size();
  int64_t row = 0;
  for (const Tile& tile : tiles) {
    AddWorks(layer, q, tile, row);
    AddMerge(tile, row, out, lse);
    row += PartialRows(tile);
  }
  ResolveWorks();
  RunWorks();
  runs_.resize(runs);
}

void Step::StoreOutput(const MutableRows& out) {
  const int32_t heads = geometry().query_heads, dim = geometry().head_dim;
  ForRows(executor_, tokens_, heads, [&](int64_t t) {
    for (int32_t h = 0; h < heads; ++h) {
      Store(out.dtype, out_.data() + (t * heads + h) * dim, dim,
            out.data + t * out.token_stride + h * out.head_stride);
    }
  });
}

void Step::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  const Geometry& g = geometry();
  if (selected_layer_ != layer) Select(layer, q);
  const Rows dense_q = DenseQueries(q, 0, tokens_);
  const bool in_place = IsDense(out.dtype, out.data, out.token_stride, out.head_stride, g.head_dim);
  MutableRows dense_out = out;
  if (!in_place) {
    const int64_t token = int64_t{g.query_heads} * g.head_dim;
    Reserve(&out_, tokens_ * token);
    dense_out = {reinterpret_cast<std::byte*>(out_.data()),
                 token * static_cast<int64_t>(sizeof(float)), 0, DType::kF32};
  }

  runs_.clear();
  slices_.clear();
  parts_.clear();
  tiles_.clear();
  for (int i = 0; i < static_cast<int>(chunks_.size()); ++i) PlanChunk(i);
  CountCosts(layer);
  for (size_t first = 0, last; first < tiles_.size(); first = last) {
    int64_t floats = 0;
    for (last = first; last < tiles_.size(); ++last) {
      floats += PartialRows(tiles_[last]) * g.head_dim;
      if (floats > kPartialFloats && last > first) break;
    }
    RunTiles(layer, dense_q, dense_out, lse, std::span(tiles_).subspan(first, last - first));
  }
  if (!shadows_.empty()) MeasureShadows(layer, dense_q, dense_out);
  if (!in_place) StoreOutput(out);
}

void Step::Shadow(int member) {
  KVS_CHECK(Decodes(member));
  shadows_.resize(members_.size());
  shadows_[member] = std::make_unique<ShadowAttention>(members_[member], backend_, executor_);
}

const ShadowAttention* Step::shadow(int member) const {
  return shadows_.empty() ? nullptr : shadows_[member].get();
}

void Step::MeasureShadows(int layer, const Rows& q, const MutableRows& out) {
  for (int i = 0; i < members(); ++i) {
    if (shadows_[i] == nullptr) continue;
    std::vector<std::vector<Run>> attended;
    for (int group = 0; group < Groups(i); ++group) attended.push_back(Positions(i, group));
    const int64_t row = first_row_[i];
    shadows_[i]->Measure(layer, reinterpret_cast<const float*>(q.data + row * q.token_stride),
                         reinterpret_cast<const float*>(out.data + row * out.token_stride),
                         attended);
  }
}

void Step::End() {
  for (const StepMember& m : members_) {
    if (!m.kept) continue;
    m.state->selector_->Advance(m.new_tokens);
    m.state->tokens_ += m.new_tokens;
  }
}

}  // namespace kvstrata
