// promote and rebase on the GPU against what their header says, done on the host from the state
// before: which pages are in the cache, when each was selected last, where entries point, and the
// bytes there; and attention through the cache, bit for bit as without it. Pages move between the
// GPU's and the host's memory from step to step; slots are NaN before they are written.
#include <gtest/gtest.h>

#include <array>
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

// What a cache holds, on the host.
struct CacheState {
  std::vector<uint64_t> entries, pages;
  std::vector<int32_t> owners, stamps;
};

// The cache of one sequence.
class Cache {
 public:
  Cache(const Geometry& g, int32_t page_stride, int slots)
      : layer_bytes_(PageLayout::Of(g).layer_stride),
        rows_(static_cast<size_t>(g.layers * g.kv_heads)),
        stride_(static_cast<size_t>(page_stride)),
        slot_count_(static_cast<size_t>(slots)),
        slots_(slot_count_ * static_cast<size_t>(g.layers * layer_bytes_)),
        entries_(std::vector<uint64_t>(rows_ * stride_, 0)),
        pages_(std::vector<uint64_t>(stride_, 0)),
        owners_(std::vector<int32_t>(rows_ * slot_count_, 0)),
        stamps_(std::vector<int32_t>(rows_ * slot_count_, 0)) {}

  HotPages Table() const {
    return {entries_.get(),
            pages_.get(),
            slots_.address(),
            owners_.get(),
            stamps_.get(),
            static_cast<int32_t>(stride_),
            static_cast<int32_t>(slot_count_)};
  }
  CacheState Read() const {
    return {entries_.Read(), pages_.Read(), owners_.Read(), stamps_.Read()};
  }
  // Where an entry of `layer` points to that means slot `slot`.
  uint64_t Entry(int layer, size_t slot) const {
    const auto of_layer = static_cast<size_t>(layer) * slot_count_;
    return slots_.address() +
           (of_layer + slot - static_cast<size_t>(layer)) * static_cast<size_t>(layer_bytes_);
  }
  std::vector<std::byte> Slots() const { return slots_.Read(); }

 private:
  int64_t layer_bytes_;
  size_t rows_, stride_, slot_count_;
  DeviceArray<std::byte> slots_;
  DeviceArray<uint64_t> entries_, pages_;
  DeviceArray<int32_t> owners_, stamps_;
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
    is_far_.assign(near_.size(), 0);
    table_ = DeviceArray<uint64_t>(near_);
    tagged_ = DeviceArray<uint64_t>(near_);
    std::vector<HotPages> hot;
    for (int b = 0; b < c.batch; ++b) {
      caches_.push_back(std::make_unique<Cache>(rows_.geometry, rows_.stride, c.slots));
      hot.push_back(caches_.back()->Table());
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
    for (size_t i = 0; i < is_far_.size(); ++i) is_far_[i] = Below(rng, 4) > 0 ? 1 : 0;
    Rebase();
  }
  ~Problem() { cudaFreeHost(host_); }

  // Another selection, other places of a few pages now and then.
  void Step(int step) {
    SCOPED_TRACE("step " + std::to_string(step));
    if (step % 4 == 3) {
      for (int i = 0; i < 9; ++i) {
        is_far_[static_cast<size_t>(Below(rng_, static_cast<int>(is_far_.size())))] ^= 1;
      }
      Rebase();
    }
    const RandomSelection& selection = *selections_[static_cast<size_t>(Below(rng_, kSelections))];
    std::vector<CacheState> before;
    for (const auto& cache : caches_) before.push_back(cache->Read());
    // Stamps only have to grow; lengths stay, for the selections' sake.
    std::vector<int32_t> tokens = rows_.tokens;
    for (int32_t& n : tokens) n += 1000 + step;
    now_.Write(tokens);
    Promote(selection);
    for (int b = 0; b < case_.batch; ++b) {
      for (int head = 0; head < case_.kv_heads; ++head) {
        ASSERT_NO_FATAL_FAILURE(Verify(selection, b, head, tokens[static_cast<size_t>(b)],
                                       before[static_cast<size_t>(b)]));
      }
    }
    for (const uint32_t c : counters_.Read()) ASSERT_EQ(c, 0u);
    ASSERT_EQ(Attention(selection, true), Attention(selection, false));
  }
  int64_t evictions = 0, hits = 0, unplaced = 0;

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
      if (is_far_[i] == 0) continue;
      table[i] = reinterpret_cast<uint64_t>(HostPage(i));
      tagged[i] = table[i] | kFarPage;
    }
    table_.Write(table);
    tagged_.Write(tagged);
    for (int b = 0; b < case_.batch; ++b) {
      const CacheState before = caches_[static_cast<size_t>(b)]->Read();
      const Geometry& g = rows_.geometry;
      const RebaseBatch w{caches_[static_cast<size_t>(b)]->Table(),
                          tagged_.get() + int64_t{b} * rows_.stride,
                          0,
                          rows_.stride,
                          g.layers,
                          g.kv_heads,
                          rows_.layout.layer_stride};
      Check(kvs_cuda_ops()->rebase(w, nullptr), "rebase");
      ASSERT_NO_FATAL_FAILURE(VerifyRebased(b, before, tagged));
    }
  }
  void VerifyRebased(int b, const CacheState& before, const std::vector<uint64_t>& tagged) const {
    const CacheState after = caches_[static_cast<size_t>(b)]->Read();
    const auto stride = static_cast<size_t>(rows_.stride);
    const auto slots = static_cast<size_t>(case_.slots);
    CacheState want = before;
    for (size_t p = 0; p < stride; ++p) {
      const uint64_t now = tagged[static_cast<size_t>(b) * stride + p];
      if (before.pages[p] == now) continue;
      want.pages[p] = now;
      for (size_t row = 0; row < want.entries.size() / stride; ++row) {
        want.entries[row * stride + p] = now & ~kFarPage;
        for (size_t s = row * slots; s < (row + 1) * slots; ++s) {
          if (want.owners[s] == static_cast<int32_t>(p) + 1) want.owners[s] = want.stamps[s] = 0;
        }
      }
    }
    ASSERT_EQ(after.pages, want.pages);
    ASSERT_EQ(after.entries, want.entries);
    ASSERT_EQ(after.owners, want.owners);
    ASSERT_EQ(after.stamps, want.stamps);
  }
  void Promote(const RandomSelection& selection) {
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
  }
  // Pages of the host's that the head attends, complete ones, ascending.
  std::vector<int32_t> Wanted(const RandomSelection& selection, int b, int head) const {
    const int32_t n = rows_.tokens[static_cast<size_t>(b)];
    std::vector<int32_t> pages;
    const std::vector<kvstrata::Run> runs = selection.Runs(b, head, n);
    if (selection.IsFull(b)) return pages;
    for (const kvstrata::Run& run : runs) {
      for (int32_t t = run.begin; t < run.end; ++t) {
        const int32_t page = t / case_.page_tokens;
        const bool complete = (page + 1) * case_.page_tokens <= committed_[static_cast<size_t>(b)];
        if (!complete || is_far_[static_cast<size_t>(b * rows_.stride + page)] == 0) continue;
        if (pages.empty() || pages.back() != page) pages.push_back(page);
      }
    }
    return pages;
  }
  void Verify(const RandomSelection& selection, int b, int head, int32_t now,
              const CacheState& before) {
    const auto slots = static_cast<size_t>(case_.slots), stride = static_cast<size_t>(rows_.stride);
    const int layer = rows_.layer();
    const auto row = static_cast<size_t>(layer * case_.kv_heads + head);
    const auto slice = [row](const auto& all, size_t each) {
      return std::vector(all.begin() + static_cast<std::ptrdiff_t>(row * each),
                         all.begin() + static_cast<std::ptrdiff_t>((row + 1) * each));
    };
    std::vector<int32_t> owners = slice(before.owners, slots), stamps = slice(before.stamps, slots);
    std::vector<uint64_t> entries = slice(before.entries, stride);

    std::vector<int32_t> missing;
    std::vector<uint8_t> selected(slots, 0);
    for (const int32_t page : Wanted(selection, b, head)) {
      const auto at = std::ranges::find(owners, page + 1);
      if (at == owners.end()) {
        missing.push_back(page);
        continue;
      }
      const auto slot = static_cast<size_t>(at - owners.begin());
      selected[slot] = 1;
      stamps[slot] = now;
      ++hits;
    }
    std::vector<size_t> oldest;
    for (size_t s = 0; s < slots; ++s) {
      if (selected[s] == 0) oldest.push_back(s);
    }
    std::ranges::stable_sort(oldest, {}, [&](size_t s) { return stamps[s]; });
    const size_t count = std::min(missing.size(), oldest.size());
    unplaced += static_cast<int64_t>(missing.size() - count);
    oldest.resize(count);
    if (count > 0) {  // of the youngest ones the lower slots, behind all older ones, in their order
      const int32_t youngest = stamps[oldest.back()];
      std::ranges::sort(oldest, {}, [&](size_t s) { return std::pair(stamps[s] == youngest, s); });
    }
    for (size_t i = 0; i < count; ++i) {
      const size_t s = oldest[i];
      if (owners[s] != 0) {
        const auto evicted = static_cast<size_t>(owners[s] - 1);
        entries[evicted] = before.pages[evicted] & ~kFarPage;
        ++evictions;
      }
      owners[s] = missing[i] + 1;
      stamps[s] = now;
      entries[static_cast<size_t>(missing[i])] = caches_[static_cast<size_t>(b)]->Entry(layer, s);
    }

    const CacheState after = caches_[static_cast<size_t>(b)]->Read();
    ASSERT_EQ(slice(after.owners, slots), owners) << "sequence " << b << " head " << head;
    ASSERT_EQ(slice(after.stamps, slots), stamps);
    ASSERT_EQ(slice(after.entries, stride), entries);
    ASSERT_EQ(after.pages, before.pages);
    ASSERT_NO_FATAL_FAILURE(VerifyBytes(b, head, owners));
  }
  // Every slot in use holds its page's slice.
  void VerifyBytes(int b, int head, const std::vector<int32_t>& owners) const {
    const PageLayout& l = rows_.layout;
    const std::vector<std::byte> all = caches_[static_cast<size_t>(b)]->Slots();
    const auto bytes = static_cast<size_t>(l.head_stride);
    for (size_t s = 0; s < owners.size(); ++s) {
      if (owners[s] == 0) continue;
      const std::byte* const page = HostPage(static_cast<size_t>(b * rows_.stride + owners[s] - 1));
      const std::byte* const slot =
          all.data() + (static_cast<size_t>(rows_.layer()) * owners.size() + s) *
                           static_cast<size_t>(l.layer_stride);
      for (const int64_t at : {l.KeyOffset(0, head, 0), l.ValueOffset(0, head, 0)}) {
        const std::byte* const own = page + l.KeyOffset(rows_.layer(), 0, 0) + at;
        ASSERT_EQ(std::memcmp(slot + at, own, bytes), 0) << "slot " << s;
      }
    }
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
  std::byte* host_ = nullptr;  // pinned; all pages, as in rows_.memory()
  std::vector<uint64_t> near_;
  std::vector<uint8_t> is_far_;
  DeviceArray<uint64_t> table_, tagged_;
  std::vector<std::unique_ptr<Cache>> caches_;
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
    evictions += problem.evictions;
    hits += problem.hits;
    unplaced += problem.unplaced;
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
