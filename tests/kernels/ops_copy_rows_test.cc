// SPDX-License-Identifier: Apache-2.0
// Refs of copy_rows and mean_query against plain statements of what they do.
#include "kernels/ops/copy_rows/copy_rows.h"
#include "kernels/plans/tokenselect/ops/mean_query/mean_query.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

TEST(CopyRowsRef, RoundsAndLeavesGaps) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (const DType from_type : kDTypes) {
    for (const DType to_type : kDTypes) {
      constexpr int kRows = 5, kHeads = 2, kDim = 3, kGap = 1;
      const int64_t from_size = SizeOf(from_type), to_size = SizeOf(to_type);
      std::vector<std::byte> from(static_cast<size_t>(kRows * kHeads * kDim * from_size));
      for (size_t i = 0; i < from.size(); i += static_cast<size_t>(from_size)) {
        StoreAs(from_type, &from[i], random.Normal());
      }
      std::vector<std::byte> to(static_cast<size_t>(kRows * kHeads * (kDim + kGap) * to_size),
                                std::byte{0x11});
      CopyRowsBatch w;
      w.from = from.data();
      w.from_head_stride = kDim * from_size;
      w.from_row_stride = kHeads * w.from_head_stride;
      w.from_dtype = from_type;
      w.to = to.data();
      w.to_row_stride = (kDim + kGap) * to_size;
      w.to_head_stride = kRows * w.to_row_stride;
      w.to_dtype = to_type;
      w.rows = kRows;
      w.heads = kHeads;
      w.dim = kDim;
      CopyRowsRef(w);
      for (int i = 0; i < kRows * kHeads * (kDim + kGap); ++i) {
        const int c = i % (kDim + kGap), r = i / (kDim + kGap) % kRows;
        const int h = i / (kDim + kGap) / kRows;
        std::byte want[4] = {std::byte{0x11}, std::byte{0x11}, std::byte{0x11}, std::byte{0x11}};
        if (c < kDim) {
          StoreAs(to_type, want,
                  LoadAs(from_type,
                         &from[static_cast<size_t>(((r * kHeads + h) * kDim + c) * from_size)]));
        }
        EXPECT_EQ(
            std::memcmp(&to[static_cast<size_t>(i * to_size)], want, static_cast<size_t>(to_size)),
            0)
            << NameOf(from_type) << " to " << NameOf(to_type) << " at " << i;
      }
    }
  }
}

TEST(MeanQueryRef, ByHand) {
  const float q[] = {1, -2, 4, 8};  // two rows
  float mean[2] = {};
  MeanQueryBatch w;
  w.q = q;
  w.q_dtype = DType::kF32;
  w.rows = w.row_floats = 2;
  w.mean = mean;
  MeanQueryRef(w);
  EXPECT_EQ(mean[0], 2.5f);
  EXPECT_EQ(mean[1], 3.0f);
}

}  // namespace
}  // namespace kvstrata::cuda
