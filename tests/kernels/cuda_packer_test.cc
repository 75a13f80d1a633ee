// SPDX-License-Identifier: Apache-2.0
// What a GPU's SegmentPacker does around its kernels, on a table of ops that is a GPU in host
// memory: copies, memory, waits. The kernels: tests/cuda/segment_packer_cuda_test.cc.
#include "kernels/plans/mosaickv/cuda_packer.h"

#include <gtest/gtest.h>

#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/plans/mosaickv/packed_layout.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

struct Calls {
  int allocations, copies, waits;
};
Calls calls;

// Rows are packed to nothing, and lose nothing.
const cuda::CudaOps& CountingOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake = testing::FakeOps();
    fake.use_device = [](int) { return 0; };
    fake.create_stream = [](cuda::Stream* stream) {
      *stream = nullptr;
      return 0;
    };
    fake.destroy_stream = [](cuda::Stream) { return 0; };
    fake.allocate_device = [](uint64_t bytes, void** at) {
      ++calls.allocations;
      return testing::Allocate(bytes, at);
    };
    fake.copy_async = [](void* to, const void* from, uint64_t bytes, cuda::Stream) {
      ++calls.copies;
      std::memcpy(to, from, bytes);
      return 0;
    };
    fake.zero_async = [](void* at, uint64_t bytes, cuda::Stream) {
      std::memset(at, 0, bytes);
      return 0;
    };
    fake.synchronize = [](cuda::Stream) {
      ++calls.waits;
      return 0;
    };
    static cuda::PackedOps packed;
    packed.rotate_pack = testing::Nothing<cuda::RotatePackBatch>;
    fake.packed = &packed;
    return fake;
  }();
  return ops;
}

constexpr int32_t kPrompt = 40, kFlush = 16, kFlushes = 3;

class CudaPacker : public ::testing::Test {
 protected:
  CudaPacker() : in_(geometry_, kPrompt + kFlush * kFlushes, 7), sequence_(plan_, geometry_, in_) {
    sequence_.keep_pages = true;
    sequence_.Commit(kPrompt);
    sequence_.PrefillDone();
    sequence_.Commit(in_.n);
    sequence_.Settle();
  }
  static Plan FlushedPlan() {
    Plan plan = PackedPlan();
    plan.packed.buffer = kFlush;
    plan.packed.close_loss = 1e9;
    return plan;
  }
  PackedExtent Extent(size_t i) {
    return ReadPackedExtent(sequence_.View().extents[i], geometry_).value();
  }
  // The extents of the flushes.
  std::vector<PackedExtent> Pieces() {
    std::vector<PackedExtent> pieces;
    for (size_t i = 1; i <= kFlushes; ++i) pieces.push_back(Extent(i));
    return pieces;
  }

  const Geometry geometry_{2, 4, 2, 64, 16, DType::kBF16};
  const Plan plan_ = FlushedPlan();
  const Inputs in_;
  CodecSequence sequence_;
  const std::unique_ptr<SegmentPacker> packer_ = NewCudaPacker(CountingOps(), 0).value();
};

// Who shares the GPU with an engine gets there once for each wait.
TEST_F(CudaPacker, AFlushIsWaitedForOnce) {
  const PackedExtent first = Extent(0);
  PackedRange range = {{kPrompt, kPrompt + kFlush}, false, {}};
  range.info.buffer = kFlush;
  const auto flush = [&] {
    return packer_->PackRange(sequence_.Input(), geometry_, plan_, PlansIn(first), range, {});
  };
  ASSERT_TRUE(flush().ok());  // scratch comes
  calls = {};
  const Result<PackedBytes> packed = flush();
  ASSERT_TRUE(packed.ok()) << packed.status().ToString();
  EXPECT_EQ(calls.waits, 1);
  EXPECT_EQ(calls.copies, 2) << "tables there, losses back";
  EXPECT_EQ(calls.allocations, 0) << "the extent before left its memory";
}

TEST_F(CudaPacker, ASpareExtentShowsNothingOfTheOneBefore) {
  const std::vector<PackedExtent> pieces = Pieces();
  const Result<PackedBytes> expected = HostPacker().Join(geometry_, pieces);
  ASSERT_TRUE(expected.ok()) << expected.status().ToString();
  const auto expect_joined = [&](const PackedBytes& joined) {
    ASSERT_EQ(joined.on_device.size, expected->bytes.size());
    const size_t front = joined.bytes.size();
    ASSERT_LT(front, joined.on_device.size);
    EXPECT_EQ(std::memcmp(joined.on_device.data.get() + front, expected->bytes.data() + front,
                          joined.on_device.size - front),
              0);
  };
  const std::byte* before = nullptr;
  {
    const Result<PackedBytes> joined = packer_->Join(geometry_, pieces);
    ASSERT_TRUE(joined.ok()) << joined.status().ToString();
    expect_joined(*joined);
    before = joined->on_device.data.get();
    std::memset(const_cast<std::byte*>(before), 0xEE, joined->on_device.size);
  }
  calls = {};
  const Result<PackedBytes> joined = packer_->Join(geometry_, pieces);
  ASSERT_TRUE(joined.ok()) << joined.status().ToString();
  EXPECT_EQ(joined->on_device.data.get(), before);
  expect_joined(*joined);
  EXPECT_EQ(calls.allocations, 0);
  EXPECT_EQ(calls.waits, 1);
  // Held by two at a time they are two.
  const Result<PackedBytes> another = packer_->Join(geometry_, pieces);
  ASSERT_TRUE(another.ok());
  EXPECT_NE(another->on_device.data.get(), before);
  EXPECT_EQ(calls.allocations, 1);
}

TEST_F(CudaPacker, ExtentsOutliveTheirPacker) {
  std::unique_ptr<SegmentPacker> packer = NewCudaPacker(CountingOps(), 0).value();
  Result<PackedBytes> joined = packer->Join(geometry_, Pieces());
  ASSERT_TRUE(joined.ok());
  packer.reset();
  std::memset(const_cast<std::byte*>(joined->on_device.data.get()), 0, joined->on_device.size);
}

}  // namespace
}  // namespace kvstrata
