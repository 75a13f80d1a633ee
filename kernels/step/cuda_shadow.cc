#include "kernels/step/cuda_shadow.h"

#include <algorithm>

#include "kernels/step/cuda_codec.h"
#include "kernels/step/cuda_step.h"

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

// --- the step's part -----------------------------------------------------------------------------

void CudaStep::Shadow(int member, CudaShadow* shadow) {
  KVS_CHECK(Decodes(member));
  shadow->Restart(IsRawGone(members_[member]));
  shadows_.resize(static_cast<size_t>(members()));
  shadows_[static_cast<size_t>(member)] = shadow;
}

// No error of it is the step's.
void CudaStep::MeasureShadows(int layer, const Rows& q) {
  for (int i = 0; i < static_cast<int>(shadows_.size()); ++i) {
    CudaShadow* const shadow = shadows_[static_cast<size_t>(i)];
    if (shadow == nullptr || shadow->raw_gone_ || shadow->lost_) continue;
    shadow->lost_ = !MeasureShadow(i, layer, q, shadow).ok();
  }
}

Status CudaStep::MeasureShadow(int member, int layer, const Rows& q, CudaShadow* shadow) {
  using Of = CudaShadow::Of;
  const int32_t row = first_row_[member];
  // The member's place in its part. Pages in the host's memory are read there, promoted or not.
  CudaPart part = PartOf(member);
  part.list += member - part.first;
  part.first = member;
  part.count = 1;
  part.promotes = false;

  float* const results = shadow->results_.as<float>();
  float* const out = results + shadow->OutputAt(layer, Of::kPlan);
  // Row `row` of a batch whose rows all lie there.
  const MutableRows plan_out{reinterpret_cast<std::byte*>(out), 0, 0, DType::kF32};
  const auto attend = [&](const cuda::DeviceSelection& selection, Of of) {
    cuda::AttendRawBatch w = AttendRawOf(part, layer, row, q);
    w.selection = selection;
    w.batch = 1;
    w.to = {results + shadow->OutputAt(layer, of), DType::kF32, results + shadow->LseAt(layer, of)};
    return Check(ops_.attend_raw(w, stream_), "op attend_raw");
  };
  if (part.codec != nullptr) {
    KVS_RETURN_IF_ERROR(AttendPositions(member, layer, q, shadow));
    KVS_RETURN_IF_ERROR(part.codec->Attend(this, part, layer, q, plan_out, nullptr));
  } else {
    KVS_RETURN_IF_ERROR(attend(SelectionOf(part, layer), Of::kPlan));
  }
  KVS_RETURN_IF_ERROR(attend({}, Of::kFull));
  shadow->measured_[static_cast<size_t>(layer)] = 1;
  return OkStatus();
}

// Raw attention over the positions that were attended one by one, in whatever form: only its
// log-sum-exp is of use. REQUIRES: `layer` is the last one selected.
Status CudaStep::AttendPositions(int member, int layer, const Rows& q, CudaShadow* shadow) {
  const Geometry& g = geometry();
  const StepMember& m = members_[member];
  KVS_ASSIGN_OR_RETURN(const Selection selection, ReadSelection(member));
  const int groups = GroupsOf(selection);
  const int calls = groups == g.query_heads ? g.group() : 1;  // a list a query head: a head each
  const int lists = std::min(groups, g.kv_heads);             // of a call
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(groups));
  size_t stride = 4;
  for (int i = 0; i < groups; ++i) {
    for (const Run& run : PositionsOf(selection, m.state->spans(), i)) {
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
  KVS_RETURN_IF_ERROR(shadow->lists_.Reserve(ops_, ints.size() * sizeof(int32_t)));
  auto* const at = shadow->lists_.as<int32_t>();
  KVS_RETURN_IF_ERROR(
      Check(ops_.copy_async(at, ints.data(), ints.size() * sizeof(int32_t), stream_),
            "copying positions"));

  CudaPart own;
  own.first = member;
  cuda::AttendRawBatch w = AttendRawOf(own, layer, first_row_[member], q);
  w.selection = {1, lists, static_cast<int32_t>(stride)};
  w.selection.sink_end = at + groups;
  w.selection.recent_begin = at + groups + 1;
  w.batch = 1;
  w.group = calls == 1 ? g.group() : 1;
  float* const results = shadow->results_.as<float>();
  for (int call = 0; call < calls; ++call) {
    w.selection.counts = at + call * lists;
    w.selection.units = at + header + stride * static_cast<size_t>(call * lists);
    w.to = {results + shadow->OutputAt(layer, CudaShadow::Of::kPlan), DType::kF32,
            results + shadow->LseAt(layer, CudaShadow::Of::kPlan) + call * g.kv_heads};
    if (calls > 1) {
      KVS_ASSIGN_OR_RETURN(w.q, HeadOfGroups(q, first_row_[member], call, shadow));
      w.q_stride = g.kv_heads * g.row_bytes();
    }
    KVS_RETURN_IF_ERROR(Check(ops_.attend_raw(w, stream_), "op attend_raw"));
  }
  shadow->by_group_[static_cast<size_t>(layer)] = calls > 1 ? 1 : 0;
  return OkStatus();
}

// Of one token, the queries of one head of each group side by side.
Result<const void*> CudaStep::HeadOfGroups(const Rows& q, int32_t row, int head,
                                           CudaShadow* shadow) {
  const Geometry& g = geometry();
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
  KVS_RETURN_IF_ERROR(shadow->queries_.Reserve(ops_, static_cast<uint64_t>(w.to_row_stride)));
  w.to = shadow->queries_.as<std::byte>();
  KVS_RETURN_IF_ERROR(Check(ops_.copy_rows(w, stream_), "op copy_rows"));
  return static_cast<const void*>(w.to);
}

// What is captured, or replayed, is not measured.
void CudaStep::NoteCapturedShadows() {
  for (CudaShadow* const shadow : shadows_) {
    if (shadow != nullptr) shadow->captured_ = true;
  }
}

void CudaStep::CopyShadows(cuda::Stream stream) {
  for (CudaShadow* const shadow : shadows_) {
    if (shadow == nullptr || shadow->raw_gone_ || shadow->captured_ || shadow->lost_) continue;
    const auto bytes = static_cast<uint64_t>(shadow->Floats()) * sizeof(float);
    shadow->lost_ = ops_.copy_async(shadow->copied_.At<float>(0), shadow->results_.as<float>(),
                                    bytes, stream) != 0;
  }
}

}  // namespace kvstrata
