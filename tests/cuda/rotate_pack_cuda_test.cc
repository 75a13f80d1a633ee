// SPDX-License-Identifier: Apache-2.0
// rotate_pack on the GPU against ref, on fresh random inputs; outputs are 0xFF before.
//
// The GPU's x' is not ref's to the last bit, so two groups of nearly equal norms may change places.
// A row is right if every group that differs is such a near-tie, and what both keep is equal but
// for the rounding to bf16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/head_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr float kTolerance = 3e-5f;  // x' by the row's norm: R as two bf16 numbers, fp32 sums

struct ItemCase {
  Run run;
  int keep, neighbours, block;  // block 0: no blocks
};

struct Case {
  HeadRowShape shape;
  bool truncated = true;
  std::vector<ItemCase> items;
};

// An orthogonal matrix: a product of reflections.
std::vector<float> RandomOrthogonal(Rng& rng, int dim) {
  const auto d = static_cast<size_t>(dim);
  std::vector<double> r(d * d), u(d);
  for (size_t i = 0; i < d; ++i) r[i * d + i] = 1;
  for (int n = 0; n < 6; ++n) {
    double norm = 0;
    for (double& x : u) x = Normal(rng), norm += x * x;
    for (size_t i = 0; i < d; ++i) {
      double dot = 0;
      for (size_t c = 0; c < d; ++c) dot += r[i * d + c] * u[c];
      for (size_t c = 0; c < d; ++c) r[i * d + c] -= 2 * dot / norm * u[c];
    }
  }
  return {r.begin(), r.end()};
}

// One item on the host: ref's bytes and the rotated rows that they are of.
struct Reference {
  PackedRows format;
  std::vector<std::byte> rows, blocks;
  std::vector<std::vector<double>> x_rows, x_blocks;
  double energy = 0, kept = 0, relative_error = 0;
};

std::vector<double> RotatedRow(const PagedRows& rows, const std::vector<float>& r, int32_t t) {
  const auto d = static_cast<size_t>(rows.dim);
  std::vector<double> out(d);
  for (size_t i = 0; i < d; ++i) {
    for (size_t c = 0; c < d; ++c) {
      out[i] += double{r[i * d + c]} *
                LoadFloat(rows.Row(t) + static_cast<int64_t>(c) * SizeOf(rows.dtype), rows.dtype);
    }
  }
  return out;
}

Reference MakeReference(const Case& c, const ItemCase& item, const PagedRows& rows,
                        const std::vector<float>& r) {
  Reference ref;
  ref.format = PackedFormat(c.shape.head_dim, item.keep, item.neighbours, c.truncated);
  const int32_t n = item.run.end - item.run.begin;
  if (n == 0) return ref;
  ref.rows.resize(static_cast<size_t>(n * ref.format.stride));
  RotatePackWork work;
  work.rows = rows;
  work.run = item.run;
  work.r = r.data();
  work.format = ref.format;
  work.out = ref.rows.data();
  work.energy = &ref.energy;
  work.kept = &ref.kept;
  work.relative_error = &ref.relative_error;
  RotatePackRef(&work, 1, InlineExecutor());
  for (int32_t t = item.run.begin; t < item.run.end; ++t) {
    ref.x_rows.push_back(RotatedRow(rows, r, t));
  }
  if (item.block == 0) return ref;
  for (size_t t = 0; t < ref.x_rows.size(); t += static_cast<size_t>(item.block)) {
    const size_t end = std::min(t + static_cast<size_t>(item.block), ref.x_rows.size());
    std::vector<double> mean(ref.x_rows[t].size());
    for (size_t i = t; i < end; ++i) {
      for (size_t k = 0; k < mean.size(); ++k) {
        mean[k] += ref.x_rows[i][k] / static_cast<double>(end - t);
      }
    }
    ref.x_blocks.push_back(mean);
  }
  ref.blocks.resize(ref.x_blocks.size() * static_cast<size_t>(ref.format.stride));
  work.block = item.block;
  work.out = ref.blocks.data();
  work.energy = work.kept = work.relative_error = nullptr;
  RotatePackRef(&work, 1, InlineExecutor());
  return ref;
}

bool HasBit(const std::byte* row, int b) {
  return (row[b / 8] & (std::byte{1} << (b % 8))) != std::byte{0};
}

// "" or what is wrong with packed row `got`. norm: of what errors of x' are a share of.
std::string Compare(const PackedRows& f, const std::vector<double>& x, double norm,
                    const std::byte* got, const std::byte* want) {
  const auto group_norm = [&](int b) {
    double sum = 0;
    for (int i = 0; i < f.neighbours; ++i)
      sum += std::fabs(x[static_cast<size_t>(b * f.neighbours + i)]);
    return sum;
  };
  double least = 1e30;  // norm that ref keeps
  int kept = 0;
  for (int b = 0; b < f.bits; ++b) {
    if (HasBit(want, b)) least = std::min(least, group_norm(b));
    kept += HasBit(got, b) ? 1 : 0;
  }
  if (kept != f.keep / f.neighbours) return "keeps " + std::to_string(kept) + " groups";
  const double slack = 2 * kTolerance * f.neighbours * norm;
  const std::byte* value = got + f.value_offset;
  for (int b = 0; b < f.bits; ++b) {
    if (HasBit(got, b) != HasBit(want, b) && std::fabs(group_norm(b) - least) > slack) {
      return "group " + std::to_string(b) + " of norm " + std::to_string(group_norm(b)) +
             " is no near-tie of " + std::to_string(least);
    }
    if (!HasBit(got, b)) continue;
    for (int i = 0; i < f.neighbours; ++i, value += 2) {
      const double exact = x[static_cast<size_t>(b * f.neighbours + i)];
      const double off = std::fabs(LoadFloat(value, DType::kBF16) - exact);
      if (!(off <= std::fabs(exact) / 256 + kTolerance * norm)) {
        return "channel " + std::to_string(b * f.neighbours + i) + " is off by " +
               std::to_string(off);
      }
    }
  }
  for (int b = f.bits; b < f.value_offset * 8; ++b) {
    if (HasBit(got, b)) return "a bit behind the bitmap";
  }
  for (const std::byte* end = got + f.stride; value < end; ++value) {
    if (*value != std::byte{0}) return "padding that is not 0";
  }
  return {};
}

double NormOf(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}

// Rows that differ from ref at all are to be few.
int ExpectRows(const Reference& ref, const std::vector<std::vector<double>>& x, double norm,
               const std::vector<std::byte>& got, const std::vector<std::byte>& want,
               const char* what) {
  int other = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<int64_t>(i) * ref.format.stride;
    const std::byte *g = got.data() + at, *w = want.data() + at;
    const std::string wrong = Compare(ref.format, x[i], std::max(norm, NormOf(x[i])), g, w);
    EXPECT_EQ(wrong, "") << what << " " << i;
    if (!wrong.empty()) return 0;
    other += std::memcmp(g, w, static_cast<size_t>(ref.format.value_offset)) != 0 ? 1 : 0;
  }
  return other;
}

struct DeviceItem {
  DeviceArray<float> r;
  DeviceArray<std::byte> rows, blocks;
  DeviceArray<PackLoss> losses;
};

int32_t ChunksOf(const Run& run) {
  return (run.end - run.begin + kPackChunkRows - 1) / kPackChunkRows;
}

void ExpectLosses(const Reference& ref, const std::vector<PackLoss>& losses) {
  PackLoss sum{};
  for (const PackLoss& loss : losses) {
    sum.energy += loss.energy;
    sum.kept += loss.kept;
    sum.relative_error += loss.relative_error;
  }
  const auto rows = static_cast<double>(ref.x_rows.size());
  EXPECT_NEAR(sum.energy, ref.energy, 1e-4 * ref.energy);
  EXPECT_NEAR(sum.kept, ref.kept, 1e-4 * ref.energy);
  EXPECT_NEAR(sum.relative_error, ref.relative_error, 2e-3 * rows);
}

void Check(Rng& rng, const Case& c) {
  int32_t tokens = 1, rows_max = 0;
  for (const ItemCase& item : c.items) {
    tokens = std::max(tokens, item.run.end);
    rows_max = std::max(rows_max, item.run.end - item.run.begin);
  }
  HeadPages pages(rng, static_cast<int>(c.items.size() + 1) / 2, tokens, c.shape);
  std::vector<Reference> refs;
  std::vector<DeviceItem> device;
  std::vector<RotatePackItem> items;
  for (size_t i = 0; i < c.items.size(); ++i) {
    const ItemCase& item = c.items[i];
    const std::vector<float> r = RandomOrthogonal(rng, c.shape.head_dim);
    refs.push_back(MakeReference(c, item, pages.Host(static_cast<int>(i)), r));
    device.push_back({DeviceArray<float>(r), DeviceArray<std::byte>(refs[i].rows.size()),
                      DeviceArray<std::byte>(refs[i].blocks.size()),
                      DeviceArray<PackLoss>(static_cast<size_t>(ChunksOf(item.run)))});
    const DeviceItem& d = device.back();
    items.push_back({pages.Device(static_cast<int>(i), item.run), d.r.address(), d.rows.address(),
                     item.block > 0 ? d.blocks.address() : 0, i % 3 == 2 ? 0 : d.losses.address(),
                     item.keep, item.neighbours, item.block, 0});
  }
  const DeviceArray<RotatePackItem> device_items(items);
  const RotatePackBatch work{c.shape, device_items.get(), static_cast<int32_t>(items.size()),
                             rows_max, c.truncated};
  ASSERT_EQ(OpsOf<PackedOps>(kvs_cuda_ops()->packed).rotate_pack(work, nullptr), 0);
  int other = 0, rows = 0;
  for (size_t i = 0; i < c.items.size(); ++i) {
    SCOPED_TRACE("item " + std::to_string(i) + " keep " + std::to_string(c.items[i].keep) + " g" +
                 std::to_string(c.items[i].neighbours) + " b" + std::to_string(c.items[i].block) +
                 " rows " + std::to_string(refs[i].x_rows.size()));
    double norm = 0;  // the largest row's: errors of means are of their rows' size
    for (const auto& x : refs[i].x_rows) norm = std::max(norm, NormOf(x));
    other += ExpectRows(refs[i], refs[i].x_rows, 0, device[i].rows.Read(), refs[i].rows, "row");
    other += ExpectRows(refs[i], refs[i].x_blocks, norm, device[i].blocks.Read(), refs[i].blocks,
                        "block");
    rows += static_cast<int>(refs[i].x_rows.size() + refs[i].x_blocks.size());
    if (items[i].losses != 0) ExpectLosses(refs[i], device[i].losses.Read());
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_LE(other, rows / 50 + 1) << "rows that keep other groups than ref, of " << rows;
}

TEST(RotatePackCuda, AgreesWithRef) {
  Rng rng(TestSeed());
  for (int dim : {64, 128, 256}) {
    for (int page : {16, 32, 64}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        for (bool truncated : {true, false}) {
          Case c{ShapeOf(dim, page, dtype), truncated, {}};
          for (int neighbours : {1, 2, 4}) {
            const int keep = dim / 8 * (1 + Below(rng, 3));
            const int32_t begin = Below(rng, 50);
            c.items.push_back(
                {{begin, begin + 1 + Below(rng, 700)}, keep, neighbours, 4 << Below(rng, 3)});
            c.items.push_back({{begin, begin + 32}, keep, neighbours, 8});
            c.items.push_back({{5, 5 + Below(rng, 40)}, 3 * neighbours, neighbours, 0});
          }
          SCOPED_TRACE("d" + std::to_string(dim) + " page" + std::to_string(page) + " dtype" +
                       std::to_string(static_cast<int>(dtype)) + (truncated ? " cut" : ""));
          Check(rng, c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(RotatePackCuda, SeveralChunks) {
  Rng rng(TestSeed() + 1);
  const Case c{ShapeOf(128, 16, DType::kBF16),
               true,
               {{{3, 3 + kPackChunkRows + 1000 + Below(rng, 3000)}, 32, 1, 8},
                {{0, kPackChunkRows}, 48, 2, 16},
                {{0, 0}, 32, 1, 8},
                {{40, 41}, 96, 4, 4}}};
  Check(rng, c);
}

// Equal norms: the lower group. Nothing of this is near: all x' are 0, or R the unit matrix.
TEST(RotatePackCuda, TiesGoToTheLowerGroup) {
  constexpr int kDim = 128, kRows = 40;
  Rng rng(TestSeed() + 2);
  HeadPages pages(rng, 1, kRows, ShapeOf(kDim, 16, DType::kBF16));
  std::vector<std::byte>& bytes = pages.pages().host();
  for (size_t i = 0; i < bytes.size() / 2; ++i) {
    const float x = i / kDim % 3 == 0 ? 0.0f : static_cast<float>(Below(rng, 4) - 2);
    StoreFloat(&bytes[2 * i], DType::kBF16, x);
  }
  pages.pages().Upload();
  std::vector<float> unit(kDim * kDim);
  for (size_t i = 0; i < kDim; ++i) unit[i * kDim + i] = 1;
  const DeviceArray<float> r(unit);
  for (int neighbours : {1, 2, 4}) {
    const PackedRows format = PackedFormat(kDim, 32, neighbours, true);
    std::vector<std::byte> want(static_cast<size_t>(kRows * format.stride));
    RotatePackWork ref;
    ref.rows = pages.Host(1);
    ref.run = {0, kRows};
    ref.r = unit.data();
    ref.format = format;
    ref.out = want.data();
    RotatePackRef(&ref, 1, InlineExecutor());
    const DeviceArray<std::byte> got(want.size());
    const DeviceArray<RotatePackItem> items(std::vector<RotatePackItem>{
        {pages.Device(1, {0, kRows}), r.address(), got.address(), 0, 0, 32, neighbours, 0, 0}});
    const RotatePackBatch work{ShapeOf(kDim, 16, DType::kBF16), items.get(), 1, kRows, true};
    ASSERT_EQ(OpsOf<PackedOps>(kvs_cuda_ops()->packed).rotate_pack(work, nullptr), 0);
    EXPECT_EQ(got.Read(), want) << neighbours << " neighbours";
  }
}

TEST(RotatePackCuda, RefusesOtherShapes) {
  RotatePackBatch work;
  work.shape = ShapeOf(96, 16, DType::kBF16);
  work.count = work.rows_max = 1;
  EXPECT_NE(OpsOf<PackedOps>(kvs_cuda_ops()->packed).rotate_pack(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
