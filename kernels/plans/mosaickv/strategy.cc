// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/strategy.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/pages/element.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"

namespace kvstrata {
namespace {

// Most compressing first. Elements kept are head_dim * sixteenths / 16.
constexpr std::array<int32_t, 3> kKeptSixteenths = {2, 4, 6};
constexpr std::array<int32_t, 3> kNeighbours = {4, 2, 1};

constexpr int32_t kTileRows = 2048;
// By how much the sum of squares may differ between the covariance and the rotated rows.
constexpr double kEnergySlack = 1.001;

// Whether |X - X^|_F / |X|_F < limit when packed so, before rounding. Gives up as soon as what was
// dropped is too much for any rest.
bool ChannelsFit(const RotatedRows& x, Run run, const PackedRows& format, double limit,
                 const Backend& backend) {
  std::vector<std::byte> scratch(format.stride * std::min<int64_t>(kTileRows, run.end - run.begin));
  double energy = 0, kept = 0;
  for (int32_t begin = run.begin; begin < run.end; begin += kTileRows) {
    double tile_energy = 0, tile_kept = 0;
    RotatePackWork work;
    work.rows = x.rows;
    work.run = {begin, std::min(begin + kTileRows, run.end)};
    work.r = x.r;
    work.format = format;
    work.out = scratch.data();
    work.energy = &tile_energy;
    work.kept = &tile_kept;
    OpsOf<PackedOps>(backend.packed).rotate_pack(&work, 1, InlineExecutor());
    energy += tile_energy;
    kept += tile_kept;
    if (energy - kept > limit * limit * x.energy * kEnergySlack) return false;
  }
  return (energy > 0 ? std::sqrt(std::max(0.0, 1 - kept / energy)) : 0.0) < limit;
}

// Sums of blocks of one length: how much of the variance lies between them.
class Blocks {
 public:
  Blocks(int32_t length, size_t dim) : length_(length), sum_(dim) {}

  // Adds a block half as long, or a single row.
  void Add(const std::vector<double>& sum, int32_t rows) {
    for (size_t c = 0; c < sum.size(); ++c) sum_[c] += sum[c];
    rows_ += rows;
  }
  bool IsFull() const { return rows_ == length_; }
  bool IsEmpty() const { return rows_ == 0; }
  const std::vector<double>& sum() const { return sum_; }
  int32_t rows() const { return rows_; }

  void Close() {
    between_ += std::inner_product(sum_.begin(), sum_.end(), sum_.begin(), 0.0) / rows_;
    std::ranges::fill(sum_, 0.0);
    rows_ = 0;
  }
  // Sum over blocks of rows * |mean|^2.
  double between() const { return between_; }

 private:
  int32_t length_;
  int32_t rows_ = 0;
  std::vector<double> sum_;
  double between_ = 0;
};

// Hands full blocks on to the next longer ones.
void CloseUpwards(std::vector<Blocks>* chain) {
  for (size_t i = 0; i < chain->size(); ++i) {
    Blocks& b = (*chain)[i];
    if (!b.IsFull()) return;
    if (i + 1 < chain->size()) (*chain)[i + 1].Add(b.sum(), b.rows());
    b.Close();
  }
}

template <typename T>
void Difference(const std::byte* row, const std::vector<double>& origin, std::vector<double>* out) {
  const T* x = reinterpret_cast<const T*>(row);
  for (size_t c = 0; c < out->size(); ++c) (*out)[c] = double{ToFloat(x[c])} - origin[c];
}

void Subtract(DType dtype, const std::byte* row, const std::vector<double>& origin,
              std::vector<double>* out) {
  WithElement(dtype, [&]<typename T>() { Difference<T>(row, origin, out); });
}

}  // namespace

Strategy FixedStrategy(const PackedOptions& options, int32_t head_dim) {
  const int32_t channels = options.truncate ? head_dim - head_dim / 4 : head_dim;
  const int32_t keep = std::min(options.keep > 0 ? options.keep : head_dim / 4, channels);
  return {std::max(keep / options.neighbours, 1) * options.neighbours, options.neighbours,
          options.block};
}

Strategy SearchStrategy(const PackedOptions& options, const RotatedRows& keys,
                        const RotatedRows& values, Run run, const Backend& backend) {
  const int32_t dim = keys.rows.dim;
  const auto fits = [&](int32_t keep, int32_t neighbours) {
    const PackedRows format = PackedFormat(dim, keep, neighbours, options.truncate);
    return ChannelsFit(keys, run, format, options.max_channel_loss, backend) &&
           ChannelsFit(values, run, format, options.max_channel_loss, backend);
  };
  Strategy found = {dim * kKeptSixteenths.back() / 16, kNeighbours.back(), kSearchedBlocks.back()};
  const auto search_channels = [&] {
    for (const int32_t sixteenths : kKeptSixteenths) {
      for (const int32_t neighbours : kNeighbours) {
        if (!fits(dim * sixteenths / 16, neighbours)) continue;
        found.keep = dim * sixteenths / 16;
        found.neighbours = neighbours;
        return;
      }
    }
  };
  search_channels();
  const std::array<double, 3> losses = BlockLosses(keys.rows, run);
  for (size_t i = 0; i < losses.size(); ++i) {
    if (losses[i] >= options.max_block_loss) continue;
    found.block = kSearchedBlocks[i];
    break;
  }
  return found;
}

std::array<double, 3> BlockLosses(const PagedRows& rows, Run run) {
  const auto dim = static_cast<size_t>(rows.dim);
  // Relative to the first row, so that equal rows have no variance at all, not nearly none.
  std::vector<double> origin(dim), x(dim), total(dim);
  Subtract(rows.dtype, rows.Row(run.begin), total, &origin);
  std::vector<Blocks> chain;
  for (size_t i = kSearchedBlocks.size(); i-- > 0;) chain.emplace_back(kSearchedBlocks[i], dim);
  double squares = 0;
  for (int32_t t = run.begin; t < run.end; ++t) {
    Subtract(rows.dtype, rows.Row(t), origin, &x);
    squares += std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    for (size_t c = 0; c < dim; ++c) total[c] += x[c];
    chain[0].Add(x, 1);
    CloseUpwards(&chain);
  }
  // From the shortest on, each once: what is left of a block belongs to the longer ones too.
  for (size_t i = 0; i < chain.size(); ++i) {
    if (chain[i].IsEmpty()) continue;
    if (i + 1 < chain.size()) chain[i + 1].Add(chain[i].sum(), chain[i].rows());
    chain[i].Close();
  }
  const double centre = std::inner_product(total.begin(), total.end(), total.begin(), 0.0);
  const double variance = squares - centre / (run.end - run.begin);
  std::array<double, 3> losses = {};
  for (size_t i = 0; i < losses.size() && variance > 0; ++i) {
    losses[i] = (squares - chain[chain.size() - 1 - i].between()) / variance;
  }
  return losses;
}

}  // namespace kvstrata
