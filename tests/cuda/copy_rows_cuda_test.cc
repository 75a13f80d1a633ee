// SPDX-License-Identifier: Apache-2.0
// copy_rows and mean_query on the GPU against ref: the same bits of every copied element, and no
// other byte; means within rounding.
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST(CopyRowsCuda, EveryTypeAndStride) {
  Rng rng(TestSeed());
  for (const DType from_type : kTypes) {
    for (const DType to_type : kTypes) {
      for (const int rows : {0, 1, 37, 700}) {
        constexpr int kHeads = 3, kDim = 64, kGap = 8;  // elements between heads
        const size_t elements = static_cast<size_t>(rows) * kHeads * (kDim + kGap);
        const std::vector<std::byte> from = RandomElements(rng, from_type, elements);
        const DeviceArray<std::byte> device_from(from);
        const DeviceArray<std::byte> device_to(elements * static_cast<size_t>(SizeOf(to_type)));
        std::vector<std::byte> want(device_to.size(), std::byte{0xFF});
        CopyRowsBatch w;
        w.from = device_from.get();
        w.from_head_stride = (kDim + kGap) * SizeOf(from_type);
        w.from_row_stride = kHeads * w.from_head_stride;
        w.from_dtype = from_type;
        w.to = device_to.get();
        w.to_row_stride = (kDim + kGap) * SizeOf(to_type);  // heads and rows change places
        w.to_head_stride = rows * w.to_row_stride;
        w.to_dtype = to_type;
        w.rows = rows;
        w.heads = kHeads;
        w.dim = kDim;
        Check(kvs_cuda_ops()->copy_rows(w, nullptr), "copy_rows");
        w.from = from.data();
        w.to = want.data();
        CopyRowsRef(w);
        EXPECT_EQ(device_to.Read(), want)
            << NameOf(from_type) << " to " << NameOf(to_type) << " rows " << rows;
      }
    }
  }
}

TEST(CopyRowsCuda, RefusesNothingToCopy) {
  CopyRowsBatch w;
  w.rows = 1;
  EXPECT_NE(kvs_cuda_ops()->copy_rows(w, nullptr), 0);
}

TEST(MeanQueryCuda, EveryTypeAndLength) {
  Rng rng(TestSeed());
  for (const DType dtype : kTypes) {
    for (const int rows : {1, 2, 9, 4096}) {
      MeanQueryBatch w;
      w.q_dtype = dtype;
      w.rows = rows;
      w.row_floats = 32 * (1 + Below(rng, 20));
      const auto floats = static_cast<size_t>(w.row_floats);
      const std::vector<std::byte> q =
          RandomElements(rng, dtype, static_cast<size_t>(rows) * floats);
      const DeviceArray<std::byte> device_q(q);
      const DeviceArray<float> mean(floats);
      w.q = device_q.get();
      w.mean = mean.get();
      Check(kvs_cuda_ops()->mean_query(w, nullptr), "mean_query");
      const std::vector<float> got = mean.Read();
      std::vector<float> want(floats);
      w.q = q.data();
      w.mean = want.data();
      MeanQueryRef(w);
      for (size_t c = 0; c < floats; ++c) EXPECT_NEAR(got[c], want[c], 1e-6) << c;
    }
  }
}

TEST(MeanQueryCuda, RefusesOtherShapes) {
  MeanQueryBatch w;
  w.rows = 1;
  w.row_floats = 48;
  EXPECT_NE(kvs_cuda_ops()->mean_query(w, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
