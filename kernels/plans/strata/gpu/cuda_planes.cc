// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/gpu/cuda_planes.h"

#include <algorithm>
#include <bit>
#include <string>

#include "kernels/plans/strata/fine.h"
#include "kernels/plans/strata/gpu/mid_cell_run.h"
#include "kernels/select/selection_rule.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/frame/cuda_serves.h"
#include "kernels/step/gpu/memory/cuda_hot_rows.h"

namespace kvstrata {
namespace {

constexpr int32_t kUnit = 64;            // tokens of a group that op attend_planes takes
constexpr uint64_t kRunAlign = 32;       // bytes, of addresses that it takes
constexpr int32_t kGroupsMultiple = 64;  // in growing

PlanesFormat FormatOf(const Plan& plan, const Geometry& g) {
  return {g.head_dim, plan.planes.unit, plan.planes.keep};
}

uint64_t AddressOf(const std::byte* at) { return reinterpret_cast<uint64_t>(at); }

bool IsRestDue(const PlanesStorage* stored) { return stored != nullptr && stored->rest_due(); }

bool HasHotRows(const Plan& plan) {
  return plan.planes.lower == Tier::kHost && plan.planes.hot > 0;
}

Status CheckPlanesExtent(const PlanesExtent& e, const PlanesFormat& format) {
  if (e.format != format)
    return DamagedExtent(e.tokens, "has groups of another form than the plan's");
  if (!std::has_single_bit(static_cast<uint32_t>(e.groups))) {
    return DamagedExtent(e.tokens,
                         "has " + std::to_string(e.groups) + " groups, which is no power of two");
  }
  if ((AddressOf(e.upper) | AddressOf(e.lower)) % kRunAlign != 0) {
    return DamagedExtent(e.tokens, "does not lie at a multiple of 32 bytes");
  }
  return OkStatus();
}

Status PlanesServes(const Plan& plan) {
  if (plan.planes.unit == kUnit) return OkStatus();
  return PlanUnserved("unit", std::to_string(plan.planes.unit),
                      "op attend_planes over groups of other sizes than 64 tokens");
}

}  // namespace

CudaPlanes::CudaPlanes(const CudaCodecSource& from)
    : CudaCodec(true),
      hot_cache_budget_(from.hot_cache_budget),
      end_(from.memory->AddColumn()),
      none_(from.memory->AddColumn()),
      groups_(from.memory->AddColumn()),
      tokens_(from.memory->AddColumn()) {
  for (WordTable* const table : {&upper_, &lower_, &hot_}) from.memory->Add(table);
}

int32_t CudaPlanes::EndOf(const SequenceState& state) const {
  return state.stored() == nullptr ? 0 : state.stored()->end();
}

const PlanesStorage* CudaPlanes::StoredOf(const CudaFrame& frame, int member) const {
  if (!Has(frame, member)) return nullptr;
  return static_cast<const PlanesStorage*>(frame.state(member).stored());
}

bool CudaPlanes::Knows(int member, const PlanesStorage& stored) const {
  const auto i = static_cast<size_t>(member);
  return i < ids_.size() && ids_[i] == stored.id();
}

Status CudaPlanes::Check(const CudaFrame& frame) const {
  for (int i = 0; i < frame.members(); ++i) {
    const PlanesStorage* const stored = StoredOf(frame, i);
    if (stored == nullptr || Knows(i, *stored)) continue;
    for (const PlanesExtent& e : stored->extents()) {
      KVS_RETURN_IF_ERROR(CheckPlanesExtent(e, FormatOf(frame.plan(i), frame.geometry())));
    }
  }
  return OkStatus();
}

Status CudaPlanes::Fit(const CudaFrame& frame) {
  Room room = room_;
  for (int i = 0; i < frame.members(); ++i) {
    if (!Has(frame, i)) continue;
    if (const PlanesStorage* const stored = StoredOf(frame, i); IsRestDue(stored)) {
      KVS_RETURN_IF_ERROR(FitMidCells(frame, FormatOf(frame.plan(i), frame.geometry())));
    }
    const int32_t groups = frame.RoomFor(i) / kUnit + 1;
    Raise(&room.groups, groups, Generous(groups, kGroupsMultiple));
    room.members = std::max(room.members, frame.memory().members());
    room.by_share = room.by_share || frame.plan(i).fine.share > 0;
  }
  if (room == room_) return OkStatus();
  room_ = {};  // until all of it is there
  ids_.clear();
  KVS_RETURN_IF_ERROR(FitTo(room, frame));
  room_ = room;
  ids_.assign(static_cast<size_t>(room.members), 0);
  return OkStatus();
}

Status CudaPlanes::FitTo(const Room& room, const CudaFrame& frame) {
  const Geometry& g = frame.geometry();
  StepMemory& memory = frame.memory();
  memory.NoteGrowth();
  KVS_RETURN_IF_ERROR(memory.Fit(&upper_, room.members, room.groups));
  KVS_RETURN_IF_ERROR(memory.Fit(&lower_, room.members, room.groups));
  KVS_RETURN_IF_ERROR(
      memory.Fit(&hot_, room.members, sizeof(cuda::HotSequence) / sizeof(uint64_t)));
  const int64_t rows = int64_t{room.members} * g.query_heads;
  KVS_RETURN_IF_ERROR(memory.Fit(&partial_, rows * (g.head_dim + 2) * int64_t{sizeof(float)}));
  KVS_RETURN_IF_ERROR(memory.Fit(
      &fetched_, int64_t{2} * g.layers * room.members * g.kv_heads * int64_t{sizeof(uint64_t)}));
  cuda::AttendPlanesBatch attend;
  attend.planes.format = {g.head_dim, kUnit};
  attend.planes.block_stride = upper_.stride();
  attend.planes.block_groups = 1;
  attend.planes.kv_heads = g.kv_heads;
  attend.group = g.group();
  attend.batch = room.members;
  if (!room.by_share) attend.rule = kAllFine;
  return memory.Fit(&workspace_, frame.ops().attend_planes_workspace_bytes(attend));
}

Status CudaPlanes::FitMidCells(const CudaFrame& frame, const PlanesFormat& format) {
  DeviceBuffer& mid_cells = MidCellsOf(format);
  if (mid_cells.bytes() != 0) return OkStatus();
  const std::vector<std::byte> run = MidCellRun(format);
  std::vector<std::byte> all;
  for (int32_t i = 0; i < frame.geometry().layers * frame.geometry().kv_heads; ++i) {
    all.insert(all.end(), run.begin(), run.end());
  }
  KVS_RETURN_IF_ERROR(frame.memory().Fit(&mid_cells, static_cast<int64_t>(all.size())));
  const cuda::CudaOps& ops = frame.ops();
  int error = ops.copy_async(mid_cells.as<void>(), all.data(), all.size(), frame.stream());
  if (error == 0) error = ops.synchronize(frame.stream());
  if (error != 0) KVS_RETURN_IF_ERROR(mid_cells.Free());
  return frame.Check(error, "copying runs that stand for others");
}

Status CudaPlanes::Stage(CudaFrame* frame) {
  StepMemory& memory = frame->memory();
  bool any = false;
  for (int i = 0; i < frame->members(); ++i) {
    if (!Has(*frame, i)) continue;
    any = true;
    const PlanesStorage* const stored = StoredOf(*frame, i);
    const int32_t n = frame->member(i).view.tokens + 1;
    memory.At(none_, i) = 0;
    memory.At(end_, i) = stored == nullptr ? 0 : stored->end();
    memory.At(groups_, i) = memory.At(end_, i) / kUnit;
    memory.At(tokens_, i) = AttendsInFull(frame->plan(i), n) ? 0 : n;
    if (stored != nullptr && !Knows(i, *stored)) {
      KVS_RETURN_IF_ERROR(StageMember(frame, i, *stored));
    }
    if (HasHotRows(frame->plan(i))) KVS_RETURN_IF_ERROR(StageHotRows(frame, i));
  }
  if (!any) return OkStatus();
  return frame->Check(
      frame->ops().zero_async(fetched_.as<void>(), fetched_.bytes(), frame->stream()),
      "zeroing counters");
}

// Runs of an extent are [layers][kv_heads][groups]: its entries say how many groups it has. All
// groups have the same run in place of those that are on their way.
Status CudaPlanes::StageMember(CudaFrame* frame, int member, const PlanesStorage& stored) {
  uint64_t& known = ids_[static_cast<size_t>(member)];
  known = 0;  // until all of it is on its way
  std::vector<uint64_t> upper, lower;
  for (const PlanesExtent& e : stored.extents()) {
    const auto shift = static_cast<uint64_t>(std::countr_zero(static_cast<uint32_t>(e.groups)));
    for (int32_t g = 0; g < e.groups; ++g) {
      upper.push_back(AddressOf(e.Upper(0, g)) + shift);
      lower.push_back(stored.rest_due() ? AddressOf(MidCellsOf(e.format).as<std::byte>())
                                        : AddressOf(e.Lower(0, g)) + shift);
    }
  }
  const auto write = [&](WordTable* table, const std::vector<uint64_t>& words) {
    return frame->memory().Write(table, member, std::as_bytes(std::span(words)), frame->stream());
  };
  KVS_RETURN_IF_ERROR(write(&upper_, upper));
  KVS_RETURN_IF_ERROR(write(&lower_, lower));
  known = stored.id();
  return OkStatus();
}

// One that is outgrown is given up for a new one. Of runs that stand for others nothing is copied.
Status CudaPlanes::StageHotRows(CudaFrame* frame, int member) {
  const auto write = [&](const cuda::HotSequence& table) {
    return frame->memory().Write(&hot_, member, std::as_bytes(std::span(&table, 1)),
                                 frame->stream());
  };
  if (IsRestDue(StoredOf(*frame, member))) return write({});
  const Geometry& g = frame->geometry();
  const Plan& plan = frame->plan(member);
  std::shared_ptr<CudaHotRows>& hot = frame->state(member).on_gpu.hot_rows;
  const int32_t groups = EndOf(frame->state(member)) / kUnit;
  if (hot == nullptr || groups > hot->groups()) {
    hot.reset();  // releases what the next one takes
    KVS_ASSIGN_OR_RETURN(
        hot, CudaHotRows::Create(
                 frame->ops(),
                 {int64_t{g.layers} * g.kv_heads, plan.planes.hot, FormatOf(plan, g).row_bytes()},
                 Generous(groups, kGroupsMultiple), hot_cache_budget_));
  }
  return write(hot->table());
}

bool CudaPlanes::InFull(const CudaFrame& frame, const CudaPart& part, int layer) {
  return !frame.Selects(part, layer) || part.new_tokens > 1;
}

cuda::DevicePlanes CudaPlanes::PlanesOf(const CudaFrame& frame, const CudaPart& part,
                                        int layer) const {
  const Geometry& g = frame.geometry();
  cuda::DevicePlanes planes;
  planes.format = FormatOf(part.plan, g);
  const auto runs = [&](const WordTable& table, int64_t bytes) {
    return cuda::DeviceRuns{table.Row<uint64_t>(part.first), int64_t{layer} * g.kv_heads * bytes,
                            bytes};
  };
  planes.upper = runs(upper_, planes.format.upper_bytes());
  planes.lower = runs(lower_, planes.format.lower_bytes());
  planes.block_stride = upper_.stride();
  planes.block_groups = 1;
  planes.kv_heads = g.kv_heads;
  return planes;
}

uint64_t* CudaPlanes::FetchedOf(const CudaFrame& frame, int member, int layer) const {
  return fetched_.as<uint64_t>() +
         (int64_t{layer} * room_.members + member) * frame.geometry().kv_heads;
}

uint64_t* CudaPlanes::HotOf(const CudaFrame& frame, int member, int layer) const {
  return FetchedOf(frame, member, frame.geometry().layers + layer);
}

Status CudaPlanes::Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                          const MutableRows& out, float* lse) {
  for (int32_t t = 0; t < part.new_tokens; ++t) {
    KVS_RETURN_IF_ERROR(AttendItems(frame, part, layer, frame->FirstRow(part) + t, q, out, lse));
  }
  return OkStatus();
}

Status CudaPlanes::AttendItems(CudaFrame* frame, const CudaPart& part, int layer, int32_t row,
                               const Rows& q, const MutableRows& out, float* lse) {
  const Geometry& g = frame->geometry();
  const int64_t rows = int64_t{room_.members} * g.query_heads;
  auto* const partial = partial_.as<float>();
  const cuda::Partials of_pages = {partial + rows * g.head_dim, partial + rows * (g.head_dim + 1),
                                   partial, 1};
  cuda::AttendRawBatch raw = frame->AttendRawOf(part, layer, row, q);
  raw.selection.sink_end = frame->memory().On(none_, part.first);
  raw.selection.recent_begin = frame->memory().On(end_, part.first);
  raw.batch = part.count;
  raw.partial = of_pages;
  raw.ahead = part.new_tokens == 1;
  KVS_RETURN_IF_ERROR(frame->Check(frame->ops().attend_raw(raw, frame->stream()), "op attend_raw"));

  cuda::AttendPlanesBatch w;
  w.planes = PlanesOf(*frame, part, layer);
  w.rule = PlanesRuleOf(part.plan);
  const bool in_full = InFull(*frame, part, layer);
  if (in_full) w.rule = kAllFine;
  w.batch = part.count;
  w.group = g.group();
  w.tokens = frame->memory().On(tokens_, part.first);
  w.groups = frame->memory().On(groups_, part.first);
  w.q = q.data + row * q.token_stride;
  w.q_dtype = q.dtype;
  w.q_stride = q.token_stride / SizeOf(q.dtype);
  w.scale = raw.scale;
  w.ahead = true;
  w.with = of_pages;
  w.to = frame->OutputFrom(row, out, lse);
  if (!part.measures) w.report.fetched = FetchedOf(*frame, part.first, layer);
  if (HasHotRows(part.plan) && !in_full) {
    w.hot = {hot_.Row<cuda::HotSequence>(part.first), part.plan.planes.hot, layer * g.kv_heads};
    if (!part.measures) w.report.hot = HotOf(*frame, part.first, layer);
  }
  w.counters = frame->counters();
  w.workspace = workspace_.as<void>();
  return frame->Check(frame->ops().attend_planes(w, frame->stream()), "op attend_planes");
}

Status CudaPlanes::AddReads(const CudaFrame& frame, const CudaPart& part, int member, int layer,
                            StepCost* cost) const {
  std::vector<uint64_t> fetched(static_cast<size_t>(frame.geometry().kv_heads)), hot(fetched);
  const auto read = [&](std::vector<uint64_t>& to, const uint64_t* from, uint64_t* sum) {
    KVS_RETURN_IF_ERROR(frame.CopyToHost(to.data(), from, to.size() * sizeof(uint64_t)));
    for (const uint64_t bytes : to) *sum += bytes;
    return OkStatus();
  };
  KVS_RETURN_IF_ERROR(read(fetched, FetchedOf(frame, member, layer), &cost->attend_bytes));
  KVS_RETURN_IF_ERROR(read(hot, HotOf(frame, member, layer), &cost->hot_bytes));
  const bool in_full = !IsRestDue(StoredOf(frame, member)) &&
                       (InFull(frame, part, layer) ||
                        AttendsInFull(part.plan, frame.member(member).view.tokens + 1));
  const auto sealed = static_cast<uint64_t>(EndOf(frame.state(member)));
  (in_full ? cost->rows : cost->coarse_rows) += sealed * fetched.size();
  return OkStatus();
}

constinit const CudaCodecRow kCudaPlanes = {
    PlanesServes, [](const CudaCodecSource& from) -> std::unique_ptr<CudaCodec> {
      return std::make_unique<CudaPlanes>(from);
    }};

}  // namespace kvstrata
