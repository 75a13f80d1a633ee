// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_frame.h"

#include <algorithm>

namespace kvstrata {

Result<bool> CudaFrame::IsCapturing(cuda::Stream stream) const {
  bool capturing = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_capturing(stream, &capturing), "asking for a capture"));
  return capturing;
}

const CudaPart& CudaFrame::PartOf(int member) const {
  return *std::find_if(parts_.rbegin(), parts_.rend(),
                       [member](const CudaPart& part) { return part.first <= member; });
}

cuda::PagedLayer CudaFrame::PagesOf(int first, int layer) const {
  const PageLayout layout = PageLayout::Of(geometry());
  cuda::PagedLayer pages;
  pages.page_stride = ws_.pages_.stride();
  pages.pages = ws_.pages_.Row<uint64_t>(first);
  pages.page_tokens = layout.page_tokens;
  pages.kv_heads = layout.kv_heads;
  pages.head_dim = layout.head_dim;
  pages.dtype = layout.dtype;
  pages.key_offset = layout.KeyOffset(layer, 0, 0);
  pages.value_offset = layout.ValueOffset(layer, 0, 0);
  pages.head_stride = layout.head_stride;
  pages.slot_stride = layout.slot_stride;
  return pages;
}

bool CudaFrame::Selects(const CudaPart& part, int layer) const {
  if (!part.selects || part.idle || part.selector == nullptr) return false;
  return layer >= part.plan.n_dense_layers || part.selector->traits(part.plan).in_dense_layers;
}

cuda::DeviceSelection CudaFrame::SelectionOf(const CudaPart& part, int layer) const {
  return Selects(part, layer) ? part.selector->SelectionOf(*this, part) : cuda::DeviceSelection{};
}

cuda::AttendRawBatch CudaFrame::AttendRawOf(const CudaPart& part, int layer, int32_t row,
                                            const Rows& q) const {
  cuda::AttendRawBatch w;
  w.layer = PagesOf(part.first, layer);
  w.group = geometry().group();
  w.tokens = VisibleFrom(row);
  w.q = q.data + row * q.token_stride;
  w.q_stride = q.token_stride;
  w.scale = geometry().logit_scale();
  w.workspace = ws_.attend_workspace_.as<std::byte>();
  if (pending_.layer >= 0) {
    w.new_k = pending_.k.From(row);
    w.new_v = pending_.v.From(row);
    w.not_finite = NotFiniteOf(part.first);
  }
  return w;
}

cuda::AttentionOutput CudaFrame::OutputFrom(int32_t row, const MutableRows& out, float* lse) const {
  return {out.data + row * out.token_stride, out.dtype,
          lse == nullptr ? nullptr : lse + int64_t{row} * geometry().query_heads};
}

Status CudaFrame::CopyToHost(void* to, const void* from, uint64_t bytes) const {
  KVS_RETURN_IF_ERROR(Check(ops_.copy_async(to, from, bytes, stream_), "copying from the GPU"));
  return Check(ops_.synchronize(stream_), "copying from the GPU");
}

}  // namespace kvstrata
