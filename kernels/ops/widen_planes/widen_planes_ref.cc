// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/widen_planes/widen_planes.h"

namespace kvstrata::cuda {
namespace {

const std::byte* RunAt(const DevicePlanes& p, const DeviceRuns& runs, int32_t group, int head,
                       int64_t run_bytes) {
  const uint64_t entry = runs.blocks[group / p.block_groups], shift = entry % 32;
  return reinterpret_cast<const std::byte*>(entry - shift) +
         ((runs.offset + head * runs.head_stride) << shift) + group % p.block_groups * run_bytes;
}

std::byte* RowOf(const WidenPlanesBatch& w, void* rows, int64_t token, int head) {
  const int64_t row = token * w.planes.kv_heads + head;
  return static_cast<std::byte*>(rows) + row * w.planes.format.dim * SizeOf(w.dtype);
}

void Widen(const WidenPlanesBatch& w, int32_t group, int head) {
  const PlanesFormat& f = w.planes.format;
  std::vector<float> keys(static_cast<size_t>(f.tokens) * f.dim), values(keys.size());
  const UnpackPlanesWork unpack{f, RunAt(w.planes, w.planes.upper, group, head, f.upper_bytes()),
                                RunAt(w.planes, w.planes.lower, group, head, f.lower_bytes()),
                                keys.data(), values.data()};
  UnpackPlanesRef(&unpack, 1, InlineExecutor());
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto token = group * int64_t{f.tokens} + static_cast<int64_t>(i) / f.dim;
    const auto c = static_cast<int>(i % static_cast<size_t>(f.dim));
    SetElement(RowOf(w, w.keys, token, head), w.dtype, c, keys[i]);
    SetElement(RowOf(w, w.values, token, head), w.dtype, c, values[i]);
  }
}

const std::byte* RowOf(const DeviceSource& source, int64_t row, int head) {
  return static_cast<const std::byte*>(source.data) + row * source.row_stride +
         head * source.head_stride;
}

}  // namespace

void WidenPlanesRef(const WidenPlanesBatch& w) {
  const auto bytes = static_cast<size_t>(w.planes.format.dim * SizeOf(w.dtype));
  for (int head = 0; head < w.planes.kv_heads; ++head) {
    for (int32_t g = 0; g < w.groups; ++g) Widen(w, g, head);
    for (int32_t t = 0; t < w.raw; ++t) {
      const auto from = [&](const DeviceRows& rows) {
        return RowAt(rows, 0, head * rows.head_stride, t);
      };
      std::memcpy(RowOf(w, w.keys, w.sealed() + t, head), from(w.raw_keys), bytes);
      std::memcpy(RowOf(w, w.values, w.sealed() + t, head), from(w.raw_values), bytes);
    }
    for (int32_t t = 0; t < w.added; ++t) {
      const int64_t token = w.sealed() + w.raw + t;
      std::memcpy(RowOf(w, w.keys, token, head), RowOf(w.new_k, t, head), bytes);
      std::memcpy(RowOf(w, w.values, token, head), RowOf(w.new_v, t, head), bytes);
    }
  }
}

}  // namespace kvstrata::cuda
