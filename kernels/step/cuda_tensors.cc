// Tensors of a CudaStep: which are usable as they are, copies of the others.
#include <cstring>
#include <vector>

#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

constexpr uintptr_t kVector = 16;  // bytes that ops read at a time

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVector == 0; }

}  // namespace

Result<Rows> CudaStep::OnDevice(const Rows& rows, int32_t heads, DeviceBuffer* copy) {
  bool device = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(rows.data, &device), "asking for an address"));
  if (device) return rows;
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (capturing) {
    return FailedPrecondition("CAPTURE_HOST_TENSOR",
                              "a tensor of host memory cannot be captured; pass device memory");
  }
  const auto bytes =
      static_cast<uint64_t>((tokens_ - 1) * rows.token_stride + (heads - 1) * rows.head_stride +
                            geometry().head_dim * SizeOf(rows.dtype));
  KVS_RETURN_IF_ERROR(memory().Reserve(copy, bytes, stream_));
  KVS_RETURN_IF_ERROR(
      Check(ops_.copy_async(copy->as<std::byte>(), rows.data, bytes, stream_), "copying a tensor"));
  // The caller may write to it when we return; of pinned memory the copy is still to come.
  KVS_RETURN_IF_ERROR(Check(ops_.synchronize(stream_), "copying a tensor"));
  return Rows{copy->as<std::byte>(), rows.token_stride, rows.head_stride, rows.dtype};
}

// A dense copy, as `dtype`.
Result<Rows> CudaStep::Copied(const Rows& rows, int32_t heads, DType dtype, DeviceBuffer* to) {
  cuda::CopyRowsBatch w;
  w.from = rows.data;
  w.from_row_stride = rows.token_stride;
  w.from_head_stride = rows.head_stride;
  w.from_dtype = rows.dtype;
  w.to_dtype = dtype;
  w.rows = tokens_;
  w.heads = heads;
  w.dim = geometry().head_dim;
  w.to_head_stride = w.dim * SizeOf(dtype);
  w.to_row_stride = heads * w.to_head_stride;
  KVS_RETURN_IF_ERROR(
      memory().Reserve(to, static_cast<uint64_t>(tokens_ * w.to_row_stride), stream_));
  w.to = to->as<std::byte>();
  KVS_RETURN_IF_ERROR(Check(ops_.copy_rows(w, stream_), "op copy_rows"));
  return Rows{to->as<std::byte>(), w.to_row_stride, w.to_head_stride, dtype};
}

bool CudaStep::IsDense(const void* data, int64_t token_stride, int64_t head_stride, DType dtype,
                       int32_t heads) const {
  const int64_t row = geometry().head_dim * SizeOf(dtype);
  return IsAligned(data) && head_stride == row && (token_stride == heads * row || tokens_ == 1);
}

bool CudaStep::IsAttendable(const Rows& q) const {
  return q.dtype == geometry().dtype && IsAligned(q.data) &&
         q.head_stride == geometry().row_bytes() && q.token_stride % kVector == 0;
}

Result<cuda::DeviceSource> CudaStep::SourceOf(const Rows& rows, DeviceBuffer* copy,
                                              DeviceBuffer* dense) {
  const int32_t heads = geometry().kv_heads;
  KVS_ASSIGN_OR_RETURN(Rows from, OnDevice(rows, heads, copy));
  if (!IsAligned(from.data) || from.token_stride % kVector != 0 ||
      from.head_stride % kVector != 0) {
    KVS_ASSIGN_OR_RETURN(from, Copied(from, heads, from.dtype, dense));
  }
  return cuda::DeviceSource{from.data, from.token_stride, from.head_stride, from.dtype};
}

// From the dense outputs in out_ to where the caller wants them.
Status CudaStep::StoreOutput(const MutableRows& out, bool on_device) {
  const Geometry& g = geometry();
  const int64_t row = g.head_dim * SizeOf(out.dtype);
  if (on_device) {
    cuda::CopyRowsBatch w;
    w.from = ws_.out_.as<std::byte>();
    w.from_head_stride = row;
    w.from_row_stride = g.query_heads * row;
    w.from_dtype = w.to_dtype = out.dtype;
    w.to = out.data;
    w.to_row_stride = out.token_stride;
    w.to_head_stride = out.head_stride;
    w.rows = tokens_;
    w.heads = g.query_heads;
    w.dim = g.head_dim;
    return Check(ops_.copy_rows(w, stream_), "op copy_rows");
  }
  std::vector<std::byte> rows(static_cast<size_t>(tokens_ * g.query_heads * row));
  KVS_RETURN_IF_ERROR(CopyToHost(rows.data(), ws_.out_.as<std::byte>(), rows.size()));
  const std::byte* from = rows.data();
  for (int32_t t = 0; t < tokens_; ++t) {
    for (int32_t h = 0; h < g.query_heads; ++h, from += row) {
      std::memcpy(out.data + t * out.token_stride + h * out.head_stride, from,
                  static_cast<size_t>(row));
    }
  }
  return OkStatus();
}

}  // namespace kvstrata
