// SPDX-License-Identifier: Apache-2.0
// cascade on the GPU against ref: scores of pages, chunks and grids, of units that are filling too,
// and the pages that are kept by these scores.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayers = 2, kBatch = 3;

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, kv_heads = 2;
  int32_t pages_per_chunk = 4, chunks_per_grid = 3, sinks = 1, window = 2;
  std::vector<double> rho = {0.5, 0.6, 0.4};
  std::vector<int32_t> lengths = {1000, 777, 64};
};

std::string Describe(const Case& c) {
  return std::string(NameOf(c.dtype)) + " d" + std::to_string(c.dim) + " chunk " +
         std::to_string(c.pages_per_chunk) + " grid " + std::to_string(c.chunks_per_grid) +
         " sinks " + std::to_string(c.sinks) + " window " + std::to_string(c.window) + " seed " +
         std::to_string(TestSeed());
}

// Rows of the index are drawn: what is chosen depends on them, not on what they are means of.
class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c),
        geometry_{kLayers, c.kv_heads, c.kv_heads, c.dim, kPage, c.dtype},
        pages_max_(*std::ranges::max_element(c.lengths) / kPage),
        keys_(kBatch, pages_max_ + 1, geometry_.page_bytes(), c.dtype, rng) {
    const int32_t units[] = {kPage, c.pages_per_chunk, c.chunks_per_grid};
    index_ = MakeIndexLayout(IndexLayout::Kind::kMean, geometry_, units, 3);
    blocks_ = std::make_unique<ScatteredPages>(kBatch, index_.BlocksFor((pages_max_ + 1) * kPage),
                                               index_.block_bytes, DType::kBF16, rng);
    const auto bytes = kBatch * CascadeScratchBytes(Channels(), pages_max_);
    scratch_ = DeviceArray<std::byte>(static_cast<size_t>(bytes));
    tokens_ = DeviceArray<int32_t>(kBatch);
    units_ = DeviceArray<int32_t>(static_cast<size_t>(kBatch * pages_max_));
    counts_ = DeviceArray<int32_t>(kBatch);
  }

  CascadeBatch Work() const {
    CascadeBatch w = Shape();
    w.keys.pages = keys_.addresses();
    for (DeviceRows& rows : w.levels) rows.pages = blocks_->addresses();
    w.tokens = tokens_.get();
    w.scratch = scratch_.get();
    w.units = units_.get();
    w.counts = counts_.get();
    return w;
  }
  // The graph is of Work(). A length below 0 leaves what is there.
  void Expect(CapturedGraph& graph, const std::vector<int32_t>& tokens) {
    SCOPED_TRACE(Describe(case_));
    tokens_.Write(tokens);
    units_.Poison();
    counts_.Poison();
    graph.Replay();
    CascadeBatch w = Shape();
    const std::vector<uint64_t> keys = HostTable(keys_), blocks = HostTable(*blocks_);
    std::vector<int32_t> units(units_.size(), -1), counts(counts_.size(), -1);
    w.keys.pages = keys.data();
    for (DeviceRows& rows : w.levels) rows.pages = blocks.data();
    w.tokens = tokens.data();
    w.units = units.data();
    w.counts = counts.data();
    std::vector<CascadeScores> scores = ScoreCascadeRef(w);
    ExpectScores(&scores);
    KeepCascadeRef(w, scores);
    EXPECT_EQ(counts_.Read(), counts);
    EXPECT_EQ(units_.Read(), units);
  }

 private:
  static constexpr int kPage = 16;

  int64_t Channels() const { return int64_t{kLayers} * case_.kv_heads * case_.dim; }
  // All but addresses of rows and of what is written.
  CascadeBatch Shape() const {
    CascadeBatch w;
    const PageLayout layout = PageLayout::Of(geometry_);
    w.keys = {nullptr,
              keys_.stride(),
              kPage,
              case_.kv_heads,
              case_.dim,
              case_.dtype,
              layout.KeyOffset(0, 0, 0),
              layout.head_stride,
              layout.slot_stride};
    w.key_layer_stride = layout.layer_stride;
    for (int level = 0; level < 3; ++level) {
      w.levels[level] = IndexRows(nullptr, blocks_->stride(), index_, level, 0, 0);
    }
    w.layers = kLayers;
    w.page_tokens = kPage;
    w.pages_per_chunk = case_.pages_per_chunk;
    w.chunks_per_grid = case_.chunks_per_grid;
    w.sinks = case_.sinks;
    w.window = case_.window;
    std::ranges::copy(case_.rho, w.rho);
    w.batch = kBatch;
    w.pages_max = w.list_stride = pages_max_;
    return w;
  }
  std::vector<uint64_t> HostTable(const ScatteredPages& pages) const {
    std::vector<uint64_t> table;
    for (int i = 0; i < kBatch * pages.stride(); ++i) {
      table.push_back(reinterpret_cast<uint64_t>(pages.TableOf(0)[i]));
    }
    return table;
  }
  // Those of the device, which ref goes on with: near-ties are kept alike.
  void ExpectScores(std::vector<CascadeScores>* scores) const {
    const std::vector<std::byte> scratch = scratch_.Read();
    const auto bytes = static_cast<size_t>(CascadeScratchBytes(Channels(), pages_max_));
    for (size_t b = 0; b < kBatch; ++b) {
      const std::byte* at = scratch.data() + b * bytes + CascadeScoresAt(Channels());
      for (std::vector<float>& level : (*scores)[b]) {
        std::vector<float> got(level.size());
        std::memcpy(got.data(), at, got.size() * sizeof(float));
        at += got.size() * sizeof(float);
        for (size_t u = 0; u < got.size(); ++u) {
          ASSERT_NEAR(got[u], level[u], 3e-6 * static_cast<double>(Channels()))
              << "sequence " << b << " unit " << u;
        }
        level = got;
      }
    }
  }

  const Case case_;
  const Geometry geometry_;
  const int32_t pages_max_;
  ScatteredPages keys_;
  IndexLayout index_;
  std::unique_ptr<ScatteredPages> blocks_;
  DeviceArray<std::byte> scratch_;
  DeviceArray<int32_t> tokens_, units_, counts_;
};

TEST(CascadeCuda, ShapesAndLengths) {
  Rng rng(TestSeed());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 128, 256}) {
      for (const auto& [chunk, grid] : {std::pair{4, 3}, {1, 1}, {8, 2}, {5, 7}}) {
        Case c{.dtype = dtype, .dim = dim, .pages_per_chunk = chunk, .chunks_per_grid = grid};
        c.sinks = Below(rng, 4);
        c.window = 1 + Below(rng, 4);
        c.lengths = {6000, 6000, 6000};
        Problem problem(rng, c);
        const CascadeBatch w = problem.Work();
        CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->cascade(w, stream); });
        problem.Expect(graph, {6000, 1, 16});
        problem.Expect(graph, {1 + Below(rng, 6000), 100 + Below(rng, 100), -1});
        problem.Expect(graph, {16 * chunk * grid, 16 * chunk * grid + 1, 16 * chunk - 1});
      }
    }
  }
}

TEST(CascadeCuda, SharesFromNothingToEverything) {
  Rng rng(TestSeed());
  for (const double rho : {0.001, 0.3, 1.0}) {
    Problem problem(rng, {.rho = {rho, rho, rho}, .lengths = {3000, 3000, 3000}});
    const CascadeBatch w = problem.Work();
    CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->cascade(w, stream); });
    problem.Expect(graph, {3000, 2999, 500 + Below(rng, 2000)});
  }
}

TEST(CascadeCuda, RefusesOtherShapes) {
  Rng rng(TestSeed());
  const Problem problem(rng, {});
  CascadeBatch w = problem.Work();
  w.list_stride = w.pages_max - 1;
  EXPECT_NE(kvs_cuda_ops()->cascade(w, nullptr), 0);
  w = problem.Work();
  w.window = 0;
  EXPECT_NE(kvs_cuda_ops()->cascade(w, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
