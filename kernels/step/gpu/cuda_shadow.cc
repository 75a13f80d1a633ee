// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/cuda_shadow.h"

#include <algorithm>

#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/gpu/frame/cuda_codec.h"

namespace kvstrata {

Result<std::unique_ptr<CudaShadow>> CudaShadow::Make(const cuda::CudaOps& ops,
                                                     const Geometry& geometry) {
  std::unique_ptr<CudaShadow> shadow(new CudaShadow(ops, geometry));
  const auto bytes = static_cast<uint64_t>(shadow->Floats()) * sizeof(float);
  KVS_RETURN_IF_ERROR(shadow->results_.Reserve(ops, bytes));
  KVS_RETURN_IF_ERROR(shadow->copied_.Reserve(ops, bytes));
  return shadow;
}

void CudaShadow::Restart(bool raw_gone) {
  raw_gone_ = raw_gone;
  captured_ = lost_ = false;
  measured_.assign(static_cast<size_t>(geometry_.layers), 0);
  by_group_.assign(static_cast<size_t>(geometry_.layers), 0);
}

ShadowSample CudaShadow::Read() const {
  ShadowSample sample;
  sample.raw_gone = raw_gone_;
  const int32_t dim = geometry_.head_dim, group = geometry_.group();
  const auto* const floats = copied_.At<float>(0);
  for (int32_t layer = 0; layer < geometry_.layers; ++layer) {
    if (measured_[static_cast<size_t>(layer)] == 0) continue;
    sample.layers.push_back(layer);
    const float* const plan = floats + OutputAt(layer, Of::kPlan);
    const float* const full = floats + OutputAt(layer, Of::kFull);
    const float* const attended_lse = floats + LseAt(layer, Of::kPlan);
    const float* const full_lse = floats + LseAt(layer, Of::kFull);
    for (int32_t h = 0; h < geometry_.query_heads; ++h) {
      const bool by_group = by_group_[static_cast<size_t>(layer)] != 0;
      const int32_t at = by_group ? h % group * geometry_.kv_heads + h / group : h;
      sample.recall.push_back(MassOf(attended_lse[at], full_lse[h]));
      sample.error.push_back(OutputError(plan + int64_t{h} * dim, full + int64_t{h} * dim, dim));
    }
  }
  return sample;
}

void CudaShadow::Measure(CudaStep* step, int member, int layer, const Rows& q) {
  if (raw_gone_ || lost_) return;
  lost_ = !AttendAgain(step, member, layer, q).ok();
}

void CudaShadow::CopyOut(cuda::Stream stream) {
  if (raw_gone_ || captured_ || lost_) return;
  const auto bytes = static_cast<uint64_t>(Floats()) * sizeof(float);
  lost_ = ops_.copy_async(copied_.At<float>(0), results_.as<float>(), bytes, stream) != 0;
}

Status CudaShadow::AttendAgain(CudaStep* step, int member, int layer, const Rows& q) {
  // The member's place in its part. Pages in the host's memory are read there, promoted or not.
  CudaPart part = step->PartOf(member);
  part.list += member - part.first;
  part.first = member;
  part.count = 1;
  part.promotes = false;
  part.measures = true;
  const int32_t row = step->FirstRow(part);

  float* const results = results_.as<float>();
  float* const out = results + OutputAt(layer, Of::kPlan);
  // Row `row` of a batch whose rows all lie there.
  const MutableRows plan_out{reinterpret_cast<std::byte*>(out), 0, 0, DType::kF32};
  const auto attend = [&](const cuda::DeviceSelection& selection, Of of) {
    cuda::AttendRawBatch w = step->AttendRawOf(part, layer, row, q);
    w.selection = selection;
    w.batch = 1;
    w.to = {results + OutputAt(layer, of), DType::kF32, results + LseAt(layer, of)};
    return step->Check(ops_.attend_raw(w, step->stream()), "op attend_raw");
  };
  if (part.codec != nullptr) {
    KVS_RETURN_IF_ERROR(AttendPositions(step, member, layer, q));
    KVS_RETURN_IF_ERROR(part.codec->Attend(step, part, layer, q, plan_out, nullptr));
  } else {
    KVS_RETURN_IF_ERROR(attend(step->SelectionOf(part, layer), Of::kPlan));
  }
  KVS_RETURN_IF_ERROR(attend({}, Of::kFull));
  measured_[static_cast<size_t>(layer)] = 1;
  return OkStatus();
}

// Raw attention over the positions that were attended one by one, in whatever form: only its
// log-sum-exp is of use. REQUIRES: `layer` is the last one selected.
Status CudaShadow::AttendPositions(CudaStep* step, int member, int layer, const Rows& q) {
  const Geometry& g = geometry_;
  const StepMember& m = step->member(member);
  KVS_ASSIGN_OR_RETURN(const Selection selection, step->ReadSelection(member));
  const int groups = GroupsOf(selection);
  const int calls = groups == g.query_heads ? g.group() : 1;  // a list a query head: a head each
  const int lists = std::min(groups, g.kv_heads);             // lists of a call
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(groups));
  size_t stride = 4;
  for (int i = 0; i < groups; ++i) {
    for (const Run& run : PositionsOf(selection, m.state->stored(), i)) {
      for (int32_t t = run.begin; t < run.end; ++t) tokens[static_cast<size_t>(i)].push_back(t);
    }
    stride = std::max(stride, tokens[static_cast<size_t>(i)].size());
  }
  // [groups] counts, the two ends that leave nothing out, [groups][stride] tokens; call by call.
  const int32_t n = m.view.tokens + m.new_tokens;
  const size_t header = static_cast<size_t>(groups) + 2;
  std::vector<int32_t> ints(header + stride * static_cast<size_t>(groups));
  ints[static_cast<size_t>(groups) + 1] = n;
  for (int i = 0; i < groups; ++i) {
    const int place = calls == 1 ? i : i % calls * lists + i / calls;
    const std::vector<int32_t>& list = tokens[static_cast<size_t>(i)];
    ints[static_cast<size_t>(place)] = static_cast<int32_t>(list.size());
    std::ranges::copy(list, ints.begin() + static_cast<std::ptrdiff_t>(
                                               header + stride * static_cast<size_t>(place)));
  }
  KVS_RETURN_IF_ERROR(lists_.Reserve(ops_, ints.size() * sizeof(int32_t)));
  auto* const at = lists_.as<int32_t>();
  KVS_RETURN_IF_ERROR(
      step->Check(ops_.copy_async(at, ints.data(), ints.size() * sizeof(int32_t), step->stream()),
                  "copying positions"));

  CudaPart own;
  own.first = member;
  const int32_t row = step->FirstRow(own);
  cuda::AttendRawBatch w = step->AttendRawOf(own, layer, row, q);
  w.selection = {1, lists, static_cast<int32_t>(stride)};
  w.selection.sink_end = at + groups;
  w.selection.recent_begin = at + groups + 1;
  w.batch = 1;
  w.group = calls == 1 ? g.group() : 1;
  float* const results = results_.as<float>();
  for (int call = 0; call < calls; ++call) {
    w.selection.counts = at + call * lists;
    w.selection.units = at + header + stride * static_cast<size_t>(call * lists);
    w.to = {results + OutputAt(layer, Of::kPlan), DType::kF32,
            results + LseAt(layer, Of::kPlan) + call * g.kv_heads};
    if (calls > 1) {
      KVS_ASSIGN_OR_RETURN(w.q, HeadOfGroups(*step, q, row, call));
      w.q_stride = g.kv_heads * g.row_bytes();
    }
    KVS_RETURN_IF_ERROR(step->Check(ops_.attend_raw(w, step->stream()), "op attend_raw"));
  }
  by_group_[static_cast<size_t>(layer)] = calls > 1 ? 1 : 0;
  return OkStatus();
}

// One token's queries of one head of each group, side by side.
Result<const void*> CudaShadow::HeadOfGroups(const CudaStep& step, const Rows& q, int32_t row,
                                             int head) {
  const Geometry& g = geometry_;
  cuda::CopyRowsBatch w;
  w.from = q.data + row * q.token_stride + head * q.head_stride;
  w.from_row_stride = q.token_stride;
  w.from_head_stride = g.group() * q.head_stride;
  w.from_dtype = w.to_dtype = q.dtype;
  w.rows = 1;
  w.heads = g.kv_heads;
  w.dim = g.head_dim;
  w.to_head_stride = g.row_bytes();
  w.to_row_stride = g.kv_heads * g.row_bytes();
  KVS_RETURN_IF_ERROR(queries_.Reserve(ops_, static_cast<uint64_t>(w.to_row_stride)));
  w.to = queries_.as<std::byte>();
  KVS_RETURN_IF_ERROR(step.Check(ops_.copy_rows(w, step.stream()), "op copy_rows"));
  return static_cast<const void*>(w.to);
}

}  // namespace kvstrata
