// SPDX-License-Identifier: Apache-2.0
// attend_packed and score_packed on the GPU against ref, on fresh random inputs. Rows that are not
// attended are 0xFF throughout (all channels stored, all NaN), and so is every output and workspace
// before it is written.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/packed_rows.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

enum class Chosen { kAll, kNone, kSome };

// What a segment is packed with; keep 0: drawn for every segment and KV head.
struct Strategy {
  int keep = 0, neighbours = 1, block = 8;
};

struct Case {
  int dim = 128, group = 4, kv_heads = 2;
  bool truncated = true;
  std::vector<std::vector<int32_t>> rows;  // rows of each sequence's segments
  Strategy strategy = {};
  Chosen chosen = Chosen::kSome;
  bool extents = false;  // about half of the segments go on with the rotations of the one before
  float sharpness = 1;   // the softmax's
  DType q_dtype = DType::kBF16;
  DType out_dtype = DType::kF32;
};

std::string Describe(const Case& c) {
  std::string text =
      "d" + std::to_string(c.dim) + (c.truncated ? " cut" : "") + " G" + std::to_string(c.group) +
      " Hkv" + std::to_string(c.kv_heads) + " keep" + std::to_string(c.strategy.keep) + " g" +
      std::to_string(c.strategy.neighbours) + " b" + std::to_string(c.strategy.block) + " chosen" +
      std::to_string(static_cast<int>(c.chosen)) + " rows";
  for (const auto& sequence : c.rows) {
    for (int32_t n : sequence) text += " " + std::to_string(n);
    text += ";";
  }
  return text + " seed " + std::to_string(TestSeed());
}

int32_t BlocksFor(int32_t rows, int32_t block) { return (rows + block - 1) / block; }

// One KV head of one segment, on the host.
struct Segment {
  Strategy strategy;
  int32_t rows = 0, first_block = 0;
  std::vector<float> r_k, r_v;
  std::vector<std::byte> k, v, b;
  PackedRows keys, values, blocks;

  Segment(Rng& rng, const Case& c, int32_t n) : strategy(c.strategy), rows(n) {
    if (strategy.keep == 0) {
      strategy.neighbours = 1 << Below(rng, 3);
      strategy.block = 4 << Below(rng, 3);
      strategy.keep = c.dim / 8 * (1 + Below(rng, 3));
    }
    const PackedRows format = PackedFormat(c.dim, strategy.keep, strategy.neighbours, c.truncated);
    k = RandomPackedRows(rng, format, n);
    v = RandomPackedRows(rng, format, n);
    b = RandomPackedRows(rng, format, end_block());
    keys = values = blocks = format;
    keys.data = k.data();
    values.data = v.data();
    blocks.data = b.data();
    r_k = RandomRotation(rng, c.dim);
    r_v = RandomRotation(rng, c.dim);
  }
  int32_t end_block() const { return BlocksFor(rows, strategy.block); }
  void PoisonBlock(int32_t block) {
    for (int32_t t = block * strategy.block; t < std::min((block + 1) * strategy.block, rows);
         ++t) {
      std::fill_n(k.data() + t * keys.stride, keys.stride, std::byte{0xFF});
      std::fill_n(v.data() + t * values.stride, values.stride, std::byte{0xFF});
    }
  }
};

// The segment's arrays on the GPU, with poison behind the last row.
struct DeviceSegment {
  DeviceArray<float> r_k, r_v;
  DeviceArray<std::byte> k, v, b;

  explicit DeviceSegment(const Segment& s)
      : r_k(s.r_k), r_v(s.r_v), k(s.k.size() + 512), v(s.v.size() + 512), b(s.b.size() + 512) {
    k.Write(s.k);
    v.Write(s.v);
    b.Write(s.b);
  }
  PackedSegment Of(const Segment& s) const {
    return {r_k.address(),
            r_v.address(),
            k.address(),
            v.address(),
            b.address(),
            s.rows,
            s.first_block,
            s.strategy.keep,
            s.strategy.neighbours,
            s.strategy.block,
            0};
  }
};

struct Attention {
  std::vector<float> out, lse;
};

// The segments of all sequences and KV heads, on the host.
class Segments {
 public:
  Segments(Rng& rng, const Case& c) : kv_heads_(c.kv_heads) {
    for (const auto& sequence : c.rows) {
      counts_.push_back(static_cast<int32_t>(sequence.size()));
      stride_ = std::max(stride_, sequence.size());
    }
    for (const auto& sequence : c.rows) {
      for (size_t i = 0; i < stride_; ++i) {
        for (int h = 0; h < c.kv_heads; ++h) {
          all_.emplace_back(rng, c, i < sequence.size() ? sequence[i] : 1);
          rotated_by_.push_back(all_.size() - 1);
          if (c.extents && i > 0 && Below(rng, 2) == 0) GoOn();
        }
      }
    }
    NumberBlocks();
  }

  int batch() const { return static_cast<int>(counts_.size()); }
  int kv_heads() const { return kv_heads_; }
  // How many a sequence may have, and how many it has.
  size_t stride() const { return stride_; }
  const std::vector<int32_t>& counts() const { return counts_; }
  int Count(int b) const { return counts_[static_cast<size_t>(b)]; }
  // [batch][stride][kv_heads]
  const std::vector<Segment>& all() const { return all_; }
  // The segment whose rotations that one has.
  size_t RotatedBy(size_t i) const { return rotated_by_[i]; }
  Segment& At(int b, int i, int h) { return all_[Index(b, i, h)]; }
  const Segment& At(int b, int i, int h) const { return all_[Index(b, i, h)]; }

  int32_t Blocks(int b, int h) const {
    const int count = Count(b);
    return count == 0 ? 0 : At(b, count - 1, h).first_block + At(b, count - 1, h).end_block();
  }
  int32_t MostBlocks() const {
    int32_t most = 0;
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < kv_heads_; ++h) most = std::max(most, Blocks(b, h));
    }
    return most;
  }
  // Another length, of all KV heads.
  void Shorten(int b, int i, int32_t rows) {
    for (int h = 0; h < kv_heads_; ++h) At(b, i, h).rows = rows;
    NumberBlocks();
  }

 private:
  size_t Index(int b, int i, int h) const {
    return (static_cast<size_t>(b) * stride_ + static_cast<size_t>(i)) *
               static_cast<size_t>(kv_heads_) +
           static_cast<size_t>(h);
  }
  void NumberBlocks() {
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < kv_heads_; ++h) {
        int32_t before = 0;
        for (int i = 0; i < Count(b); ++i) {
          At(b, i, h).first_block = before;
          before += At(b, i, h).end_block();
        }
      }
    }
  }
  // The last segment has the rotations of the one before of its KV head.
  void GoOn() {
    const size_t before = all_.size() - 1 - static_cast<size_t>(kv_heads_);
    all_.back().r_k = all_[before].r_k;
    all_.back().r_v = all_[before].r_v;
    rotated_by_.back() = rotated_by_[before];
  }

  const int kv_heads_;
  size_t stride_ = 1;
  std::vector<int32_t> counts_;
  std::vector<Segment> all_;
  std::vector<size_t> rotated_by_;
};

// Which blocks of each head are attended: some between the first and the last few, which the heads
// of a sequence may number differently. On the host and on the device.
class Choice {
 public:
  Choice(Rng& rng, const Case& c, const Segments& segments)
      : chosen_(c.chosen), kv_heads_(c.kv_heads), stride_(segments.MostBlocks() + 1) {
    for (int b = 0; b < segments.batch(); ++b) {
      int32_t least = segments.Blocks(b, 0);
      for (int h = 1; h < kv_heads_; ++h) least = std::min(least, segments.Blocks(b, h));
      const bool some = chosen_ == Chosen::kSome;
      sink_end_.push_back(some ? std::min(least, Below(rng, 3)) : 0);
      recent_begin_.push_back(some ? std::max(sink_end_.back(), least - Below(rng, 4)) : stride_);
      for (int h = 0; h < kv_heads_; ++h) {
        const int odds = 1 + Below(rng, 9);
        AddList(rng, static_cast<size_t>(b), segments.Blocks(b, h), odds);
      }
    }
    d_units_ = DeviceArray<int32_t>(units_);
    d_counts_ = DeviceArray<int32_t>(counts_);
    d_sink_end_ = DeviceArray<int32_t>(sink_end_);
    d_recent_begin_ = DeviceArray<int32_t>(recent_begin_);
  }

  bool all() const { return chosen_ == Chosen::kAll; }
  bool Has(int b, int h, int32_t block) const {
    if (all()) return true;
    const auto at = static_cast<size_t>(b);
    if (block < sink_end_[at] || block >= recent_begin_[at]) return true;
    const size_t list = at * static_cast<size_t>(kv_heads_) + static_cast<size_t>(h);
    const int32_t* first = &units_[list * static_cast<size_t>(stride_)];
    return std::binary_search(first, first + counts_[list], block);
  }
  // What is not chosen.
  void PoisonOthers(Segments* segments) const {
    if (all()) return;
    for (int b = 0; b < segments->batch(); ++b) {
      for (int h = 0; h < kv_heads_; ++h) {
        for (int i = 0; i < segments->Count(b); ++i) {
          Segment& s = segments->At(b, i, h);
          for (int32_t block = 0; block < s.end_block(); ++block) {
            if (!Has(b, h, s.first_block + block)) s.PoisonBlock(block);
          }
        }
      }
    }
  }
  DeviceSelection OnDevice() const {
    return {1,
            kv_heads_,
            stride_,
            d_units_.get(),
            d_counts_.get(),
            d_sink_end_.get(),
            d_recent_begin_.get()};
  }

 private:
  void AddList(Rng& rng, size_t b, int32_t blocks, int odds) {
    std::vector<int32_t> list;
    if (chosen_ == Chosen::kSome) {
      for (int32_t u = sink_end_[b]; u < std::min(recent_begin_[b], blocks); ++u) {
        if (Below(rng, odds) == 0) list.push_back(u);
      }
    }
    counts_.push_back(static_cast<int32_t>(list.size()));
    list.resize(static_cast<size_t>(stride_), 1 << 30);
    units_.insert(units_.end(), list.begin(), list.end());
  }

  const Chosen chosen_;
  const int kv_heads_;
  const int32_t stride_;
  std::vector<int32_t> units_, counts_, sink_end_, recent_begin_;
  DeviceArray<int32_t> d_units_, d_counts_, d_sink_end_, d_recent_begin_;
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c) : case_(c), segments_(rng, c), choice_(rng, c, segments_) {
    choice_.PoisonOthers(&segments_);
    q_bytes_ = RandomElements(rng, c.q_dtype, QueryElements());
    Upload();
  }

  AttendPackedBatch Work() const {
    AttendPackedBatch w;
    w.layer = Layer();
    w.queries = Queries();
    if (!choice_.all()) w.selection = choice_.OnDevice();
    w.scale = Scale();
    w.to = {out_.get(), case_.out_dtype, lse_.get()};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    return w;
  }
  void Run(const AttendPackedBatch& w) const {
    out_.Poison();
    lse_.Poison();
    Check(OpsOf<PackedOps>(kvs_cuda_ops()->packed).attend_packed(w, nullptr), "attend_packed");
  }
  Attention Got() const { return {Floats(case_.out_dtype, out_.Read()), lse_.Read()}; }
  Attention Expected() const {
    Attention a{std::vector<float>(QueryElements()), std::vector<float>(QueryRows())};
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < case_.kv_heads; ++h) ExpectedOf(b, h, a);
    }
    return a;
  }
  void ExpectLikeRef() const {
    SCOPED_TRACE(Describe(case_));
    const Attention expected = Expected();
    for (const bool ahead : {false, true}) {
      AttendPackedBatch work = Work();
      work.ahead = ahead;
      Run(work);
      const Attention got = Got();
      EXPECT_LE(RelativeError(got.out, expected.out), 5e-3) << ahead;
      EXPECT_LE(RelativeError(got.lse, expected.lse), 1e-3) << ahead;
    }
    for (uint32_t c : counters_.Read()) EXPECT_EQ(c, 0u);
  }
  void ExpectScoresLikeRef(int32_t first) const {
    SCOPED_TRACE(Describe(case_));
    const int32_t stride = segments_.MostBlocks() + 5;
    const DeviceArray<float> scores(Lists() * static_cast<size_t>(stride));
    const ScorePackedBatch work{Layer(), Queries(), scores.get(), stride, first, first > 0};
    Check(OpsOf<PackedOps>(kvs_cuda_ops()->packed).score_packed(work, nullptr), "score_packed");
    const std::vector<float> got = scores.Read();
    std::vector<float> scored, expected;  // for all lists: a single score may be close to 0
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < case_.kv_heads; ++h) {
        const std::vector<float> all = ScoresOf(b, h);
        const float* from =
            &got[static_cast<size_t>(b * case_.kv_heads + h) * static_cast<size_t>(stride)];
        const size_t skipped = std::min(static_cast<size_t>(first), all.size());
        const size_t count = all.size() - skipped;
        expected.insert(expected.end(), all.begin() + static_cast<int64_t>(skipped), all.end());
        scored.insert(scored.end(), from, from + count);
        for (size_t i = count; i < static_cast<size_t>(stride); ++i) {
          EXPECT_TRUE(std::isnan(from[i])) << i;
        }
      }
    }
    EXPECT_LE(RelativeError(scored, expected), 1e-3);
  }
  // Other lengths: the first rows of the segments, and all blocks of them.
  void Shorten(int b, size_t i, int32_t rows) {
    case_.rows[static_cast<size_t>(b)][i] = rows;
    segments_.Shorten(b, static_cast<int>(i), rows);
    UploadTable();
  }

  int batch() const { return static_cast<int>(case_.rows.size()); }
  size_t QueryRows() const {
    return case_.rows.size() * static_cast<size_t>(case_.kv_heads * case_.group);
  }
  size_t QueryElements() const { return QueryRows() * static_cast<size_t>(case_.dim); }

 private:
  float Scale() const { return case_.sharpness / std::sqrt(static_cast<float>(case_.dim)); }
  size_t Lists() const { return case_.rows.size() * static_cast<size_t>(case_.kv_heads); }
  void Upload() {
    for (const Segment& s : segments_.all()) device_segments_.emplace_back(s);
    table_ = DeviceArray<PackedSegment>(segments_.all().size());
    counts_ = DeviceArray<int32_t>(case_.rows.size());
    UploadTable();
    q_ = DeviceArray<std::byte>(q_bytes_);
    out_ = DeviceArray<std::byte>(QueryElements() * static_cast<size_t>(SizeOf(case_.out_dtype)));
    lse_ = DeviceArray<float>(QueryRows());
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(Lists(), 0));
    workspace_ = DeviceArray<float>(static_cast<size_t>(
        OpsOf<PackedOps>(kvs_cuda_ops()->packed).attend_packed_workspace_bytes(Work()) / 4));
  }
  void UploadTable() {
    std::vector<PackedSegment> table;
    for (size_t i = 0; i < segments_.all().size(); ++i) {
      table.push_back(device_segments_[i].Of(segments_.all()[i]));
      table.back().r_k = device_segments_[segments_.RotatedBy(i)].r_k.address();
      table.back().r_v = device_segments_[segments_.RotatedBy(i)].r_v.address();
    }
    table_.Write(table);
    counts_.Write(segments_.counts());
  }
  PackedLayer Layer() const {
    int32_t keep_max = 0;
    for (const Segment& s : segments_.all()) keep_max = std::max(keep_max, s.strategy.keep);
    return {table_.get(),   counts_.get(), static_cast<int32_t>(segments_.stride()),
            case_.kv_heads, case_.dim,     case_.truncated,
            keep_max};
  }
  PackedQueries Queries() const {
    return {q_.get(), case_.q_dtype, int64_t{case_.kv_heads} * case_.group * case_.dim, batch(),
            case_.group};
  }
  // [group][dim], rotated into a segment.
  std::vector<float> RotatedQueries(int b, int h, const Segment& s) const {
    const std::vector<float> q = Floats(case_.q_dtype, q_bytes_);
    const size_t row = static_cast<size_t>((b * case_.kv_heads + h) * case_.group);
    std::vector<float> rotated(static_cast<size_t>(case_.group * case_.dim));
    const RotateWork rotate{
        s.r_k.data(), case_.dim,   false,         &q[row * static_cast<size_t>(case_.dim)],
        case_.dim,    case_.group, rotated.data()};
    RotateRef(&rotate, 1, InlineExecutor());
    return rotated;
  }
  void ExpectedOf(int b, int h, Attention& a) const {
    const auto group = static_cast<size_t>(case_.group), dim = static_cast<size_t>(case_.dim);
    const auto parts = static_cast<size_t>(segments_.Count(b));
    const size_t row = static_cast<size_t>(b * case_.kv_heads + h) * group;
    std::vector<float> m(parts * group + 1), l(parts * group + 1), o(parts * group * dim + 1);
    for (size_t i = 0; i < parts; ++i) {
      const Segment& s = segments_.At(b, static_cast<int>(i), h);
      std::vector<kvstrata::Run> runs;
      for (int32_t block = 0; block < s.end_block(); ++block) {
        if (!choice_.Has(b, h, s.first_block + block)) continue;
        const int32_t first = block * s.strategy.block;
        runs.push_back({first, std::min(first + s.strategy.block, s.rows)});
      }
      const std::vector<float> q = RotatedQueries(b, h, s);
      AttendPackedWork work;
      work.k = s.keys;
      work.v = s.values;
      work.r_v = s.r_v.data();
      work.q = q.data();
      work.group = case_.group;
      work.runs = runs.data();
      work.run_count = static_cast<int32_t>(runs.size());
      work.scale = Scale();
      work.m = &m[i * group];
      work.l = &l[i * group];
      work.o = &o[i * group * dim];
      AttendPackedRef(&work, 1, InlineExecutor());
    }
    const MergeWork merge{m.data(),    l.data(),    o.data(),  static_cast<int32_t>(parts),
                          case_.group, case_.group, case_.dim, &a.out[row * dim],
                          0,           &a.lse[row], 0};
    MergeRef(&merge, 1, InlineExecutor());
  }
  std::vector<float> ScoresOf(int b, int h) const {
    std::vector<float> scores(static_cast<size_t>(segments_.Blocks(b, h)) + 1);
    for (int i = 0; i < segments_.Count(b); ++i) {
      const Segment& s = segments_.At(b, i, h);
      const std::vector<float> q = RotatedQueries(b, h, s);
      ScorePackedWork work;
      work.rows = s.blocks;
      work.q = q.data();
      work.queries = case_.group;
      work.units = {0, s.end_block()};
      work.out = &scores[static_cast<size_t>(s.first_block)];
      ScorePackedRef(&work, 1, InlineExecutor());
    }
    scores.pop_back();
    return scores;
  }

  Case case_;
  Segments segments_;
  const Choice choice_;
  std::vector<DeviceSegment> device_segments_;
  DeviceArray<PackedSegment> table_;
  DeviceArray<int32_t> counts_;
  std::vector<std::byte> q_bytes_;
  DeviceArray<std::byte> q_;

 public:
  mutable DeviceArray<std::byte> out_;
  mutable DeviceArray<float> lse_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<float> workspace_;
};

class AttendPackedCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};

  std::vector<std::vector<int32_t>> RandomRows(int batch, int segments, int longest) {
    std::vector<std::vector<int32_t>> rows(static_cast<size_t>(batch));
    for (auto& sequence : rows) {
      for (int i = Below(rng_, segments + 1); i > 0; --i) {
        sequence.push_back(1 + Below(rng_, longest));
      }
    }
    return rows;
  }
  void ExpectLikeRef(const Case& c) {
    const Problem p(rng_, c);
    p.ExpectLikeRef();
    p.ExpectScoresLikeRef(0);
    p.ExpectScoresLikeRef(1);
  }
};

TEST_F(AttendPackedCuda, EveryDimAndGroup) {
  for (int dim : {64, 128, 256}) {
    for (bool truncated : {true, false}) {
      for (int group = 1; group <= 8; ++group) {
        ExpectLikeRef({dim, group, 2, truncated, {{1 + Below(rng_, 300), 100}, {77}}});
      }
    }
  }
}

TEST_F(AttendPackedCuda, EveryStrategy) {
  for (int dim : {64, 128, 256}) {
    for (bool truncated : {true, false}) {
      for (int neighbours : {1, 2, 4}) {
        for (int keep : {4, dim / 8, dim / 4, 3 * dim / 8, truncated ? dim - dim / 4 : dim}) {
          const Strategy strategy{keep, neighbours, 4 << Below(rng_, 3)};
          ExpectLikeRef({dim, 1 + Below(rng_, 8), 1, truncated, {{150, 33}}, strategy});
        }
      }
    }
  }
}

TEST_F(AttendPackedCuda, RowsAtEveryEdge) {
  for (int block : {4, 8, 16}) {
    Case c{128, 4, 2, true, {{},          {1},  {2},   {3},   {4},       {5},    {7},  {8},
                             {9},         {15}, {16},  {17},  {1, 1, 1}, {31},   {32}, {33},
                             {16, 0, 16}, {0},  {255}, {256}, {257},     {0, 40}}};
    c.strategy = {32, 1, block};
    for (Chosen chosen : {Chosen::kAll, Chosen::kNone, Chosen::kSome}) {
      c.chosen = chosen;
      ExpectLikeRef(c);
    }
  }
}

TEST_F(AttendPackedCuda, EveryQueryAndOutputType) {
  for (DType q : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
      Case c{128, 4, 2, true, RandomRows(3, 3, 200)};
      c.q_dtype = q;
      c.out_dtype = out;
      ExpectLikeRef(c);
    }
  }
}

TEST_F(AttendPackedCuda, RaggedBatches) {
  for (int batch : {1, 7, 33, 64}) {
    ExpectLikeRef({128, 4, 8, true, RandomRows(batch, 4, 100)});
    auto one_long = RandomRows(batch, 1, 10);
    one_long.back() = {2000, 900};
    ExpectLikeRef({64, 2, 2, true, one_long});
  }
}

// Maxima that rise from tile to tile by more than a softmax lets them exceed what it works with.
TEST_F(AttendPackedCuda, LogitsOfManySizes) {
  for (float sharpness : {1e-3f, 5.0f, 40.0f}) {
    for (int group : {1, 3, 4, 8}) {
      Case c{128, group, 2, true, {{9000, 700}, {33}}, {32, 1, 8}, Chosen::kAll};
      c.sharpness = sharpness;
      ExpectLikeRef(c);
    }
  }
}

// Segments of tokens cut into extents, alike or packed each in its own way.
TEST_F(AttendPackedCuda, ExtentsThatShareRotations) {
  for (const Strategy& strategy : {Strategy{32, 1, 8}, Strategy{}}) {
    for (Chosen chosen : {Chosen::kAll, Chosen::kSome}) {
      Case c{128, 4, 3, true, RandomRows(5, 40, 150), strategy, chosen, true};
      ExpectLikeRef(c);
      c.rows = {{3000, 0, 16, 5000, 0}, {1, 1, 1, 1}, {9000, 9000}};
      ExpectLikeRef(c);
    }
  }
}

// More chosen blocks than a CTA looks at once, in shares that begin and end inside segments.
TEST_F(AttendPackedCuda, LongSequencesHaveManySplits) {
  Case c{128, 8, 1, true, {{60000, 41, 30000}}, {32, 1, 8}, Chosen::kAll};
  ExpectLikeRef(c);
  c = {64, 2, 64, true, {{9000, 3000}, {5000}}, {16, 2, 4}, Chosen::kAll};
  ExpectLikeRef(c);
  c = {256, 1, 1, false, {std::vector<int32_t>(128, 50)}, {}, Chosen::kSome};
  ExpectLikeRef(c);
}

// As many as 1.5M tokens of 32 layers with 8 KV heads x 128 take, each with rotations of its own.
TEST_F(AttendPackedCuda, AsManySegmentsAsThereMayBe) {
  std::vector<int32_t> rows(512);
  for (int32_t& n : rows) n = 1 + Below(rng_, 20);
  for (Chosen chosen : {Chosen::kAll, Chosen::kSome}) {
    ExpectLikeRef({128, 4, 1, true, {rows}, {32, 1, 8}, chosen});
  }
  ExpectLikeRef({64, 8, 2, false, {rows, {5}}, {}, Chosen::kSome});
}

TEST_F(AttendPackedCuda, TwoRunsGiveTheSameBits) {
  const Problem p(rng_, {128, 4, 8, true, {{5000, 100}, {40}, {300, 2, 900}}});
  p.Run(p.Work());
  const auto first = p.out_.Read();
  for (int i = 0; i < 5; ++i) {
    p.Run(p.Work());
    EXPECT_EQ(p.out_.Read(), first) << TestSeed();
  }
}

// A part that is left as a partial and merged into another call's output: all of it twice is once.
TEST_F(AttendPackedCuda, PartialsOfOtherOpsAreMerged) {
  const Case c{128, 4, 2, true, {{700, 33}, {}, {40}, {9, 500}}};
  const Problem p(rng_, c);
  SCOPED_TRACE(Describe(c));
  const size_t rows = p.QueryRows();
  const DeviceArray<float> m(rows), l(rows), o(rows * 128);
  AttendPackedBatch part = p.Work();
  part.to.rows = nullptr;
  part.partial = {m.get(), l.get(), o.get(), 1};
  p.Run(part);
  AttendPackedBatch whole = p.Work();
  whole.with = part.partial;
  p.Run(whole);
  Attention expected = p.Expected();
  EXPECT_LE(RelativeError(p.Got().out, expected.out), 5e-3);
  for (float& x : expected.lse) x += std::log(2.0f);
  EXPECT_LE(RelativeError(p.Got().lse, expected.lse), 1e-3);
}

// One captured graph serves all lengths.
TEST_F(AttendPackedCuda, GraphReplaysWhileSegmentsGrow) {
  Case c{128, 4, 2, true, {{2000, 900}, {1000}}, {32, 1, 8}, Chosen::kAll};
  Problem p(rng_, c);
  CapturedGraph graph([&](Stream stream) {
    return OpsOf<PackedOps>(kvs_cuda_ops()->packed).attend_packed(p.Work(), stream);
  });
  for (int32_t n : {0, 1, 16, 129, 700, 899, 900, 31}) {
    p.Shorten(0, 1, n);
    p.Shorten(1, 0, 1000 - n);
    p.out_.Poison();
    Check(cudaDeviceSynchronize(), "before a replay");
    graph.Replay();
    EXPECT_LE(RelativeError(p.Got().out, p.Expected().out), 5e-3) << n << " " << Describe(c);
  }
}

TEST_F(AttendPackedCuda, RefusesShapesItHasNot) {
  const Problem p(rng_, {128, 4, 2, true, {{10}}});
  for (const auto& spoil : {+[](AttendPackedBatch& w) { w.queries.group = 9; },
                            +[](AttendPackedBatch& w) { w.layer.head_dim = 96; },
                            +[](AttendPackedBatch& w) { w.layer.segment_stride = 513; },
                            +[](AttendPackedBatch& w) { w.selection.unit_tokens = 8; }}) {
    AttendPackedBatch w = p.Work();
    spoil(w);
    EXPECT_NE(OpsOf<PackedOps>(kvs_cuda_ops()->packed).attend_packed(w, nullptr), 0);
  }
}

}  // namespace
}  // namespace kvstrata::cuda
