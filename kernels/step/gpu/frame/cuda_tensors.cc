// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_tensors.h"

#include <cstring>
#include <vector>

#include "kernels/step/gpu/frame/cuda_frame.h"

namespace kvstrata {
namespace {

constexpr uintptr_t kVector = 16;  // bytes that ops read at a time

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVector == 0; }

bool IsDense(const CudaFrame& frame, const void* data, int64_t token_stride, int64_t head_stride,
             DType dtype, int32_t heads) {
  const int64_t row = frame.geometry().head_dim * SizeOf(dtype);
  return IsAligned(data) && head_stride == row &&
         (token_stride == heads * row || frame.tokens() == 1);
}

Result<bool> IsOnDevice(const CudaFrame& frame, const void* data) {
  bool device = false;
  KVS_RETURN_IF_ERROR(
      frame.Check(frame.ops().is_device_memory(data, &device), "asking for an address"));
  return device;
}

Status RefuseUnderCapture(const CudaFrame& frame) {
  KVS_ASSIGN_OR_RETURN(const bool capturing, frame.IsCapturing(frame.stream()));
  if (!capturing) return OkStatus();
  return FailedPrecondition("CAPTURE_HOST_TENSOR",
                            "a tensor of host memory cannot be captured; pass device memory");
}

}  // namespace

Result<Rows> CudaTensors::OnDevice(const CudaFrame& frame, const Rows& rows, int32_t heads,
                                   DeviceBuffer* copy) {
  KVS_ASSIGN_OR_RETURN(const bool device, IsOnDevice(frame, rows.data));
  if (device) return rows;
  KVS_RETURN_IF_ERROR(RefuseUnderCapture(frame));
  const auto bytes = static_cast<uint64_t>((frame.tokens() - 1) * rows.token_stride +
                                           (heads - 1) * rows.head_stride +
                                           frame.geometry().head_dim * SizeOf(rows.dtype));
  KVS_RETURN_IF_ERROR(frame.memory().Reserve(copy, bytes, frame.stream()));
  const cuda::CudaOps& ops = frame.ops();
  KVS_RETURN_IF_ERROR(frame.Check(
      ops.copy_async(copy->as<std::byte>(), rows.data, bytes, frame.stream()), "copying a tensor"));
  // A copy from page-locked memory may not be done yet.
  KVS_RETURN_IF_ERROR(frame.Check(ops.synchronize(frame.stream()), "copying a tensor"));
  return Rows{copy->as<std::byte>(), rows.token_stride, rows.head_stride, rows.dtype};
}

// A dense copy, as `dtype`.
Result<Rows> CudaTensors::Copied(const CudaFrame& frame, const Rows& rows, int32_t heads,
                                 DType dtype, DeviceBuffer* to) {
  cuda::CopyRowsBatch w;
  w.from = rows.data;
  w.from_row_stride = rows.token_stride;
  w.from_head_stride = rows.head_stride;
  w.from_dtype = rows.dtype;
  w.to_dtype = dtype;
  w.rows = frame.tokens();
  w.heads = heads;
  w.dim = frame.geometry().head_dim;
  w.to_head_stride = w.dim * SizeOf(dtype);
  w.to_row_stride = heads * w.to_head_stride;
  KVS_RETURN_IF_ERROR(frame.memory().Reserve(
      to, static_cast<uint64_t>(frame.tokens() * w.to_row_stride), frame.stream()));
  w.to = to->as<std::byte>();
  KVS_RETURN_IF_ERROR(frame.Check(frame.ops().copy_rows(w, frame.stream()), "op copy_rows"));
  return Rows{to->as<std::byte>(), w.to_row_stride, w.to_head_stride, dtype};
}

Result<cuda::DeviceSource> CudaTensors::SourceOf(const CudaFrame& frame, const Rows& rows,
                                                 DeviceBuffer* copy, DeviceBuffer* dense) {
  const int32_t heads = frame.geometry().kv_heads;
  KVS_ASSIGN_OR_RETURN(Rows from, OnDevice(frame, rows, heads, copy));
  if (!IsAligned(from.data) || from.token_stride % kVector != 0 ||
      from.head_stride % kVector != 0) {
    KVS_ASSIGN_OR_RETURN(from, Copied(frame, from, heads, from.dtype, dense));
  }
  return cuda::DeviceSource{from.data, from.token_stride, from.head_stride, from.dtype};
}

Result<Rows> CudaTensors::Queries(const CudaFrame& frame, const Rows& q) {
  return OnDevice(frame, q, frame.geometry().query_heads, &host_q_);
}

Result<Rows> CudaTensors::Dense(const CudaFrame& frame, const Rows& q) {
  const int32_t heads = frame.geometry().query_heads;
  if (IsDense(frame, q.data, q.token_stride, q.head_stride, q.dtype, heads)) return q;
  return Copied(frame, q, heads, q.dtype, &dense_q_);
}

Result<Rows> CudaTensors::Native(const CudaFrame& frame, const Rows& q) {
  const Geometry& g = frame.geometry();
  const bool native = q.dtype == g.dtype && IsAligned(q.data) && q.head_stride == g.row_bytes() &&
                      q.token_stride % kVector == 0;
  if (native) return q;
  return Copied(frame, q, g.query_heads, g.dtype, &native_q_);
}

Result<CudaTensors::Output> CudaTensors::OutputFor(const CudaFrame& frame, const MutableRows& out,
                                                   float* lse) {
  const Geometry& g = frame.geometry();
  const int64_t row = int64_t{g.query_heads} * g.head_dim * SizeOf(out.dtype);
  Output output{{out.data, row, row / g.query_heads, out.dtype}, lse, false, true, false};
  KVS_ASSIGN_OR_RETURN(output.on_device, IsOnDevice(frame, out.data));
  if (lse != nullptr) {
    KVS_ASSIGN_OR_RETURN(output.lse_in_place, IsOnDevice(frame, lse));
  }
  if (!output.on_device || !output.lse_in_place) KVS_RETURN_IF_ERROR(RefuseUnderCapture(frame));
  output.in_place = output.on_device && IsDense(frame, out.data, out.token_stride, out.head_stride,
                                                out.dtype, g.query_heads);
  if (!output.in_place) {
    const auto bytes = static_cast<uint64_t>(frame.tokens() * row);
    KVS_RETURN_IF_ERROR(frame.memory().Reserve(&out_, bytes, frame.stream()));
    output.rows.data = out_.as<std::byte>();
  }
  if (!output.lse_in_place) {
    const auto bytes = static_cast<uint64_t>(frame.tokens() * g.query_heads) * sizeof(float);
    KVS_RETURN_IF_ERROR(frame.memory().Reserve(&lse_, bytes, frame.stream()));
    output.lse = lse_.as<float>();
  }
  return output;
}

Status CudaTensors::Store(const CudaFrame& frame, const Output& output, const MutableRows& out,
                          float* lse) {
  if (!output.in_place) KVS_RETURN_IF_ERROR(StoreRows(frame, out, output.on_device));
  if (output.lse_in_place) return OkStatus();
  const auto count = static_cast<uint64_t>(frame.tokens() * frame.geometry().query_heads);
  return frame.CopyToHost(lse, output.lse, count * sizeof(float));
}

Status CudaTensors::StoreRows(const CudaFrame& frame, const MutableRows& out, bool on_device) {
  const Geometry& g = frame.geometry();
  const int64_t row = g.head_dim * SizeOf(out.dtype);
  if (on_device) {
    cuda::CopyRowsBatch w;
    w.from = out_.as<std::byte>();
    w.from_head_stride = row;
    w.from_row_stride = g.query_heads * row;
    w.from_dtype = w.to_dtype = out.dtype;
    w.to = out.data;
    w.to_row_stride = out.token_stride;
    w.to_head_stride = out.head_stride;
    w.rows = frame.tokens();
    w.heads = g.query_heads;
    w.dim = g.head_dim;
    return frame.Check(frame.ops().copy_rows(w, frame.stream()), "op copy_rows");
  }
  std::vector<std::byte> rows(static_cast<size_t>(frame.tokens() * g.query_heads * row));
  KVS_RETURN_IF_ERROR(frame.CopyToHost(rows.data(), out_.as<std::byte>(), rows.size()));
  const std::byte* from = rows.data();
  for (int32_t t = 0; t < frame.tokens(); ++t) {
    for (int32_t h = 0; h < g.query_heads; ++h, from += row) {
      std::memcpy(out.data + t * out.token_stride + h * out.head_stride, from,
                  static_cast<size_t>(row));
    }
  }
  return OkStatus();
}

}  // namespace kvstrata
