// SPDX-License-Identifier: Apache-2.0
// append on the GPU against ref: every byte of every page and index block is compared, so that rows
// that were not to be written show too.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/append/append.h"
#include "kernels/ops/summarize/summarize.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/noted_words.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

// Index blocks of a batch, the same on host and device.
class IndexBlocks {
 public:
  IndexBlocks(const IndexLayout& layout, int batch, int32_t capacity)
      : layout_(layout),
        stride_(layout.BlocksFor(capacity)),
        memory_(static_cast<size_t>(batch * stride_ * layout.block_bytes), std::byte{0xFF}),
        device_(memory_) {
    std::vector<uint64_t> addresses;
    for (int i = 0; i < batch * stride_; ++i) {
      blocks_.push_back(memory_.data() + i * layout.block_bytes);
      addresses.push_back(device_.address() + static_cast<uint64_t>(i * layout.block_bytes));
    }
    device_blocks_ = DeviceArray<uint64_t>(addresses);
  }
  DeviceIndex Device(int layer) const {
    DeviceIndex out{layout_.kind, layout_.dtype,       device_blocks_.get(),
                    stride_,      layout_.level_count, {}};
    for (int i = 0; i < layout_.level_count; ++i) {
      const IndexLevel& level = layout_.levels[static_cast<size_t>(i)];
      out.levels[i] = {level.unit_tokens, level.units_per_block,
                       layout_.RowOffset(i, layer, 0, 0, 0)};
    }
    return out;
  }
  // Writes on the host what tokens [from, to) of a sequence complete.
  void Summarize(const PagedBatch& rows, int sequence, int32_t from, int32_t to) {
    for (int level = 0; level < layout_.level_count; ++level) {
      for (int32_t u = layout_.UnitsFor(level, from); u < layout_.UnitsFor(level, to); ++u) {
        for (int h = 0; h < layout_.kv_heads; ++h) SummarizeUnit(rows, sequence, level, h, u);
      }
    }
  }
  void ExpectSameOnDevice() const { EXPECT_EQ(device_.Read(), memory_) << TestSeed(); }

 private:
  void SummarizeUnit(const PagedBatch& rows, int sequence, int level, int head, int32_t unit) {
    std::byte* const* blocks = blocks_.data() + sequence * stride_;
    const int layer = rows.layer();
    const int32_t finer = level == 0 ? 1 : layout_.levels[level - 1].unit_tokens;
    const int32_t size = layout_.levels[level].unit_tokens / finer;
    SummarizeWork w;
    w.keys =
        level == 0 ? rows.Keys(sequence, head) : layout_.Rows(blocks, level - 1, layer, 0, head);
    w.rows = {unit * size, (unit + 1) * size};
    w.out = layout_.Row(blocks, level, layer, 0, head, unit);
    w.out_dtype = layout_.dtype;
    if (layout_.kind == IndexLayout::Kind::kMinMax) {
      w.kind = SummarizeWork::Kind::kMinMax;
      w.out2 = layout_.Row(blocks, level, layer, 1, head, unit);
    }
    SummarizeRef(&w, 1, InlineExecutor());
  }

  IndexLayout layout_;
  int32_t stride_;
  std::vector<std::byte> memory_;
  std::vector<std::byte*> blocks_;
  DeviceArray<std::byte> device_;
  DeviceArray<uint64_t> device_blocks_;
};

struct Case {
  DType dtype = DType::kBF16, source = DType::kBF16;
  int dim = 128, kv_heads = 4, page_tokens = 16;
  std::vector<int32_t> lengths, counts;
  IndexLayout::Kind kind = IndexLayout::Kind::kNone;
  std::vector<int32_t> unit_tokens = {16};
  DType mean_dtype = DType::kBF16;
  float spoilt = 0;  // not 0: of every second sequence one element is this
};

class AppendCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};

  void Spoil(const Case& c, const std::vector<int32_t>& starts, std::vector<std::byte>* k,
             std::vector<std::byte>* v) {
    for (size_t b = 0; b < c.counts.size() && c.spoilt != 0; b += 2) {
      if (c.counts[b] == 0) continue;
      const int row = starts[b] + Below(rng_, c.counts[b]);
      const int at = row * c.kv_heads * c.dim + Below(rng_, c.kv_heads * c.dim);
      auto& side = Below(rng_, 2) == 0 ? *k : *v;
      StoreFloat(&side[static_cast<size_t>(at * SizeOf(c.source))], c.source, c.spoilt);
    }
  }
  // Which NaN a conversion writes is the hardware's choice.
  static void ExpectSamePages(const Case& c, const PagedBatch& batch) {
    const std::vector<std::byte> written = batch.Download();
    EXPECT_TRUE(std::isnan(c.spoilt) || written == batch.memory());
  }
  void ExpectLikeRef(const Case& c) {
    SCOPED_TRACE("d" + std::to_string(c.dim) + " " + std::string(NameOf(c.source)) + " to " +
                 std::string(NameOf(c.dtype)) + " kind " +
                 std::to_string(static_cast<int>(c.kind)) + " seed " + std::to_string(TestSeed()));
    const Geometry g{2, c.kv_heads, c.kv_heads, c.dim, c.page_tokens, c.dtype};
    int32_t capacity = 0, rows = 0;
    std::vector<int32_t> starts = {0}, after;
    for (size_t b = 0; b < c.lengths.size(); ++b) {
      after.push_back(c.lengths[b] + c.counts[b]);
      capacity = std::max(capacity, after[b]);
      starts.push_back(rows += c.counts[b]);
    }
    PagedBatch batch(rng_, g, c.lengths, capacity);
    batch.Upload();
    IndexBlocks blocks(MakeIndexLayout(c.kind, g, c.unit_tokens.data(),
                                       static_cast<int>(c.unit_tokens.size()), {}, c.mean_dtype),
                       batch.batch(), capacity);
    const size_t elements = static_cast<size_t>(rows * c.kv_heads * c.dim);
    auto k = RandomElements(rng_, c.source, elements);
    auto v = RandomElements(rng_, c.source, elements);
    Spoil(c, starts, &k, &v);
    const DeviceArray<std::byte> d_k(k), d_v(v);
    const DeviceArray<int32_t> d_starts(starts), tokens(after);
    AppendBatch w;
    w.layer = batch.DeviceLayer();
    w.batch = batch.batch();
    w.tokens = tokens.get();
    w.starts = d_starts.get();
    w.rows_max = rows;
    const int64_t head = c.dim * SizeOf(c.source);
    w.k = {d_k.get(), head * c.kv_heads, head, c.source};
    w.v = {d_v.get(), head * c.kv_heads, head, c.source};
    if (c.kind != IndexLayout::Kind::kNone) w.index = blocks.Device(batch.layer());
    const NotedWords words(batch.batch());
    w.not_finite = words.Asked();
    Check(kvs_cuda_ops()->append(w, nullptr), "append");
    std::vector<bool> not_finite;
    for (int b = 0; b < batch.batch(); ++b) {
      const auto at = static_cast<size_t>(b);
      const int64_t skip = starts[at] * head * c.kv_heads;
      const AppendWork ref{batch.PagesOf(b),
                           batch.layout,
                           batch.layer(),
                           c.lengths[at],
                           c.counts[at],
                           {k.data() + skip, head * c.kv_heads, head, c.source},
                           {v.data() + skip, head * c.kv_heads, head, c.source}};
      not_finite.push_back(!AppendRef(&ref, 1, InlineExecutor()));
      if (c.kind != IndexLayout::Kind::kNone) {
        blocks.Summarize(batch, b, c.lengths[at], after[at]);
      }
    }
    ExpectSamePages(c, batch);  // waits
    EXPECT_EQ(words.Noted(), not_finite) << c.spoilt;
    // Nobody asks.
    w.not_finite = {};
    Check(kvs_cuda_ops()->append(w, nullptr), "append");
    ExpectSamePages(c, batch);
    blocks.ExpectSameOnDevice();
  }
};

TEST_F(AppendCuda, EveryTypeAndDim) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType source : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (int dim : {64, 128, 256}) {
        for (int page : {16, 32, 64}) {
          ExpectLikeRef({dtype, source, dim, 3, page, {0, 15, 16, 63, 100}, {1, 1, 1, 1, 0}});
        }
      }
    }
  }
}

// NaN and infinities of the source, and what overflows fp16, or just does not.
TEST_F(AppendCuda, NotesWhatIsNotFinite) {
  for (float x : {NAN, INFINITY, -INFINITY, 65504.0f, 65519.0f, 65520.0f, -70000.0f, 3.4e38f}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (DType source : {DType::kBF16, DType::kF16, DType::kF32}) {
        Case c{dtype, source, 128, 3, 16, {0, 15, 16, 63, 100}, {1, 1, 1, 1, 1}};
        c.spoilt = x;
        ExpectLikeRef(c);
        c.counts = {1000, 3, 0, 77, 300};
        ExpectLikeRef(c);
      }
    }
  }
}

TEST_F(AppendCuda, RaggedAndLong) {
  ExpectLikeRef({DType::kBF16, DType::kBF16, 128, 8, 16, {0, 17, 300}, {1000, 0, 77}});
  ExpectLikeRef({DType::kF16, DType::kF32, 64, 2, 32, {31, 5}, {700, 1}});
}

TEST_F(AppendCuda, IndexRowsOfCompletedUnits) {
  using Kind = IndexLayout::Kind;
  const std::vector<int32_t> lengths = {0, 15, 31, 511, 16, 100}, one = {1, 1, 1, 1, 1, 1},
                             many = {40, 1, 0, 600, 16, 28};
  for (const auto& counts : {one, many}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (int dim : {64, 128, 256}) {
        ExpectLikeRef(
            {dtype, DType::kBF16, dim, 2, 16, lengths, counts, Kind::kMinMax, {16}, dtype});
        ExpectLikeRef({dtype, DType::kF32, dim, 2, 32, lengths, counts, Kind::kMean, {32, 8, 2}});
        ExpectLikeRef({dtype, dtype, dim, 2, 16, lengths, counts, Kind::kMean, {8}, DType::kF32});
      }
    }
  }
}

// A captured step appends and attends with the lengths that lie on the device when it runs.
TEST_F(AppendCuda, StepGraphSeesOneLength) {
  const Geometry g{1, 8, 2, 128, 16, DType::kBF16};
  PagedBatch batch(rng_, g, {30, 0, 200}, 300);
  batch.Upload();
  const size_t row = 2 * 128, heads = 8;
  DeviceArray<std::byte> k(3 * row * 2), v(3 * row * 2);
  const DeviceArray<std::byte> q(RandomElements(rng_, g.dtype, 3 * heads * 128));
  const DeviceArray<float> out(3 * heads * 128), lse(3 * heads);
  const DeviceArray<std::byte> workspace(std::vector<std::byte>(
      static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(4, 128))));
  AppendBatch append;
  append.layer = batch.DeviceLayer();
  append.batch = 3;
  append.tokens = batch.device_tokens();
  append.rows_max = 3;
  append.k = {k.get(), 512, 256, DType::kBF16};
  append.v = {v.get(), 512, 256, DType::kBF16};
  AttendRawBatch attend;
  attend.layer = append.layer;
  attend.batch = 3;
  attend.group = 4;
  attend.tokens = append.tokens;
  attend.q = q.get();
  attend.q_stride = 8 * 128 * 2;
  attend.scale = 0;  // every row weighs the same: lse is ln(tokens)
  attend.to = {out.get(), DType::kF32, lse.get()};
  attend.workspace = workspace.get();
  CapturedGraph graph([&](Stream stream) {
    const CudaOps* ops = kvs_cuda_ops();
    Check(ops->append(append, stream), "append");
    return ops->attend_raw(attend, stream);
  });
  for (int step = 1; step <= 40; ++step) {
    for (int32_t& tokens : batch.tokens) ++tokens;
    batch.WriteTokens();
    k.Write(RandomElements(rng_, g.dtype, 3 * row));
    v.Write(RandomElements(rng_, g.dtype, 3 * row));
    graph.Replay();
    const std::vector<float> got = lse.Read();
    for (size_t b = 0; b < 3; ++b) {
      const auto tokens = static_cast<float>(batch.tokens[b]);
      for (size_t h = 0; h < heads; ++h) EXPECT_NEAR(got[b * heads + h], std::log(tokens), 1e-4);
    }
    for (float x : out.Read()) EXPECT_FALSE(std::isnan(x)) << "a row that was not appended";
  }
}

}  // namespace
}  // namespace kvstrata::cuda
