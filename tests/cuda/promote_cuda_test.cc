// SPDX-License-Identifier: Apache-2.0
// promote and rebase on the GPU against ref, which follows them with a cache on the host: which
// pages are in the cache, when each was selected last, where entries point, and the bytes there;
// and attention through the cache, bit for bit as without it. Pages move between the GPU's and the
// host's memory from step to step; slots are NaN before they are written.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/random_selection.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Case {
  int batch = 1, kv_heads = 2, dim = 128, page_tokens = 16;
  Kind kind = Kind::kUnits;
  int unit_tokens = 16;
  bool per_head = true;  // lists
  int slots = 64;
  int ctas = 0;
};

std::string Describe(const Case& c) {
  return "b" + std::to_string(c.batch) + " Hkv" + std::to_string(c.kv_heads) + " d" +
         std::to_string(c.dim) + " page" + std::to_string(c.page_tokens) + " kind" +
         std::to_string(static_cast<int>(c.kind)) + " unit" + std::to_string(c.unit_tokens) +
         (c.per_head ? " per head" : "") + " slots" + std::to_string(c.slots) + " ctas" +
         std::to_string(c.ctas) + " seed " + std::to_string(TestSeed());
}

// The cache of one sequence, on the device and, for ref, on the host.
class Cache {
 public:
  Cache(const Geometry& g, int32_t page_stride, int slots)
      : rows_(static_cast<size_t>(g.layers * g.kv_heads)),
        stride_(page_stride),
        slot_count_(slots),
        slots_(static_cast<size_t>(slots) *
               static_cast<size_t>(g.layers * PageLayout::Of(g).layer_stride)),
        entries_(std::vector<uint64_t>(rows_ * static_cast<size_t>(page_stride), 0)),
        pages_(std::vector<uint64_t>(static_cast<size_t>(page_stride), 0)),
        owners_(std::vector<int32_t>(rows_ * static_cast<size_t>(slots), 0)),
        stamps_(std::vector<int32_t>(owners_.size(), 0)),
        host_slots_(slots_.size(), std::byte{0xFF}),
        host_entries_(entries_.size(), 0),
        host_pages_(pages_.size(), 0),
        host_owners_(owners_.size(), 0),
        host_stamps_(owners_.size(), 0) {}

  HotPages Device() const {
    return {entries_.get(), pages_.get(), slots_.address(), owners_.get(),
            stamps_.get(),  stride_,      slot_count_};
  }
  HotPages Host() {
    return {
        host_entries_.data(), host_pages_.data(),  reinterpret_cast<uint64_t>(host_slots_.data()),
        host_owners_.data(),  host_stamps_.data(), stride_,
        slot_count_};
  }
  // The host's entries name its own slots where the device's name those of the device.
  void ExpectSame() {
    ASSERT_EQ(owners_.Read(), host_owners_);
    ASSERT_EQ(stamps_.Read(), host_stamps_);
    ASSERT_EQ(pages_.Read(), host_pages_);
    ASSERT_TRUE(slots_.Read() == host_slots_);
    std::vector<uint64_t> entries = entries_.Read();
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t s = 0; s < static_cast<size_t>(slot_count_); ++s) {
        const int32_t owner = host_owners_[row * static_cast<size_t>(slot_count_) + s];
        if (owner == 0) continue;
        uint64_t& entry =
            entries[row * static_cast<size_t>(stride_) + static_cast<size_t>(owner - 1)];
        entry += Host().slots - slots_.address();
      }
    }
    ASSERT_EQ(entries, host_entries_);
  }

 private:
  const size_t rows_;
  const int32_t stride_, slot_count_;
  DeviceArray<std::byte> slots_;
  DeviceArray<uint64_t> entries_, pages_;
  DeviceArray<int32_t> owners_, stamps_;
  std::vector<std::byte> host_slots_;
  std::vector<uint64_t> host_entries_, host_pages_;
  std::vector<int32_t> host_owners_, host_stamps_;
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c),
        rng_(rng),
        rows_(rng, {2, c.kv_heads * kGroup, c.kv_heads, c.dim, c.page_tokens, DType::kBF16},
              Lengths(rng, c), kLongest + 64),
        counters_(std::vector<uint32_t>(static_cast<size_t>(c.batch * c.kv_heads), 0)),
        workspace_(std::vector<std::byte>(
            static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(kGroup, c.dim)))),
        q_(RandomElements(rng, DType::kBF16, Queries())),
        out_(Queries()) {
    rows_.Upload();
    const size_t bytes = rows_.memory().size();
    Check(cudaMallocHost(reinterpret_cast<void**>(&host_), bytes), "cudaMallocHost");
    std::memcpy(host_, rows_.memory().data(), bytes);
    near_.resize(static_cast<size_t>(c.batch * rows_.stride));
    Check(cudaMemcpy(near_.data(), rows_.DeviceLayer().pages, near_.size() * 8,
                     cudaMemcpyDeviceToHost),
          "reading a page table");
    is_on_host_.assign(near_.size(), 0);
    table_ = DeviceArray<uint64_t>(near_);
    tagged_ = DeviceArray<uint64_t>(near_);
    std::vector<HotPages> hot;
    for (int b = 0; b < c.batch; ++b) {
      caches_.push_back(std::make_unique<Cache>(rows_.geometry, rows_.stride, c.slots));
      hot.push_back(caches_.back()->Device());
      host_hot_.push_back(caches_.back()->Host());
    }
    hot_ = DeviceArray<HotPages>(hot);
    for (int i = 0; i < kSelections; ++i) {
      selections_.push_back(std::make_unique<RandomSelection>(
          rng, SelectionShape{c.kind, c.unit_tokens, c.per_head ? c.kv_heads : 1}, rows_.tokens));
    }
    committed_ = rows_.tokens;
    for (int32_t& n : committed_) n -= 1 + Below(rng, 20);
    device_committed_ = DeviceArray<int32_t>(committed_);
    now_ = DeviceArray<int32_t>(rows_.tokens);
    for (size_t i = 0; i < is_on_host_.size(); ++i) is_on_host_[i] = Below(rng, 4) > 0 ? 1 : 0;
    Rebase();
  }
  ~Problem() { cudaFreeHost(host_); }

  // Another selection, other places of a few pages now and then.
  void Step(int step) {
    SCOPED_TRACE("step " + std::to_string(step));
    if (step % 4 == 3) {
      for (int i = 0; i < 9; ++i) {
        is_on_host_[static_cast<size_t>(Below(rng_, static_cast<int>(is_on_host_.size())))] ^= 1;
      }
      Rebase();
    }
    const RandomSelection& selection = *selections_[static_cast<size_t>(Below(rng_, kSelections))];
    // Stamps only have to grow; lengths stay, for the selections' sake.
    std::vector<int32_t> tokens = rows_.tokens;
    for (int32_t& n : tokens) n += 1000 + step;
    now_.Write(tokens);
    Promote(selection, tokens);
    for (const auto& cache : caches_) ASSERT_NO_FATAL_FAILURE(cache->ExpectSame());
    for (const uint32_t c : counters_.Read()) ASSERT_EQ(c, 0u);
    ASSERT_EQ(Attention(selection, true), Attention(selection, false));
  }
  Promoted total;  // over all steps

 private:
  static constexpr int kGroup = 4, kLongest = 1500, kSelections = 6;

  static std::vector<int32_t> Lengths(Rng& rng, const Case& c) {
    std::vector<int32_t> lengths;
    for (int i = 0; i < c.batch; ++i) lengths.push_back(kLongest - Below(rng, 900));
    return lengths;
  }
  size_t Queries() const {
    return static_cast<size_t>(case_.batch * case_.kv_heads * kGroup * case_.dim);
  }
  PagedLayer Layer(bool hot) const {
    PagedLayer layer = rows_.DeviceLayer();
    layer.pages = table_.get();
    if (!hot) return layer;
    layer.hot = hot_.get();
    layer.hot_row = rows_.layer() * case_.kv_heads;
    return layer;
  }
  const std::byte* HostPage(size_t page) const {
    const auto sequence = static_cast<int>(page) / rows_.stride;
    const auto inside = static_cast<int>(page) % rows_.stride;
    return host_ + (rows_.PagesOf(sequence)[inside] - rows_.memory().data());
  }
  void Rebase() {
    std::vector<uint64_t> table = near_, tagged = near_;
    for (size_t i = 0; i < table.size(); ++i) {
      if (is_on_host_[i] == 0) continue;
      table[i] = reinterpret_cast<uint64_t>(HostPage(i));
      tagged[i] = table[i] | kHostPage;
    }
    table_.Write(table);
    tagged_.Write(tagged);
    for (int b = 0; b < case_.batch; ++b) {
      Cache& cache = *caches_[static_cast<size_t>(b)];
      const Geometry& g = rows_.geometry;
      const int64_t first = int64_t{b} * rows_.stride;
      RebaseBatch w{cache.Device(), tagged_.get() + first,    0, rows_.stride, g.layers,
                    g.kv_heads,     rows_.layout.layer_stride};
      Check(kvs_cuda_ops()->rebase(w, nullptr), "rebase");
      w.hot = cache.Host();
      w.pages = tagged.data() + first;
      RebaseRef(w);
      ASSERT_NO_FATAL_FAILURE(cache.ExpectSame());
    }
  }
  void Promote(const RandomSelection& selection, const std::vector<int32_t>& tokens) {
    PromoteBatch w;
    w.layer = Layer(true);
    w.selection = selection.Device();
    w.batch = case_.batch;
    w.layer_bytes = rows_.layout.layer_stride;
    w.tokens = now_.get();
    w.committed = device_committed_.get();
    w.counters = counters_.get();
    w.ctas_per_list = case_.ctas;
    Check(kvs_cuda_ops()->promote(w, nullptr), "promote");
    w.layer.hot = host_hot_.data();
    w.selection = selection.Host();
    w.tokens = tokens.data();
    w.committed = committed_.data();
    const Promoted done = PromoteRef(w);
    total.hits += done.hits;
    total.evictions += done.evictions;
    total.unplaced += done.unplaced;
  }
  std::vector<float> Attention(const RandomSelection& selection, bool hot) {
    AttendRawBatch w;
    w.layer = Layer(hot);
    w.selection = selection.Device();
    w.batch = case_.batch;
    w.group = kGroup;
    w.tokens = rows_.device_tokens();
    w.q = q_.get();
    w.q_stride = int64_t{case_.kv_heads} * kGroup * case_.dim * 2;
    w.scale = 0.1f;
    w.to = {out_.get(), DType::kF32, nullptr};
    w.workspace = workspace_.get();
    out_.Poison();
    Check(kvs_cuda_ops()->attend_raw(w, nullptr), "attend_raw");
    return out_.Read();
  }

  const Case case_;
  Rng& rng_;
  PagedBatch rows_;
  std::byte* host_ = nullptr;  // page-locked; all pages, as in rows_.memory()
  std::vector<uint64_t> near_;
  std::vector<uint8_t> is_on_host_;
  DeviceArray<uint64_t> table_, tagged_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<HotPages> host_hot_;
  DeviceArray<HotPages> hot_;
  std::vector<std::unique_ptr<RandomSelection>> selections_;
  std::vector<int32_t> committed_;
  DeviceArray<int32_t> device_committed_, now_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<std::byte> workspace_, q_;
  DeviceArray<float> out_;
};

TEST(PromoteCuda, KeepsWhatWasSelectedLast) {
  Rng rng(TestSeed());
  int64_t evictions = 0, hits = 0, unplaced = 0;
  for (const Case& c :
       {Case{}, Case{.batch = 3, .kv_heads = 8, .slots = 40},
        Case{.batch = 2, .dim = 64, .page_tokens = 32, .slots = 9, .ctas = 3},
        Case{.dim = 256, .page_tokens = 64, .unit_tokens = 32, .slots = 20},
        Case{.batch = 2, .page_tokens = 16, .unit_tokens = 64, .slots = 60},
        Case{.kv_heads = 4, .kind = Kind::kTokens, .slots = 90},
        Case{.batch = 3, .kind = Kind::kTokens, .per_head = false, .slots = 33},
        Case{.batch = 2, .kind = Kind::kWindow, .slots = 7},
        Case{
            .kv_heads = 1, .page_tokens = 32, .kind = Kind::kTokens, .slots = 2000, .ctas = 128}}) {
    SCOPED_TRACE(Describe(c));
    Problem problem(rng, c);
    for (int step = 0; step < 12; ++step) ASSERT_NO_FATAL_FAILURE(problem.Step(step));
    evictions += problem.total.evictions;
    hits += problem.total.hits;
    unplaced += problem.total.unplaced;
  }
  EXPECT_GT(hits, 1000);
  EXPECT_GT(evictions, 30);
  EXPECT_GT(unplaced, 100);
}

TEST(PromoteCuda, FollowsASmallBatch) {
  Rng rng(TestSeed());
  const Case c{.batch = 2, .slots = 9};
  SCOPED_TRACE(Describe(c));
  Problem problem(rng, c);
  for (int step = 0; step < 4; ++step) ASSERT_NO_FATAL_FAILURE(problem.Step(step));
}

TEST(PromoteCuda, RefusesOtherShapes) {
  PromoteBatch promote;
  EXPECT_NE(kvs_cuda_ops()->promote(promote, nullptr), 0);
  EXPECT_NE(kvs_cuda_ops()->rebase(RebaseBatch{}, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
