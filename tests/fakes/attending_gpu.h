// SPDX-License-Identifier: Apache-2.0
// A table of ops that is a GPU in host memory: attention over a selection is computed as op
// attend_raw says, selections are made up, packed rows and spans attend to zeros. For tests of what
// a CudaStep does around its kernels. Not thread-safe.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/pages/dtype.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/plans/sekv/ops/span_cuda_ops.h"

namespace kvstrata::testing {

inline int failing = -1;  // attend_raw calls that still succeed; negative: all do

inline float At(const void* rows, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(rows)[i]
                              : ToFloat(static_cast<const BF16*>(rows)[i]);
}

// The positions that a KV head of sequence b attends.
inline std::vector<int32_t> Attended(const cuda::DeviceSelection& s, int b, int head,
                                     int32_t tokens) {
  std::vector<int32_t> all;
  const int32_t sink = s.sink_end == nullptr ? 0 : s.sink_end[b];
  const int32_t recent = s.recent_begin == nullptr ? 0 : s.recent_begin[b];
  for (int32_t t = 0; t < sink; ++t) all.push_back(t);
  if (s.unit_tokens > 0) {
    const int64_t list = int64_t{b} * s.groups + (s.groups == 1 ? 0 : head);
    for (int32_t i = 0; i < s.counts[list]; ++i) {
      const int32_t unit = s.units[list * s.list_stride + i];
      for (int32_t t = 0; t < s.unit_tokens; ++t) all.push_back(unit * s.unit_tokens + t);
    }
  }
  for (int32_t t = recent; t < tokens; ++t) all.push_back(t);
  return all;
}

inline int AttendRaw(const cuda::AttendRawBatch& w, cuda::Stream) {
  if (failing == 0) return 1;
  if (failing > 0) --failing;
  if (w.to.rows == nullptr) return 0;
  const cuda::PagedLayer& l = w.layer;
  const int heads = l.kv_heads * w.group;
  if (w.kept.row != nullptr && *w.kept.row >= 0 && *w.kept.row < w.batch) {
    std::memcpy(w.kept.to, static_cast<const std::byte*>(w.q) + *w.kept.row * w.q_stride,
                static_cast<size_t>(heads * l.head_dim) * SizeOf(l.dtype));
  }
  for (int b = 0; b < w.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      const auto* q = static_cast<const std::byte*>(w.q) + b * w.q_stride;
      std::vector<double> out(static_cast<size_t>(l.head_dim));
      double sum = 0;
      for (const int32_t t : Attended(w.selection, b, h / w.group, w.tokens[b])) {
        const uint64_t page = l.pages[int64_t{b} * l.page_stride + t / l.page_tokens];
        const int64_t row = h / w.group * l.head_stride + t % l.page_tokens * l.slot_stride;
        const auto* k = reinterpret_cast<const std::byte*>(page) + l.key_offset + row;
        const auto* v = reinterpret_cast<const std::byte*>(page) + l.value_offset + row;
        double dot = 0;
        for (int c = 0; c < l.head_dim; ++c) {
          dot += double{At(q, l.dtype, int64_t{h} * l.head_dim + c)} * At(k, l.dtype, c);
        }
        const double weight = std::exp(dot * w.scale);
        sum += weight;
        for (int c = 0; c < l.head_dim; ++c) {
          out[static_cast<size_t>(c)] += weight * At(v, l.dtype, c);
        }
      }
      const int64_t at = int64_t{b} * heads + h;
      for (int c = 0; c < l.head_dim; ++c) {
        const auto x = static_cast<float>(sum > 0 ? out[static_cast<size_t>(c)] / sum : 0);
        if (w.to.dtype == DType::kF32) {
          static_cast<float*>(w.to.rows)[at * l.head_dim + c] = x;
        } else {
          static_cast<BF16*>(w.to.rows)[at * l.head_dim + c] = FromFloat<BF16>(x);
        }
      }
      if (w.to.lse != nullptr) w.to.lse[at] = static_cast<float>(std::log(sum));
    }
  }
  return 0;
}

// Every third candidate of each list, and not the same for all heads.
inline int PickEveryThird(const cuda::PickBatch& w, cuda::Stream) {
  for (int b = 0; b < w.batch; ++b) {
    const bool of_blocks = w.takes != nullptr;
    const int32_t n = w.tokens[b];
    const int32_t unit = w.rule.unit_tokens;
    const int32_t first = of_blocks ? w.rule.sink_tokens : 1;
    const int32_t end = of_blocks ? n : (n - 64) / unit;
    w.sink_end[b] = first * (of_blocks ? 1 : unit);
    w.recent_begin[b] = of_blocks ? n : end * unit;
    for (int g = 0; g < w.groups; ++g) {
      const int64_t list = int64_t{b} * w.groups + g;
      int32_t count = 0;
      for (int32_t u = first + g; u < end && count < w.list_stride; u += 3) {
        w.units[list * w.list_stride + count++] = u;
      }
      w.counts[list] = count;
    }
  }
  return 0;
}

inline int FillPacked(const cuda::AttendPackedBatch& w, cuda::Stream) {
  const int64_t floats =
      int64_t{w.queries.batch} * w.layer.kv_heads * w.queries.group * w.layer.head_dim;
  if (w.to.dtype == DType::kF32) std::fill_n(static_cast<float*>(w.to.rows), floats, 0.0f);
  return 0;
}

// Lists spans 1, 4, ... of every KV head: its first query head expands them all, others the first.
inline int ExpandSome(const cuda::ExpandSpansBatch& w, cuda::Stream) {
  for (int64_t list = 0; list < int64_t{w.batch} * w.layer.kv_heads; ++list) {
    for (uint32_t i = 0; i < 3; ++i) {
      w.list[list * cuda::kSpanPieces * w.layer.span_stride + i] =
          (1 + 3 * i) << 8 | (i == 0 ? 7u : 1u);
    }
    w.counts[list] = 3;
  }
  return 0;
}

inline int FillSpans(const cuda::AttendSpansBatch& w, cuda::Stream) {
  const int64_t floats = int64_t{w.queries.batch} * 6 * 64;
  if (w.to.dtype == DType::kF32) std::fill_n(static_cast<float*>(w.to.rows), floats, 0.0f);
  return 0;
}

inline int CopyRows(const cuda::CopyRowsBatch& w, cuda::Stream) {
  for (int32_t r = 0; r < w.rows; ++r) {
    for (int32_t h = 0; h < w.heads; ++h) {
      std::memcpy(
          static_cast<std::byte*>(w.to) + r * w.to_row_stride + h * w.to_head_stride,
          static_cast<const std::byte*>(w.from) + r * w.from_row_stride + h * w.from_head_stride,
          static_cast<size_t>(w.dim * SizeOf(w.from_dtype)));
    }
  }
  return 0;
}

inline int Allocate(uint64_t bytes, void** at) {
  *at = std::calloc(bytes, 1);
  return 0;
}
inline int Free(void* at) {
  std::free(at);
  return 0;
}

template <typename Work>
int Nothing(const Work&, cuda::Stream) {
  return 0;
}

inline constexpr cuda::PackedOps kFakePacked = {
    {},
    Nothing<cuda::ScorePackedBatch>,
    [](const cuda::AttendPackedBatch&) { return int64_t{64}; },
    FillPacked};
inline constexpr cuda::SpanOps kFakeSpans = {
    {},
    Nothing<cuda::ScoreSpansBatch>,
    ExpandSome,
    [](const cuda::AttendSpansBatch&) { return int64_t{64}; },
    FillSpans};

inline const cuda::CudaOps& FakeOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake;
    fake.error_text = [](int) { return "on purpose"; };
    fake.allocate_device = fake.allocate_page_locked = Allocate;
    fake.free_device = fake.free_page_locked = Free;
    fake.copy_async = [](void* to, const void* from, uint64_t bytes, cuda::Stream) {
      std::memcpy(to, from, bytes);
      return 0;
    };
    fake.synchronize = [](cuda::Stream) { return 0; };
    fake.create_event = [](cuda::Event* event) {
      *event = &failing;
      return 0;
    };
    fake.destroy_event = [](cuda::Event) { return 0; };
    fake.record_event = [](cuda::Event, cuda::Stream) { return 0; };
    fake.await_event = [](cuda::Stream, cuda::Event) { return 0; };
    fake.is_event_done = [](cuda::Event, bool* done) {
      *done = true;
      return 0;
    };
    fake.is_capturing = [](cuda::Stream stream, bool* capturing) {
      *capturing = stream != nullptr && *static_cast<bool*>(stream);
      return 0;
    };
    fake.begin_capture = [](cuda::Stream*) { return 1; };
    fake.is_device_memory = [](const void*, bool* device) {
      *device = true;
      return 0;
    };
    fake.attend_raw_workspace_bytes = [](int32_t, int32_t) { return int64_t{64}; };
    fake.pick_scratch_bytes = [](const cuda::PickBatch&) { return int64_t{64}; };
    fake.vote_scratch_bytes = [](const cuda::VoteBatch&) { return int64_t{64}; };
    fake.append = Nothing<cuda::AppendBatch>;
    fake.summarize = Nothing<cuda::SummarizeBatch>;
    fake.score = Nothing<cuda::ScoreBatch>;
    fake.pick = PickEveryThird;
    fake.attend_raw = AttendRaw;
    fake.copy_rows = CopyRows;
    fake.packed = &kFakePacked;
    fake.lowrank = &kFakeSpans;
    return fake;
  }();
  return ops;
}

}  // namespace kvstrata::testing
