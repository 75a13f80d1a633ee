// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "kernels/cpu/executor.h"
#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/attend_chunk/attend_chunk.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/merge/merge.h"

namespace kvstrata::cuda {
namespace {

// Query rows [first, last), each of which sees one position more than the one before, and one KV
// head: attend_raw and merge.
void AttendRows(const AttendChunkBatch& w, const HostPages& pages, int32_t first, int32_t last,
                int head) {
  const int64_t dim = w.layer.head_dim, heads = int64_t{w.layer.kv_heads} * w.group;
  const int32_t rows = last - first, count = rows * w.group;
  const auto floats = static_cast<size_t>(count * dim);
  std::vector<float> q, m(static_cast<size_t>(count)), l(m.size()), lse(m.size());
  std::vector<float> o(floats), out(floats);
  for (int64_t row = first; row < last; ++row) {
    const auto* const own = static_cast<const std::byte*>(w.q) + row * w.q_stride;
    for (int64_t i = 0; i < w.group * dim; ++i) {
      q.push_back(ElementAt(own, w.layer.dtype, head * w.group * dim + i));
    }
  }
  const std::vector<Run> runs = AttendedRuns(w.selection, 0, head, w.tokens[last - 1]);
  AttendWork work;
  work.k = pages.Keys(head);
  work.v = pages.Values(head);
  work.q = q.data();
  work.q_token = w.group * dim;
  work.queries = rows;
  work.group = w.group;
  work.position = w.tokens[first] - 1;
  work.runs = runs.data();
  work.run_count = static_cast<int32_t>(runs.size());
  work.scale = w.scale;
  work.m = m.data();
  work.l = l.data();
  work.o = o.data();
  AttendRawRef(&work, 1, InlineExecutor());
  const MergeWork merge{m.data(),         l.data(),   o.data(),      1,          count,  w.group,
                        w.layer.head_dim, out.data(), w.group * dim, lse.data(), w.group};
  MergeRef(&merge, 1, InlineExecutor());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t to = (first + i / w.group) * heads + head * w.group + i % w.group;
    for (int64_t c = 0; c < dim; ++c) {
      SetElement(w.to.rows, w.to.dtype, to * dim + c, out[static_cast<size_t>(i * dim + c)]);
    }
    if (w.to.lse != nullptr) w.to.lse[to] = lse[static_cast<size_t>(i)];
  }
}

}  // namespace

void AttendChunkRef(const AttendChunkBatch& w) {
  const HostPages pages(w.layer, 0);
  for (int32_t first = 0, last = 0; first < w.rows; first = last) {
    for (last = first + 1; last < w.rows && w.tokens[last] == w.tokens[last - 1] + 1;) ++last;
    for (int head = 0; head < w.layer.kv_heads; ++head) AttendRows(w, pages, first, last, head);
  }
}

}  // namespace kvstrata::cuda
