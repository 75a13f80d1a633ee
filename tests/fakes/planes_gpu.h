// SPDX-License-Identifier: Apache-2.0
// A GPU in host memory (attending_gpu.h) that has the ops of codec planes, computed by `ref`. For
// tests of what is around them. Not thread-safe.
#pragma once

#include <limits>
#include <vector>

#include "kernels/backend/backend.h"
#include "tests/fakes/attending_gpu.h"

namespace kvstrata::testing {

// Where a run of a group lies (device_planes_cuda.h).
inline std::byte* RunAt(const cuda::DevicePlanes& p, const cuda::DeviceRuns& runs, int64_t bytes,
                        int b, int64_t offset, int32_t group) {
  const uint64_t entry = runs.blocks[int64_t{b} * p.block_stride + group / p.block_groups];
  return reinterpret_cast<std::byte*>((entry & ~uint64_t{31}) +
                                      (static_cast<uint64_t>(runs.offset + offset) << entry % 32)) +
         group % p.block_groups * bytes;
}

// As attend_raw leaves its rows where it is asked for a partial, of one head each call: o is the
// output, m the log-sum-exp, l 1.
inline int AttendRawToPartial(const cuda::AttendRawBatch& w, cuda::Stream stream) {
  if (w.to.rows != nullptr) return AttendRaw(w, stream);
  cuda::AttendRawBatch whole = w;
  whole.to = {w.partial.o, DType::kF32, w.partial.m};
  std::fill_n(w.partial.l, int64_t{w.batch} * w.layer.kv_heads * w.group, 1.0f);
  return AttendRaw(whole, stream);
}

// Sealed rows of a head, merged with those of pages.
inline int AttendPlanes(const cuda::AttendPlanesBatch& w, cuda::Stream) {
  const PlanesFormat& f = w.planes.format;
  const int32_t dim = f.dim, heads = w.planes.kv_heads * w.group;
  for (int64_t item = 0; item < int64_t{w.batch} * w.planes.kv_heads; ++item) {
    const int b = static_cast<int>(item / w.planes.kv_heads);
    const int64_t head = item % w.planes.kv_heads, row = item * w.group;
    std::vector<const std::byte*> upper, lower;
    for (int32_t g = 0; g < w.groups[b]; ++g) {
      upper.push_back(RunAt(w.planes, w.planes.upper, f.upper_bytes(), b,
                            head * w.planes.upper.head_stride, g));
      lower.push_back(RunAt(w.planes, w.planes.lower, f.lower_bytes(), b,
                            head * w.planes.lower.head_stride, g));
    }
    std::vector<float> q, m(static_cast<size_t>(w.group)), l(m), o(m.size() * dim);
    for (int64_t i = 0; i < int64_t{w.group} * dim; ++i) {
      q.push_back(At(w.q, w.q_dtype, b * w.q_stride + head * w.group * dim + i));
    }
    AttendPlanesWork work;
    work.rows = {f, upper.data(), lower.data(), w.groups[b]};
    work.rule = w.rule;
    work.tokens = w.tokens[b];
    if (work.tokens == 0) {  // in full
      work.tokens = work.rows.tokens() + 1;
      work.rule.sinks = work.rows.tokens();
    }
    work.rule.sinks = std::min(work.rule.sinks, work.rows.tokens());
    std::vector<uint8_t> fine(static_cast<size_t>(work.rows.tokens())), strips(fine.size() / 16);
    work.q = q.data();
    work.group = w.group;
    work.scale = w.scale;
    work.raw_m = w.with.m + row;
    work.raw_l = w.with.l + row;
    work.m = m.data(), work.l = l.data(), work.o = o.data();
    work.fine = fine.data(), work.strips = strips.data();
    AttendPlanesRef(&work, 1, InlineExecutor());
    if (w.report.fetched != nullptr) {
      w.report.fetched[item] += PlanesBytesRead(work.rows, fine.data(), strips.data());
    }
    for (int32_t h = 0; h < w.group; ++h) {
      const auto i = static_cast<size_t>(h);
      const double top = std::max<double>(m[i], w.with.m[row + h]);
      const double own = l[i] == 0 ? 0 : std::exp(m[i] - top);
      const double raw = std::exp(w.with.m[row + h] - top);
      const double sum = own * l[i] + raw * w.with.l[row + h];
      for (int32_t c = 0; c < dim; ++c) {
        const double x =
            (own == 0 ? 0 : own * o[i * dim + c]) + raw * w.with.o[(row + h) * dim + c];
        const int64_t at = (int64_t{b} * heads + head * w.group + h) * dim + c;
        static_cast<float*>(w.to.rows)[at] = static_cast<float>(x / sum);
      }
    }
  }
  return 0;
}

// Groups of all layers and heads.
inline int PackPlanes(const cuda::PackPlanesBatch& w, cuda::Stream) {
  const cuda::DevicePlanes& p = w.planes;
  for (int i = 0; i < w.batch * w.layers * p.kv_heads; ++i) {
    const int b = i / (w.layers * p.kv_heads), layer = i / p.kv_heads % w.layers;
    const int head = i % p.kv_heads;
    const auto rows = [&](const cuda::DeviceRows& r) {
      auto* const pages = reinterpret_cast<std::byte* const*>(r.pages);
      return PagedRows{pages + int64_t{b} * r.page_stride,
                       r.offset + layer * w.row_layer_stride + head * r.head_stride,
                       r.row_stride,
                       r.page_rows,
                       r.head_dim,
                       r.dtype};
    };
    const auto run = [&](const cuda::DeviceRuns& runs, int64_t layer_stride, int64_t bytes,
                         int32_t group) {
      return RunAt(p, runs, bytes, b, layer * layer_stride + head * runs.head_stride, group);
    };
    for (int32_t g = w.from[b] / p.format.tokens; g < w.to[b] / p.format.tokens; ++g) {
      const PackPlanesWork work = {rows(w.keys),
                                   rows(w.values),
                                   g * p.format.tokens,
                                   p.format,
                                   run(p.upper, w.upper_layer_stride, p.format.upper_bytes(), g),
                                   run(p.lower, w.lower_layer_stride, p.format.lower_bytes(), g)};
      PackPlanesRef(&work, 1, InlineExecutor());
    }
  }
  return 0;
}

inline const cuda::CudaOps& PlanesGpuOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake = FakeOps();
    fake.use_device = [](int) { return 0; };
    fake.create_stream = [](cuda::Stream* stream) {
      *stream = nullptr;
      return 0;
    };
    fake.destroy_stream = [](cuda::Stream) { return 0; };
    fake.zero_async = [](void* at, uint64_t bytes, cuda::Stream) {
      std::memset(at, 0, bytes);
      return 0;
    };
    fake.allocate_device = [](uint64_t bytes, void** at) {  // as aligned as a GPU's
      constexpr uint64_t kAlign = 256;
      const uint64_t whole = (bytes + kAlign - 1) / kAlign * kAlign;
      *at = std::memset(std::aligned_alloc(kAlign, whole), 0, whole);
      return 0;
    };
    fake.attend_raw = AttendRawToPartial;
    fake.attend_planes_workspace_bytes = [](const cuda::AttendPlanesBatch&) { return int64_t{64}; };
    fake.attend_planes = AttendPlanes;
    fake.pack_planes = PackPlanes;
    return fake;
  }();
  return ops;
}

}  // namespace kvstrata::testing
