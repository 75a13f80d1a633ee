// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "kernels/backend/backend.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

int Up(int n, int to) { return (n + to - 1) / to * to; }

// By hand, from docs/spec/mosaickv.md 2 and 3.
PackedRows FormatOf(int dim, int keep, int neighbours, bool truncate) {
  PackedRows f;
  f.dim = dim;
  f.keep = keep;
  f.neighbours = neighbours;
  f.bits = (truncate ? dim - dim / 4 : dim) / neighbours;
  f.value_offset = Up(Up(f.bits, 32) / 8, 16);
  f.stride = f.value_offset + Up(2 * keep, 16);
  return f;
}

std::string NameOf(const PackedRows& f) {
  return "dim " + std::to_string(f.dim) + " keep " + std::to_string(f.keep) + " neighbours " +
         std::to_string(f.neighbours) + " bits " + std::to_string(f.bits);
}

struct Losses {
  double energy = kNaN, kept = kNaN, relative_error = kNaN;
};

// Packed rows with poison behind them.
struct Packed {
  std::vector<std::byte> bytes;
  Losses losses;
};

using Op = void (*)(const RotatePackWork*, int64_t, Executor&);

Packed Compute(Op op, RotatePackWork work, bool losses = true) {
  const int n = work.run.end - work.run.begin;
  const int rows = work.block > 0 ? (n + work.block - 1) / work.block : n;
  Packed out;
  out.bytes.assign(static_cast<size_t>(rows * work.format.stride + 64), std::byte{0xA5});
  work.out = out.bytes.data();
  if (losses && work.block == 0) {
    work.energy = &out.losses.energy;
    work.kept = &out.losses.kept;
    work.relative_error = &out.losses.relative_error;
  }
  op(&work, 1, InlineExecutor());
  for (size_t i = out.bytes.size() - 64; i < out.bytes.size(); ++i) {
    EXPECT_EQ(out.bytes[i], std::byte{0xA5});
  }
  return out;
}

// Dense row of packed bytes; checks their padding and the number of bits.
std::vector<float> Unpack(const std::byte* row, const PackedRows& f) {
  std::vector<float> x(static_cast<size_t>(f.dim), 0.0f);
  const std::byte* value = row + f.value_offset;
  int bits = 0;
  for (int b = 0; b < f.value_offset * 8; ++b) {
    if ((row[b / 8] >> (b % 8) & std::byte{1}) == std::byte{0}) continue;
    EXPECT_LT(b, f.bits);
    if (b >= f.bits || ++bits > f.keep / f.neighbours) break;
    for (int c = b * f.neighbours; c < (b + 1) * f.neighbours; ++c, value += 2) {
      x[static_cast<size_t>(c)] = LoadAs(DType::kBF16, value);
    }
  }
  EXPECT_EQ(bits, f.keep / f.neighbours);
  for (; value < row + f.stride; ++value) EXPECT_EQ(*value, std::byte{0});
  return x;
}

std::vector<PackedRows> Formats(int dim) {
  std::vector<PackedRows> formats;
  for (int neighbours : {1, 2, 4}) {
    for (bool truncate : {false, true}) {
      for (int keep : {dim / 8, dim / 4, dim * 3 / 8}) {
        formats.push_back(FormatOf(dim, keep, neighbours, truncate));
      }
    }
    formats.push_back(FormatOf(dim, dim, neighbours, false));
    formats.push_back(FormatOf(dim, 4, neighbours, true));
  }
  return formats;
}

class RotatePack : public SimdTest {
 protected:
  // All at dim 64; at larger ones, where ref is slow, a few.
  std::vector<PackedRows> SomeFormats(int dim) {
    std::vector<PackedRows> formats = Formats(dim);
    for (size_t keep = dim == 64 ? formats.size() : 5; formats.size() > keep;) {
      formats.erase(formats.begin() + random_.Below(static_cast<int>(formats.size())));
    }
    return formats;
  }
  // Small whole numbers: every sum is exact in whatever order, so x' is equal, and ties abound.
  void FillWhole(PagedFixture& rows, int tokens, int limit) {
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < rows.rows.dim; ++c) {
        rows.Set(t, c, static_cast<float>(random_.Below(2 * limit + 1) - limit));
      }
    }
  }
  std::vector<float> WholeRotation(int dim) {
    std::vector<float> r(static_cast<size_t>(dim) * dim, 0.0f);
    for (float& x : r) {
      if (random_.Below(4) == 0) x = static_cast<float>(random_.Below(7) - 3);
    }
    return r;
  }
  // Products of random plane rotations: orthogonal to fp32's precision.
  std::vector<float> Rotation(int dim) {
    std::vector<float> r(static_cast<size_t>(dim) * dim, 0.0f);
    for (int i = 0; i < dim; ++i) r[static_cast<size_t>(i) * dim + i] = 1;
    for (int n = 0; n < 8 * dim; ++n) {
      const int p = random_.Below(dim), q = (p + 1 + random_.Below(dim - 1)) % dim;
      const float angle = random_.Normal(), cosine = std::cos(angle), sine = std::sin(angle);
      for (int c = 0; c < dim; ++c) {
        float &x = r[static_cast<size_t>(p) * dim + c], &y = r[static_cast<size_t>(q) * dim + c];
        const float old = x;
        x = cosine * old - sine * y;
        y = sine * old + cosine * y;
      }
    }
    return r;
  }
  void ExpectSameBytes(const RotatePackWork& work) {
    const Packed ref = Compute(RotatePackRef, work), simd = Compute(RotatePackSimd, work);
    EXPECT_TRUE(ref.bytes == simd.bytes) << "block " << work.block;
    if (work.block > 0) return;
    ExpectSameLosses(simd.losses, ref.losses, work.run.end - work.run.begin);
  }
  // `swapped`: two groups of almost equal L1 norm may have changed places in a few rows. Their
  // energies, which the losses count, are then equal for single channels alone.
  void ExpectSameLosses(const Losses& simd, const Losses& ref, int rows, bool swapped = false) {
    EXPECT_NEAR(simd.energy, ref.energy, 1e-5 * ref.energy);
    EXPECT_NEAR(simd.kept, ref.kept, (swapped ? 1e-3 : 1e-5) * ref.energy);
    EXPECT_NEAR(simd.relative_error, ref.relative_error, (swapped ? 1e-3 : 1e-4) * rows);
  }
};

TEST_P(RotatePack, SameBytesForEqualRotatedRows) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      PagedFixture rows(random_, dtype, 67, 16, dim, 8);
      FillWhole(rows, 67, 8);
      for (int c = 0; c < dim; ++c) rows.Set(9, c, 0);
      const std::vector<float> r = WholeRotation(dim);
      for (const PackedRows& format : SomeFormats(dim)) {
        SCOPED_TRACE(NameOf(format));
        ExpectSameBytes({rows.rows, {0, 67}, r.data(), format});
        ExpectSameBytes({rows.rows, {9, 10}, r.data(), format});
        ExpectSameBytes({rows.rows, {5, 42}, r.data(), format, 4 << random_.Below(3)});
        ExpectSameBytes({rows.rows, {5, 42}, r.data(), format, 200});
      }
    }
  }
}

TEST_P(RotatePack, SameBytesOverManyTiles) {
  SCOPED_TRACE(random_.Trace());
  PagedFixture rows(random_, DType::kBF16, 700, 16, 64);
  FillWhole(rows, 700, 8);
  const std::vector<float> r = WholeRotation(64);
  for (int block : {0, 4, 8, 16}) {
    ExpectSameBytes({rows.rows, {1, 700}, r.data(), FormatOf(64, 16, 1, true), block});
  }
}

// Rotations round differently, so a choice may differ where two norms are almost equal; what is
// kept must be as large all the same.
TEST_P(RotatePack, RandomRotationsKeepAsMuch) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      const PagedFixture rows(random_, dtype, 77, 32, dim);
      const std::vector<float> r = Rotation(dim);
      for (const PackedRows& format : SomeFormats(dim)) {
        SCOPED_TRACE(NameOf(format));
        const RotatePackWork work{rows.rows, {3, 77}, r.data(), format};
        const Packed ref = Compute(RotatePackRef, work), simd = Compute(RotatePackSimd, work);
        ExpectSameLosses(simd.losses, ref.losses, 74, format.neighbours > 1);
        int different = 0;
        for (int t = 0; t < 74; ++t) {
          const std::vector<float> a =
              Unpack(&simd.bytes[static_cast<size_t>(t * format.stride)], format);
          const std::vector<float> b =
              Unpack(&ref.bytes[static_cast<size_t>(t * format.stride)], format);
          different += RelativeL2(a, b) > 1e-2 ? 1 : 0;
        }
        EXPECT_LE(different, 3);
        // Without losses the truncated channels are not even computed.
        EXPECT_TRUE(Compute(RotatePackSimd, work, false).bytes == simd.bytes);
      }
    }
  }
}

TEST_P(RotatePack, BlocksAreMeansOfRotatedRows) {
  SCOPED_TRACE(random_.Trace());
  const PagedFixture rows(random_, DType::kF32, 77, 32, 128);
  const std::vector<float> r = Rotation(128);
  const PackedRows all = FormatOf(128, 128, 1, false);
  for (int block : {4, 8, 16}) {
    const RotatePackWork work{rows.rows, {2, 77}, r.data(), all, block};
    const Packed ref = Compute(RotatePackRef, work), simd = Compute(RotatePackSimd, work);
    for (int64_t at = 0; at + 64 < static_cast<int64_t>(ref.bytes.size()); at += all.stride) {
      EXPECT_LE(RelativeL2(Unpack(&simd.bytes[static_cast<size_t>(at)], all),
                           Unpack(&ref.bytes[static_cast<size_t>(at)], all)),
                2e-3);
    }
  }
}

TEST_P(RotatePack, NaNAndInfiniteRowsDoNotReachOthers) {
  PagedFixture rows(random_, DType::kF32, 20, 16, 64);
  const std::vector<float> r = WholeRotation(64);
  FillWhole(rows, 20, 8);
  const RotatePackWork work{rows.rows, {0, 20}, r.data(), FormatOf(64, 16, 2, true)};
  const Packed before = Compute(RotatePackSimd, work, false);
  for (int c = 0; c < 64; ++c) rows.Set(7, c, c % 2 == 0 ? kNaN : kInf);
  rows.Set(8, 3, kInf);
  const Packed after = Compute(RotatePackSimd, work, false);
  for (int t : {0, 6, 9, 19}) {
    const auto at = static_cast<size_t>(t * work.format.stride);
    EXPECT_EQ(
        std::memcmp(&before.bytes[at], &after.bytes[at], static_cast<size_t>(work.format.stride)),
        0);
  }
  for (int t : {7, 8}) {
    int bits = 0;
    for (int i = 0; i < 16; ++i) {
      bits += std::popcount(
          static_cast<uint8_t>(after.bytes[static_cast<size_t>(t * work.format.stride + i)]));
    }
    EXPECT_EQ(bits, 8);
  }
}

KVS_INSTANTIATE_SIMD(RotatePack);

TEST(RotatePackRef, ARowByHand) {
  Random random;
  PagedFixture rows(random, DType::kF32, 1, 16, 64);
  std::vector<float> r(64 * 64, 0.0f);
  for (int i = 0; i < 64; ++i) rows.Set(0, i, 0), r[static_cast<size_t>(i * 64 + (i + 1) % 64)] = 1;
  // x'[i] = x[i + 1]. Ties go to the lower group, and 50 is truncated away.
  rows.Set(0, 4, 2), rows.Set(0, 41, -3), rows.Set(0, 6, 2), rows.Set(0, 51, 9);
  const PackedRows f = FormatOf(64, 2, 1, true);
  EXPECT_EQ(f.stride, 32);
  const Packed out = Compute(RotatePackRef, {rows.rows, {0, 1}, r.data(), f});
  const std::vector<float> x = Unpack(out.bytes.data(), f);
  EXPECT_EQ(x[3], 2);
  EXPECT_EQ(x[40], -3);
  EXPECT_EQ(out.bytes[0], std::byte{1 << 3});
  EXPECT_EQ(out.bytes[5], std::byte{1});
  EXPECT_EQ(LoadAs(DType::kBF16, &out.bytes[16]), 2);
  EXPECT_DOUBLE_EQ(out.losses.energy, 4 + 4 + 9 + 81);
  EXPECT_DOUBLE_EQ(out.losses.kept, 13);
  EXPECT_DOUBLE_EQ(out.losses.relative_error, std::sqrt(85.0 / 98.0));
}

}  // namespace
}  // namespace kvstrata
