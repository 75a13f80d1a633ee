// SPDX-License-Identifier: Apache-2.0
// kvs_op_attend: attend_raw + merge of the simd backend on memory that the caller owns, for Python:
// comparisons with numpy's BLAS, and "own cache, same kernel" for the cost of attaching.
//
// Memory: pages as kernels/pages/page_view.h lays them out, one layer each here:
//   page [2 (K, V)][kv_heads][page_tokens][head_dim] bf16, pages[i] its address.
// Threads: one call at a time (one pool per process, of the size first asked for).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/executor.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {
namespace {

Executor& Pool(int threads) {
  static const std::unique_ptr<Executor> pool = NewThreadPool(threads < 1 ? 1 : threads);
  return *pool;
}

// Partials of every KV head over every slice, head by head: [heads][slices][group].
struct Partials {
  std::vector<float> m, l, o;
};

}  // namespace
}  // namespace kvstrata

// Attention of one token at position tokens - 1 over all `tokens` rows; q, out
// [kv_heads * group][head_dim] fp32. Returns 0, or -1 for a shape that the op does not take.
extern "C" __attribute__((visibility("default"))) int kvs_op_attend(void* const* pages, int tokens,
                                                                    int page_tokens, int kv_heads,
                                                                    int group, int head_dim,
                                                                    float scale, const float* q,
                                                                    float* out, int threads) {
  using namespace kvstrata;  // NOLINT(google-build-using-namespace): a C entry point
  const Geometry geometry{1, kv_heads * group, kv_heads, head_dim, page_tokens, DType::kBF16};
  if (pages == nullptr || tokens < 1 || group < 1 || !Validate(geometry).ok()) return -1;
  const PageLayout layout = PageLayout::Of(geometry);
  auto* const* table = reinterpret_cast<std::byte* const*>(pages);
  const int slices = (tokens + kAttendSliceRows - 1) / kAttendSliceRows;
  const size_t rows = static_cast<size_t>(kv_heads) * slices * group;
  static Partials p;
  p.m.resize(rows), p.l.resize(rows), p.o.resize(rows * head_dim);

  std::vector<Run> runs;
  for (int s = 0; s < slices; ++s) {
    runs.push_back({s * kAttendSliceRows, std::min((s + 1) * kAttendSliceRows, tokens)});
  }
  std::vector<AttendWork> attend;
  std::vector<MergeWork> merge;
  for (int h = 0; h < kv_heads; ++h) {
    for (int s = 0; s < slices; ++s) {
      const size_t at = (static_cast<size_t>(h) * slices + s) * group;
      attend.push_back({KeysOf(table, layout, 0, h), ValuesOf(table, layout, 0, h),
                        q + h * group * head_dim, 0, 1, group, tokens - 1, &runs[s], 1, scale,
                        &p.m[at], &p.l[at], &p.o[at * head_dim]});
    }
    const size_t first = static_cast<size_t>(h) * slices * group;
    merge.push_back({&p.m[first], &p.l[first], &p.o[first * head_dim], slices, group, group,
                     head_dim, out + h * group * head_dim, 0, nullptr, 0});
  }
  AttendRawSimd(attend.data(), static_cast<int64_t>(attend.size()), Pool(threads));
  MergeSimd(merge.data(), static_cast<int64_t>(merge.size()), Pool(threads));
  return 0;
}
