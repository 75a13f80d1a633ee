// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/gpu/cuda_packed.h"

#include <algorithm>
#include <string>

#include "kernels/plans/mosaickv/gpu/packed_room.h"
#include "kernels/plans/mosaickv/packed.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/frame/cuda_serves.h"

namespace kvstrata {
namespace {

using cuda::PackedSegment;

constexpr auto kSegmentWords = static_cast<int32_t>(sizeof(PackedSegment) / sizeof(uint64_t));

int32_t KeepOf(const Plan& plan, const Geometry& g) {
  return plan.packed.keep == 0 ? g.head_dim / 4 : plan.packed.keep;
}

int32_t StoredChannels(const Plan& plan, const Geometry& g) {
  return plan.packed.truncate ? g.head_dim - g.head_dim / 4 : g.head_dim;
}

// As the plan says, or a milder one that max_loss has asked for (loss_limit.h).
bool IsOfPlan(const PackedHead& h, const Plan& plan, const Geometry& g) {
  const int32_t asked = KeepOf(plan, g);
  const bool milder = plan.stored.max_loss < 1 && h.keys.keep > asked && h.keys.neighbours == 1;
  if (!milder && (h.keys.keep != asked || h.keys.neighbours != plan.packed.neighbours))
    return false;
  const PackedRows wanted =
      PackedFormat(g.head_dim, h.keys.keep, h.keys.neighbours, plan.packed.truncate);
  return h.keys.bits == wanted.bits && h.block == plan.packed.block;
}

template <typename T>
uint64_t AddressIn(const T* at) {
  return reinterpret_cast<uint64_t>(at);
}

// The segments of one layer, [segments][kv_heads].
std::vector<PackedSegment> SegmentsOf(const PackedStorage& packed, const Geometry& g, int layer) {
  std::vector<PackedSegment> table;
  std::vector<int32_t> blocks(static_cast<size_t>(g.kv_heads), 0);
  for (size_t s = 0; s < packed.segments().size(); ++s) {
    const Run tokens = packed.segments()[s].tokens;
    for (int h = 0; h < g.kv_heads; ++h) {
      const PackedHead& head = packed.head(static_cast<int>(s), layer, h);
      const int32_t rows = tokens.end - tokens.begin;
      table.push_back({AddressIn(head.r_k), AddressIn(head.r_v), AddressIn(head.keys.data),
                       AddressIn(head.values.data), AddressIn(head.blocks.data), rows,
                       blocks[static_cast<size_t>(h)], head.keys.keep, head.keys.neighbours,
                       head.block, 0});
      blocks[static_cast<size_t>(h)] += (rows + head.block - 1) / head.block;
    }
  }
  return table;
}

int32_t SegmentsFor(const PackedStorage* packed) {
  if (packed == nullptr) return SegmentRoom::For(0, 0);
  const auto final = std::ranges::count_if(packed->segments(), &PackedStorage::Segment::final);
  return SegmentRoom::For(static_cast<int32_t>(final),
                          static_cast<int32_t>(packed->segments().size()));
}

Status CheckHeads(const PackedStorage& packed, const Plan& plan, const Geometry& g) {
  const int32_t heads = g.layers * g.kv_heads;  // heads of a segment
  for (int segment = 0; segment < static_cast<int>(packed.segments().size()); ++segment) {
    const PackedHead& first = packed.head(segment, 0, 0);
    for (int32_t head = 0; head < heads; ++head) {
      const PackedHead& h = packed.head(segment, head / g.kv_heads, head % g.kv_heads);
      if (IsOfPlan(h, plan, g) && h.keys.keep == first.keys.keep) continue;
      const Run tokens = packed.segments()[static_cast<size_t>(segment)].tokens;
      return {Code::kDataLoss, "EXTENT_INVALID",
              "extent of tokens " + std::to_string(tokens.begin) + " to " +
                  std::to_string(tokens.end) + ": head " + std::to_string(head) +
                  " is not packed as the plan says"};
    }
  }
  return OkStatus();
}

Status PackedServes(const Plan& plan) {
  // Blocks of a layer's heads differ then.
  return plan.packed.search ? PlanUnserved("strategy", "\"search\"",
                                           "op attend_packed over heads with blocks of their own")
                            : OkStatus();
}

}  // namespace

CudaPacked::CudaPacked(StepMemory* memory)
    : CudaCodec(true),
      end_(memory->AddColumn()),
      none_(memory->AddColumn()),
      segments_(memory->AddColumn()) {
  memory->Add(&table_);
}

int32_t CudaPacked::EndOf(const SequenceState& state) const {
  const PackedStorage* const packed = PackedOf(state.stored());
  return packed == nullptr ? 0 : packed->end();
}

bool CudaPacked::Knows(const CudaFrame& frame, int member) const {
  const auto i = static_cast<size_t>(member);
  return i < ids_.size() && ids_[i] == PackedOf(frame.state(member).stored())->id();
}

Status CudaPacked::Check(const CudaFrame& frame) const {
  for (int i = 0; i < frame.members(); ++i) {
    const PackedStorage* const packed = PackedOf(frame.state(i).stored());
    if (packed == nullptr || Knows(frame, i)) continue;
    if (const size_t count = packed->segments().size(); count > SegmentRoom::kMost) {
      return Unimplemented("CUDA_PLAN", std::to_string(count) +
                                            " packed extents of a sequence are not served on a "
                                            "GPU; at most " +
                                            std::to_string(SegmentRoom::kMost) +
                                            " are; use shorter sequences, or backend simd");
    }
    KVS_RETURN_IF_ERROR(CheckHeads(*packed, frame.plan(i), frame.geometry()));
  }
  return OkStatus();
}

Status CudaPacked::Fit(const CudaFrame& frame) {
  Room room = room_;
  for (int i = 0; i < frame.members(); ++i) {
    if (!Has(frame, i)) continue;
    const PackedStorage* const packed = PackedOf(frame.state(i).stored());
    room.segments = SegmentRoom::Grown(room.segments, SegmentsFor(packed));
    room.keep = std::max({room.keep, KeepOf(frame.plan(i), frame.geometry()),
                          packed == nullptr ? 0 : packed->keep_max()});
    room.members = std::max(room.members, frame.memory().members());
  }
  if (room == room_) return OkStatus();
  room_ = {};  // until all of it is there
  ids_.clear();
  KVS_RETURN_IF_ERROR(FitTo(room, frame));
  room_ = room;
  ids_.assign(static_cast<size_t>(room.members), 0);
  return OkStatus();
}

Status CudaPacked::FitTo(const Room& room, const CudaFrame& frame) {
  const Geometry& g = frame.geometry();
  StepMemory& memory = frame.memory();
  memory.NoteGrowth();
  KVS_RETURN_IF_ERROR(memory.Fit(&table_, int64_t{g.layers} * room.members,
                                 room.segments * g.kv_heads * kSegmentWords));
  const int64_t rows = int64_t{room.members} * g.query_heads;
  KVS_RETURN_IF_ERROR(memory.Fit(&partial_, rows * (g.head_dim + 2) * int64_t{sizeof(float)}));
  cuda::AttendPackedBatch attend;
  attend.layer.kv_heads = g.kv_heads;
  attend.layer.head_dim = g.head_dim;
  attend.queries.group = g.group();
  int64_t bytes = 0;  // small batches have more CTAs an item
  for (attend.queries.batch = 1; attend.queries.batch <= room.members; ++attend.queries.batch) {
    bytes = std::max(
        bytes, OpsOf<cuda::PackedOps>(frame.ops().packed).attend_packed_workspace_bytes(attend));
  }
  return memory.Fit(&workspace_, bytes);
}

Status CudaPacked::Stage(CudaFrame* frame) {
  for (int i = 0; i < frame->members(); ++i) {
    if (!Has(*frame, i)) continue;
    const PackedStorage* const packed = PackedOf(frame->state(i).stored());
    StepMemory& memory = frame->memory();
    memory.At(none_, i) = 0;
    memory.At(end_, i) = EndOf(frame->state(i));
    memory.At(segments_, i) =
        packed == nullptr ? 0 : static_cast<int32_t>(packed->segments().size());
    if (packed != nullptr && !Knows(*frame, i)) KVS_RETURN_IF_ERROR(StageMember(frame, i));
  }
  return OkStatus();
}

Status CudaPacked::StageMember(CudaFrame* frame, int member) {
  uint64_t& known = ids_[static_cast<size_t>(member)];
  const PackedStorage& packed = *PackedOf(frame->state(member).stored());
  known = 0;  // until all of it is on its way
  for (int layer = 0; layer < frame->geometry().layers; ++layer) {
    const std::vector<PackedSegment> segments = SegmentsOf(packed, frame->geometry(), layer);
    KVS_RETURN_IF_ERROR(frame->memory().Write(&table_, int64_t{layer} * room_.members + member,
                                              std::as_bytes(std::span(segments)), frame->stream()));
  }
  known = packed.id();
  return OkStatus();
}

cuda::PackedLayer CudaPacked::LayerOf(const CudaFrame& frame, const CudaPart& part,
                                      int layer) const {
  cuda::PackedLayer packed;
  packed.segments = table_.Row<PackedSegment>(int64_t{layer} * room_.members + part.first);
  packed.counts = frame.memory().On(segments_, part.first);
  packed.segment_stride = table_.stride() / (frame.geometry().kv_heads * kSegmentWords);
  packed.kv_heads = frame.geometry().kv_heads;
  packed.head_dim = frame.geometry().head_dim;
  packed.truncated = part.plan.packed.truncate;
  packed.keep_max = std::min(room_.keep, StoredChannels(part.plan, frame.geometry()));
  return packed;
}

Status CudaPacked::Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                          const MutableRows& out, float* lse) {
  for (int32_t t = 0; t < part.new_tokens; ++t) {
    KVS_RETURN_IF_ERROR(AttendItems(frame, part, layer, frame->FirstRow(part) + t, q, out, lse));
  }
  return OkStatus();
}

Status CudaPacked::AttendItems(CudaFrame* frame, const CudaPart& part, int layer, int32_t row,
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

  cuda::AttendPackedBatch w;
  w.layer = LayerOf(*frame, part, layer);
  w.queries = {q.data + row * q.token_stride, q.dtype, q.token_stride / SizeOf(q.dtype), part.count,
               g.group()};
  w.selection = frame->SelectionOf(part, layer);
  w.scale = raw.scale;
  w.with = of_pages;
  w.to = frame->OutputFrom(row, out, lse);
  w.counters = frame->counters();
  w.workspace = workspace_.as<float>();
  w.ahead = true;
  return frame->Check(OpsOf<cuda::PackedOps>(frame->ops().packed).attend_packed(w, frame->stream()),
                      "op attend_packed");
}

constinit const CudaCodecRow kCudaPacked = {
    PackedServes, [](const CudaCodecSource& from) -> std::unique_ptr<CudaCodec> {
      return std::make_unique<CudaPacked>(from.memory);
    }};

}  // namespace kvstrata
