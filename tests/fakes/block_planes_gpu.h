// SPDX-License-Identifier: Apache-2.0
// The ops of plan strata over an engine's own blocks, as a GPU in host memory (block_gpu.h): each
// computes what its header says, by refs. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "tests/fakes/block_gpu.h"

namespace kvstrata::testing {

inline int BlockSlots(const cuda::BlockSlotsBatch& w, cuda::Stream) {
  if (w.capacity > 0 && w.step != nullptr) ++*w.step;
  for (int32_t row = 0; row < w.capacity; ++row) {
    const int32_t slot = row < w.rows ? w.slot_ids[row] : -1;
    const int32_t n = slot < 0 ? 0 : w.lengths[row];
    const bool decodes = n > 0 && row < w.decodes;
    const bool in_full = n < w.min_tokens || (w.in_full != nullptr && w.in_full[row] != 0);
    w.tokens[row] = decodes && !in_full ? n : 0;
    w.groups[row] = decodes ? (n - 1) / w.unit : 0;
    w.raw[row] = decodes ? n - w.groups[row] * w.unit : 0;
    w.seal_from[row] = decodes ? w.raw[row] - 1 : 0;
    w.seal_to[row] = w.raw[row];
    w.seal_blocks[row] = w.pages[int64_t{row} * w.page_stride + w.groups[row]];
    w.slots[row] = static_cast<uint64_t>(std::max(slot, 0) * w.slot_bytes);
    w.tails[2 * row] = 0;
    w.tails[2 * row + 1] = decodes ? 0 : n % w.unit;
  }
  return 0;
}

inline const std::byte* RowOf(const cuda::DeviceSource& source, int64_t row, int head) {
  return static_cast<const std::byte*>(source.data) + row * source.row_stride +
         head * source.head_stride;
}

// The new row of sequence b to its place.
inline void PutRow(const cuda::PagedLayer& l, int b, int head, int32_t t,
                   const cuda::DeviceSource& k, const cuda::DeviceSource& v, int64_t from) {
  const cuda::HostPages pages(l, b);
  const auto bytes = static_cast<size_t>(l.head_dim * SizeOf(l.dtype));
  std::memcpy(pages.Keys(head).Row(t), RowOf(k, from, head), bytes);
  std::memcpy(pages.Values(head).Row(t), RowOf(v, from, head), bytes);
}

inline int AppendRows(const cuda::AppendBatch& w, cuda::Stream) {
  for (int b = 0; b < w.batch; ++b) {
    const int32_t first = w.starts == nullptr ? b : w.starts[b];
    const int32_t count = w.starts == nullptr ? 1 : w.starts[b + 1] - first;
    for (int head = 0; head < w.layer.kv_heads; ++head) {
      for (int32_t i = 0; i < count; ++i) {
        PutRow(w.layer, b, head, w.tokens[b] - count + i, w.k, w.v, first + i);
      }
    }
  }
  return 0;
}

inline std::vector<float> QueriesOf(const void* q, DType dtype, int64_t first, int64_t count) {
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(ElementAt(q, dtype, first + i));
  return out;
}

// The partial over all rows; the new ones join their pages.
inline int AttendRawPartial(const cuda::AttendRawBatch& w, cuda::Stream) {
  const cuda::PagedLayer& l = w.layer;
  for (int b = 0; b < w.batch; ++b) {
    const cuda::HostPages pages(l, b);
    for (int head = 0; head < l.kv_heads; ++head) {
      const int32_t n = w.tokens[b];
      if (n > 0) PutRow(l, b, head, n - 1, w.new_k, w.new_v, b);
      const std::vector<float> q =
          QueriesOf(static_cast<const std::byte*>(w.q) + b * w.q_stride, l.dtype,
                    int64_t{head} * w.group * l.head_dim, w.group * l.head_dim);
      const int64_t row = (int64_t{b} * l.kv_heads + head) * w.group;
      const Run run{0, n};
      AttendWork one;
      one.k = pages.Keys(head);
      one.v = pages.Values(head);
      one.q = q.data();
      one.group = w.group;
      one.position = n - 1;
      one.runs = &run;
      one.run_count = n > 0 ? 1 : 0;
      one.scale = w.scale;
      one.m = w.partial.m + row;
      one.l = w.partial.l + row;
      one.o = w.partial.o + row * l.head_dim;
      AttendRawRef(&one, 1, InlineExecutor());
    }
  }
  return 0;
}

inline std::byte* RunAt(const cuda::DevicePlanes& p, const cuda::DeviceRuns& runs, int b,
                        int32_t group, int head, int64_t bytes) {
  const uint64_t block = runs.blocks[int64_t{b} * p.block_stride + group / p.block_groups];
  return reinterpret_cast<std::byte*>(block) + runs.offset + head * runs.head_stride +
         group % p.block_groups * bytes;
}

// Copies in a block (cuda::DevicePlanes): a token's place is its number modulo `rows`. They are
// believed.
class BlockCopies {
 public:
  BlockCopies(const cuda::AttendPlanesBatch& w, int b, int32_t group, int head)
      : format_(w.planes.format), rows_(w.hot.rows) {
    if (w.hot.launch == nullptr) return;
    const cuda::DeviceRuns records{w.planes.upper.blocks, w.planes.hot_offset,
                                   w.planes.hot_head_stride};
    record_ = RunAt(w.planes, records, b, group, head, 0);
  }

  // A group's lower run, with rows in place of which there are copies.
  std::vector<std::byte> Read(const std::byte* lower) const {
    std::vector<std::byte> read(lower, lower + format_.lower_bytes());
    for (int32_t i = 0; record_ != nullptr && i < rows_; ++i) {
      const auto tag = std::to_integer<int64_t>(record_[sizeof(uint32_t) + static_cast<size_t>(i)]);
      if (tag < 64) continue;
      std::copy_n(Copy(i), format_.row_bytes(),
                  &read[static_cast<size_t>(tag % 64 * format_.row_bytes())]);
    }
    return read;
  }
  void Keep(int32_t token, const std::vector<std::byte>& read) const {
    if (record_ == nullptr) return;
    record_[sizeof(uint32_t) + static_cast<size_t>(token % rows_)] = std::byte(64 + token);
    std::copy_n(&read[static_cast<size_t>(token * format_.row_bytes())], format_.row_bytes(),
                Copy(token % rows_));
  }

 private:
  std::byte* Copy(int32_t place) const {
    return record_ + cuda::DevicePlanes::kHotTagBytes + place * format_.row_bytes();
  }

  const PlanesFormat format_;
  const int32_t rows_;
  std::byte* record_ = nullptr;
};

inline int AttendPlanesMerged(const cuda::AttendPlanesBatch& w, cuda::Stream) {
  const PlanesFormat& f = w.planes.format;
  const int32_t dim = f.dim;
  for (int64_t item = 0; item < int64_t{w.batch} * w.planes.kv_heads; ++item) {
    const int b = static_cast<int>(item / w.planes.kv_heads);
    const int head = static_cast<int>(item % w.planes.kv_heads);
    std::vector<const std::byte*> upper, lower;
    std::vector<std::vector<std::byte>> read;
    for (int32_t g = 0; g < w.groups[b]; ++g) {
      upper.push_back(RunAt(w.planes, w.planes.upper, b, g, head, f.upper_bytes()));
      const std::byte* const at = RunAt(w.planes, w.planes.lower, b, g, head, f.lower_bytes());
      read.push_back(BlockCopies(w, b, g, head).Read(at));
      lower.push_back(read.back().data());
    }
    const std::vector<float> q = QueriesOf(
        w.q, w.q_dtype, b * w.q_stride + int64_t{head} * w.group * dim, int64_t{w.group} * dim);
    const auto heads = static_cast<size_t>(w.group);
    std::vector<float> m(2 * heads, -INFINITY), l(2 * heads), o(2 * heads * dim), out(heads * dim);
    for (size_t i = 0; i < heads; ++i) {
      const auto row = static_cast<size_t>(item) * heads + i;
      m[heads + i] = w.with.m[row];
      l[heads + i] = w.with.l[row];
      std::copy_n(w.with.o + row * dim, dim, &o[(heads + i) * dim]);
    }
    if (w.groups[b] > 0) {
      std::vector<uint8_t> fine(static_cast<size_t>(w.groups[b] * f.tokens)), strips(fine.size());
      AttendPlanesWork one;
      one.rows = {f, upper.data(), lower.data(), w.groups[b]};
      one.rule = w.rule;
      one.tokens = w.tokens[b] > 0 ? w.tokens[b] : one.rows.tokens() + 1;
      if (w.tokens[b] == 0) one.rule.recent = 1 << 29;  // in full
      one.q = q.data();
      one.group = w.group;
      one.scale = w.scale;
      one.raw_m = &m[heads], one.raw_l = &l[heads];
      one.m = m.data(), one.l = l.data(), one.o = o.data();
      one.fine = fine.data(), one.strips = strips.data();
      AttendPlanesRef(&one, 1, InlineExecutor());
      for (int32_t t = 0; t < one.rows.tokens(); ++t) {
        if (w.tokens[b] == 0 || fine[static_cast<size_t>(t)] == 0) continue;
        BlockCopies(w, b, t / 64, head).Keep(t % 64, read[static_cast<size_t>(t / 64)]);
      }
    }
    const MergeWork merge{m.data(), l.data(),   o.data(), 2,       w.group, w.group,
                          dim,      out.data(), 0,        nullptr, 0};
    MergeRef(&merge, 1, InlineExecutor());
    for (size_t i = 0; i < out.size(); ++i) {
      SetElement(w.to.rows, w.to.dtype, item * w.group * dim + static_cast<int64_t>(i), out[i]);
    }
  }
  return 0;
}

inline int PackBlocks(const cuda::PackPlanesBatch& work, cuda::Stream) {
  cuda::PackPlanesBatch w = work;
  const PlanesFormat& f = w.planes.format;
  for (int32_t layer = 0; layer < w.layers; ++layer) {
    for (int b = 0; b < w.batch; ++b) {
      const int32_t first = w.from[b] / f.tokens, end = w.to[b] / f.tokens;
      if (end - first > w.groups_max) return 1;  // the launch has no CTA for it
      for (int32_t g = first; g < end; ++g) {
        for (int head = 0; head < w.planes.kv_heads; ++head) {
          const auto rows = [&](const cuda::DeviceRows& from, std::byte** page) {
            *page = RowAt(from, b, head, g * f.tokens);
            return PagedRows{page, 0, from.row_stride, f.tokens, f.dim, from.dtype};
          };
          std::byte *keys, *values;
          PackPlanesWork one;
          one.keys = rows(w.keys, &keys);
          one.values = rows(w.values, &values);
          one.format = f;
          one.upper = RunAt(w.planes, w.planes.upper, b, g, head, f.upper_bytes());
          one.lower = RunAt(w.planes, w.planes.lower, b, g, head, f.lower_bytes());
          PackPlanesRef(&one, 1, InlineExecutor());
          if (w.planes.hot_offset == 0) continue;
          const cuda::DeviceRuns records{w.planes.upper.blocks, w.planes.hot_offset,
                                         w.planes.hot_head_stride};
          std::memset(RunAt(w.planes, records, b, g, head, 0), 0, cuda::DevicePlanes::kHotTagBytes);
        }
      }
    }
    w.keys.offset += w.row_layer_stride;
    w.values.offset += w.row_layer_stride;
    w.planes.upper.offset += w.upper_layer_stride;
    w.planes.lower.offset += w.lower_layer_stride;
    if (w.planes.hot_offset != 0) w.planes.hot_offset += w.upper_layer_stride;
  }
  return 0;
}

inline cuda::CudaOps PlanesOps() {
  cuda::CudaOps ops = BlockOps();
  ops.block_slots = BlockSlots;
  ops.append = AppendRows;
  ops.attend_raw = AttendRawPartial;
  ops.attend_planes_workspace_bytes = [](const cuda::AttendPlanesBatch&) { return int64_t{64}; };
  ops.attend_planes = AttendPlanesMerged;
  ops.pack_planes = PackBlocks;
  ops.widen_planes = [](const cuda::WidenPlanesBatch& w, cuda::Stream) {
    WidenPlanesRef(w);
    return 0;
  };
  return ops;
}

}  // namespace kvstrata::testing
