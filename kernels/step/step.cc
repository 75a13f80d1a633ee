#include "kernels/step/step.h"

#include <algorithm>
#include <cmath>

namespace kvstrata {
namespace {

// New tokens that one append item copies.
constexpr int32_t kAppendTile = 64;
// Rows [tokens x heads] from which on converting is worth a ParallelFor.
constexpr int64_t kParallelRows = 512;
// Partials in flight: 32 MiB of outputs. A prefill chunk over a long history goes in several
// rounds.
constexpr int64_t kPartialFloats = int64_t{8} << 20;

template <typename T>
void LoadRow(const std::byte* from, int32_t n, float* to) {
  const T* row = reinterpret_cast<const T*>(from);
  for (int32_t i = 0; i < n; ++i) to[i] = ToFloat(row[i]);
}

template <typename T>
void StoreRow(const float* from, int32_t n, std::byte* to) {
  T* row = reinterpret_cast<T*>(to);
  for (int32_t i = 0; i < n; ++i) row[i] = FromFloat<T>(from[i]);
}

void Load(DType dtype, const std::byte* from, int32_t n, float* to) {
  switch (dtype) {
    case DType::kF32:
      return LoadRow<float>(from, n, to);
    case DType::kF16:
      return LoadRow<F16>(from, n, to);
    case DType::kBF16:
      return LoadRow<BF16>(from, n, to);
  }
}

void Store(DType dtype, const float* from, int32_t n, std::byte* to) {
  switch (dtype) {
    case DType::kF32:
      return StoreRow<float>(from, n, to);
    case DType::kF16:
      return StoreRow<F16>(from, n, to);
    case DType::kBF16:
      return StoreRow<BF16>(from, n, to);
  }
}

// Whether the ops can use the rows where they are: fp32 with the heads of a token side by side.
bool IsDense(DType dtype, const std::byte* data, int64_t token_stride, int64_t head_stride,
             int32_t dim) {
  constexpr int64_t kFloat = sizeof(float);
  return dtype == DType::kF32 && head_stride == dim * kFloat && token_stride % kFloat == 0 &&
         reinterpret_cast<uintptr_t>(data) % alignof(float) == 0;
}

template <typename Fn>
void ForRows(Executor& executor, int64_t tokens, int32_t heads, const Fn& fn) {
  if (tokens * heads >= kParallelRows) {
    executor.ParallelFor(tokens, [&fn](int64_t t) { fn(t); });
  } else {
    for (int64_t t = 0; t < tokens; ++t) fn(t);
  }
}

SourceRows SourceFrom(const Rows& rows, int64_t token) {
  return {rows.data + token * rows.token_stride, rows.token_stride, rows.head_stride, rows.dtype};
}

// Grows only: what is there need not be kept, nor cleared.
void Reserve(std::vector<float>* scratch, int64_t n) {
  if (static_cast<int64_t>(scratch->size()) < n) scratch->resize(static_cast<size_t>(n));
}

}  // namespace

Step::Step(std::vector<StepMember> members, const Backend& backend, Executor& executor)
    : members_(std::move(members)), backend_(backend), executor_(executor) {
  KVS_CHECK(!members_.empty());
  selections_.resize(members_.size());
  for (const StepMember& m : members_) {
    KVS_CHECK(m.new_tokens >= 1 && m.state->geometry() == geometry());
    first_row_.push_back(tokens_);
    tokens_ += m.new_tokens;
    m.state->CatchUp(m.view, backend_, executor_);
  }
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

void Step::Select(int layer, const Rows& q) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const StepMember& m = members_[i];
    const SequenceState& state = *m.state;
    if (state.prompt_tokens_ < 0 || layer < state.plan_.n_dense_layers) {
      selections_[i].SetFull(m.view.tokens + 1);
      continue;
    }
    const Rows first = DenseQueries(q, first_row_[i], 1);
    state.selector_->Select(state.Context(m.view, backend_, executor_), layer,
                            reinterpret_cast<const float*>(first.data), &selections_[i]);
  }
  selected_layer_ = layer;
}

// Cuts the selected history below `history` and the new tokens [history, end) into slices.
void Step::CutRuns(const std::vector<Run>& selected, int32_t history, int32_t end) {
  int32_t room = 0;  // rows that the last slice can still take
  const auto add = [&](Run run) {
    while (run.begin < run.end) {
      if (room == 0) {
        slices_.push_back({runs_.size(), 0, run.begin, run.begin});
        room = kAttendSliceRows;
      }
      const int32_t taken = std::min(room, run.end - run.begin);
      runs_.push_back({run.begin, run.begin + taken});
      ++slices_.back().run_count;
      slices_.back().end = run.begin + taken;
      run.begin += taken;
      room -= taken;
    }
  };
  for (const Run& run : selected) {
    if (run.end >= history) return add({std::min(run.begin, history), end});
    add(run);
  }
  add({history, end});
}

// Positions that the tile's last query sees end here.
int32_t Step::VisibleEnd(const Tile& tile) const {
  return members_[tile.member].view.tokens + tile.begin + tile.queries;
}

int64_t Step::PartialRows(const Tile& tile) const {
  return static_cast<int64_t>(tile.slices) * tile.queries * geometry().group();
}

// Slices and tiles of one member.
void Step::PlanMember(int member) {
  const StepMember& m = members_[member];
  const Selection& selection = selections_[member];
  for (int head = 0; head < geometry().kv_heads; ++head) {
    Tile tile{member, head, 0, 0, slices_.size(), 0};
    if (head < selection.groups()) {
      CutRuns(selection.runs[head], m.view.tokens, m.view.tokens + m.new_tokens);
    } else {
      tile.first_slice = tiles_.back().first_slice;  // one list for all heads
    }
    for (; tile.begin < m.new_tokens; tile.begin += kAttendQueryTile) {
      tile.queries = std::min(kAttendQueryTile, m.new_tokens - tile.begin);
      const int32_t end = VisibleEnd(tile);
      const auto first = slices_.begin() + static_cast<std::ptrdiff_t>(tile.first_slice);
      tile.slices = static_cast<size_t>(
          std::partition_point(first, slices_.end(),
                               [end](const Slice& s) { return s.begin < end; }) -
          first);
      tiles_.push_back(tile);
    }
  }
}

// One work item a slice. Their partials begin at `partial_row`, slice by slice.
void Step::AddWorks(int layer, const Rows& q, const Tile& tile, int64_t partial_row) {
  const Geometry& g = geometry();
  const StepMember& m = members_[tile.member];
  const PageLayout layout = PageLayout::Of(g);
  AttendWork w;
  w.k = KeysOf(m.view.pages, layout, layer, tile.head);
  w.v = ValuesOf(m.view.pages, layout, layer, tile.head);
  w.q = reinterpret_cast<const float*>(q.data +
                                       (first_row_[tile.member] + tile.begin) * q.token_stride) +
        int64_t{tile.head} * g.group() * g.head_dim;
  w.q_token = q.token_stride / static_cast<int64_t>(sizeof(float));
  w.queries = tile.queries;
  w.group = g.group();
  w.position = m.view.tokens + tile.begin;
  w.scale = 1.0f / std::sqrt(static_cast<float>(g.head_dim));
  const int32_t end = VisibleEnd(tile);
  for (size_t i = 0; i < tile.slices; ++i, partial_row += tile.queries * g.group()) {
    const Slice& slice = slices_[tile.first_slice + i];
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
    first_run_.push_back(first_run);  // runs_ may move until all items are made
  }
}

void Step::RunTiles(int layer, const Rows& q, const MutableRows& out, float* lse,
                    std::span<const Tile> tiles) {
  const Geometry& g = geometry();
  int64_t rows = 0;
  for (const Tile& tile : tiles) rows += PartialRows(tile);
  Reserve(&partial_m_, rows);
  Reserve(&partial_l_, rows);
  Reserve(&partial_o_, rows * g.head_dim);
  attend_.clear();
  first_run_.clear();
  merge_.clear();
  const size_t runs = runs_.size();
  int64_t row = 0;
  for (const Tile& tile : tiles) {
    AddWorks(layer, q, tile, row);
    const int64_t token = first_row_[tile.member] + tile.begin;
    const int64_t head = int64_t{tile.head} * g.group();
    MergeWork w;
    w.m = partial_m_.data() + row;
    w.l = partial_l_.data() + row;
    w.o = partial_o_.data() + row * g.head_dim;
    w.parts = static_cast<int32_t>(tile.slices);
    w.rows = tile.queries * g.group();
    w.group = g.group();
    w.dim = g.head_dim;
    w.out = reinterpret_cast<float*>(out.data + token * out.token_stride) + head * g.head_dim;
    w.out_token = out.token_stride / static_cast<int64_t>(sizeof(float));
    w.lse = lse == nullptr ? nullptr : lse + token * g.query_heads + head;
    w.lse_token = g.query_heads;
    merge_.push_back(w);
    row += PartialRows(tile);
  }
  for (size_t i = 0; i < attend_.size(); ++i) attend_[i].runs = runs_.data() + first_run_[i];
  backend_.attend_raw(attend_.data(), static_cast<int64_t>(attend_.size()), executor_);
  backend_.merge(merge_.data(), static_cast<int64_t>(merge_.size()), executor_);
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
  tiles_.clear();
  for (int i = 0; i < members(); ++i) PlanMember(i);
  for (size_t first = 0, last; first < tiles_.size(); first = last) {
    int64_t floats = 0;
    for (last = first; last < tiles_.size(); ++last) {
      floats += PartialRows(tiles_[last]) * g.head_dim;
      if (floats > kPartialFloats && last > first) break;
    }
    RunTiles(layer, dense_q, dense_out, lse, std::span(tiles_).subspan(first, last - first));
  }
  if (!in_place) StoreOutput(out);
}

void Step::End() {
  for (const StepMember& m : members_) m.state->tokens_ += m.new_tokens;
}

}  // namespace kvstrata
