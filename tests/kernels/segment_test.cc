// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "kernels/segment/segmenter.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 21;

Geometry SmallGeometry(DType dtype = DType::kBF16) {
  return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64, .dtype = dtype};
}

// Writes the inputs' tokens into the pages and updates the index every `chunk` tokens.
std::vector<std::vector<std::byte>> IndexedInChunks(const Inputs& in, const std::string& plan,
                                                    int32_t chunk, const Backend& backend) {
  HeldSequence sequence(in.g, plan);
  while (sequence.state->tokens() < in.n) {
    RunTo(sequence, in, std::min(sequence.state->tokens() + chunk, in.n), chunk, backend);
    Settle(sequence, backend);
  }
  return sequence.blocks();
}

using Row = std::vector<float>;

Row StoredRow(HeldSequence& sequence, int level, int layer, int field, int head, int32_t unit) {
  const IndexLayout& index = sequence.state->index();
  const std::byte* row = index.Row(sequence.View().index_blocks, level, layer, field, head, unit);
  Row values(index.head_dim);
  for (int c = 0; c < index.head_dim; ++c) {
    if (index.dtype == DType::kF32) {
      values[c] = reinterpret_cast<const float*>(row)[c];
    } else if (index.dtype == DType::kF16) {
      values[c] = ToFloat(reinterpret_cast<const F16*>(row)[c]);
    } else {
      values[c] = ToFloat(reinterpret_cast<const BF16*>(row)[c]);
    }
  }
  return values;
}

// fp32 sum in order, divided once, rounded to bf16 (docs/spec/chess.md 1).
Row MeanOf(const std::vector<Row>& rows) {
  Row mean(rows[0].size(), 0.0f);
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) mean[c] += row[c];
  }
  for (float& x : mean) x = ToFloat(FromFloat<BF16>(x / static_cast<float>(rows.size())));
  return mean;
}

Row KeyOf(const Inputs& in, int32_t t, int layer, int head) {
  return {in.Key(t, layer, head), in.Key(t, layer, head) + in.g.head_dim};
}

class Segment : public EachBackend {};

TEST_P(Segment, PageRowsAreTheExtremesOfTheirKeys) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Inputs in(SmallGeometry(dtype), 70, kSeed);
    HeldSequence sequence(in.g, "quest{page = 8}");
    RunTo(sequence, in, in.n, 70, backend());
    Settle(sequence, backend());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int32_t unit = 0; unit < 70 / 8; ++unit) {
          Row low = KeyOf(in, unit * 8, layer, head), high = low;
          for (int32_t t = unit * 8; t < (unit + 1) * 8; ++t) {
            for (int c = 0; c < 64; ++c) {
              low[c] = std::min(low[c], in.Key(t, layer, head)[c]);
              high[c] = std::max(high[c], in.Key(t, layer, head)[c]);
            }
          }
          ASSERT_EQ(StoredRow(sequence, 0, layer, 0, head, unit), low) << "seed " << kSeed;
          ASSERT_EQ(StoredRow(sequence, 0, layer, 1, head, unit), high) << "seed " << kSeed;
        }
      }
    }
  }
}

TEST_P(Segment, PageRowsAreMeanAndVarianceOfTheirKeys) {
  const Inputs in(SmallGeometry(DType::kF32), 70, kSeed);
  HeldSequence sequence(in.g, "quest{page = 8, score = \"deviation\"}");
  RunTo(sequence, in, in.n, 70, backend());
  Settle(sequence, backend());
  for (int32_t unit = 0; unit < 70 / 8; ++unit) {
    const Row means = StoredRow(sequence, 0, 1, 0, 1, unit);
    const Row variances = StoredRow(sequence, 0, 1, 1, 1, unit);
    for (int c = 0; c < 64; ++c) {
      double mean = 0, squares = 0;
      for (int32_t t = unit * 8; t < (unit + 1) * 8; ++t) mean += in.Key(t, 1, 1)[c] / 8.0;
      for (int32_t t = unit * 8; t < (unit + 1) * 8; ++t) {
        squares += std::pow(in.Key(t, 1, 1)[c] - mean, 2);
      }
      ASSERT_NEAR(means[c], mean, 1e-5) << "seed " << kSeed;
      ASSERT_NEAR(variances[c], squares / 8, 1e-5 * (1 + squares)) << "seed " << kSeed;
    }
  }
}

TEST_P(Segment, HierarchyRowsAreMeansOfTheFinerLevel) {
  // 700 tokens: 87 pages of 8, 29 chunks, 7 grids of 72 tokens complete in more than one block.
  const Inputs in(SmallGeometry(), 700, kSeed);
  HeldSequence sequence(in.g, "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3}");
  RunTo(sequence, in, in.n, 512, backend());
  Settle(sequence, backend());
  ASSERT_GT(sequence.blocks().size(), 1u);
  const int32_t sizes[] = {8, 3, 3};
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      std::vector<Row> finer;
      for (int32_t t = 0; t < in.n; ++t) finer.push_back(KeyOf(in, t, layer, head));
      for (int level = 0; level < 3; ++level) {
        std::vector<Row> means;
        for (size_t i = 0; i + sizes[level] <= finer.size(); i += sizes[level]) {
          means.push_back(MeanOf({finer.begin() + i, finer.begin() + i + sizes[level]}));
          ASSERT_EQ(
              StoredRow(sequence, level, layer, 0, head, static_cast<int32_t>(i) / sizes[level]),
              means.back())
              << "seed " << kSeed << " level " << level << " unit " << i / sizes[level];
        }
        finer = means;
      }
    }
  }
}

Row ValueOf(const Inputs& in, int32_t t, int layer, int head) {
  return {in.Value(t, layer, head), in.Value(t, layer, head) + in.g.head_dim};
}

// A stored coarse row: bf16 in slots of two bytes, fp32 in slots of four.
Row CoarseRow(HeldSequence& sequence, int level, int layer, int field, int head, int32_t unit) {
  const IndexLayout& index = sequence.state->index();
  const PagedRows rows = index.Rows(sequence.View().index_blocks, level, layer, field, head);
  EXPECT_NE(rows.dtype, DType::kF16);
  Row values(index.head_dim);
  for (int c = 0; c < index.head_dim; ++c) {
    values[c] = rows.dtype == DType::kF32
                    ? reinterpret_cast<const float*>(rows.Row(unit))[c]
                    : ToFloat(reinterpret_cast<const BF16*>(rows.Row(unit))[c]);
  }
  return values;
}

// Within a bf16 step of each of `levels` roundings.
void ExpectClose(const Row& got, const std::vector<double>& expected, int levels) {
  for (size_t c = 0; c < got.size(); ++c) {
    ASSERT_NEAR(got[c], expected[c], levels * 0.005 * std::abs(expected[c]) + 0.002 * levels);
  }
}

// The mean of each channel, in double.
std::vector<double> ChannelMeans(const std::vector<Row>& rows) {
  std::vector<double> mean(rows[0].size());
  for (size_t c = 0; c < mean.size(); ++c) {
    for (const Row& row : rows) mean[c] += row[c] / static_cast<double>(rows.size());
  }
  return mean;
}

// What stands in for units that are not selected: means of keys and values, at every level those of
// the unit's own tokens.
TEST_P(Segment, CoarseRowsAreMeansOfTheUnit) {
  const std::string plans[] = {
      "quest{page = 8, rest = \"mean\"}",
      "{selector = \"block\", codec = \"raw\", page = 8, rest = \"mean\"}",
      "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3, rest = \"mean\"}"};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Inputs in(SmallGeometry(dtype), 300, kSeed);
    for (const std::string& plan : plans) {
      SCOPED_TRACE(plan + " " + std::string(NameOf(dtype)));
      HeldSequence sequence(in.g, plan);
      RunTo(sequence, in, in.n, 64, backend());
      Settle(sequence, backend());
      const IndexLayout& index = sequence.state->index();
      ASSERT_GE(index.key_mean, 0);
      ASSERT_GT(index.value_mean, 0);
      for (int level = 0; level < index.level_count; ++level) {
        const int32_t size = index.levels[level].unit_tokens;
        for (int32_t unit = 0; unit < index.UnitsFor(level, in.n); ++unit) {
          std::vector<Row> keys, values;
          for (int32_t t = unit * size; t < (unit + 1) * size; ++t) {
            keys.push_back(KeyOf(in, t, 1, 1));
            values.push_back(ValueOf(in, t, 1, 1));
          }
          const auto stored = [&](int field) {
            return CoarseRow(sequence, level, 1, field, 1, unit);
          };
          ASSERT_NO_FATAL_FAILURE(
              ExpectClose(stored(index.key_mean), ChannelMeans(keys), level + 1));
          ASSERT_NO_FATAL_FAILURE(
              ExpectClose(stored(index.value_mean), ChannelMeans(values), level + 1));
        }
      }
    }
  }
}

// What a selector ranks by is the same with and without coarse rows.
TEST_P(Segment, CoarseRowsDoNotChangeTheOthers) {
  const Inputs in(SmallGeometry(), 100, kSeed);
  HeldSequence plain(in.g, "quest{page = 8}"), more(in.g, "quest{page = 8, rest = \"mean\"}");
  for (HeldSequence* s : {&plain, &more}) {
    RunTo(*s, in, in.n, 100, backend());
    Settle(*s, backend());
  }
  EXPECT_EQ(more.state->index().fields, 4);
  for (int field = 0; field < 2; ++field) {
    for (int32_t unit = 0; unit < 12; ++unit) {
      ASSERT_EQ(StoredRow(plain, 0, 1, field, 0, unit), StoredRow(more, 0, 1, field, 0, unit));
    }
  }
}

TEST_P(Segment, TokenByTokenInChunksAndAtOnceAreTheSameBytes) {
  const Inputs in(SmallGeometry(), 333, kSeed);
  for (const std::string plan : {"quest{page = 16}", "quest{page = 16, score = \"deviation\"}",
                                 "quest{page = 5}", "quest{page = 5, rest = \"mean\"}",
                                 "{selector = \"block\", codec = \"raw\", rest = \"mean\"}",
                                 "chess{page = 4, pages_per_chunk = 4, chunks_per_grid = 2}",
                                 "chess{page = 4, pages_per_chunk = 4, chunks_per_grid = 2, "
                                 "rest = \"mean\"}",
                                 "bits{unit = 16}", "bits{unit = 48, bits = 3}"}) {
    const auto at_once = IndexedInChunks(in, plan, in.n, backend());
    ASSERT_FALSE(at_once.empty());
    EXPECT_EQ(IndexedInChunks(in, plan, 1, backend()), at_once) << plan;
    EXPECT_EQ(IndexedInChunks(in, plan, 37, backend()), at_once) << plan;
  }
}

// What ref makes of the keys themselves, in more than one block; of the group that is filling
// nothing.
TEST_P(Segment, GroupsAreTheirKeysInFewBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const char* plan : {"bits", "bits{bits = 3, unit = 48}", "bits{bits = 4, unit = 256}"}) {
      SCOPED_TRACE(plan);
      const Inputs in(SmallGeometry(dtype), 1100, kSeed);
      HeldSequence sequence(in.g, plan);
      RunTo(sequence, in, in.n, 512, backend());
      Settle(sequence, backend());
      const IndexLayout& index = sequence.state->index();
      const SequenceView view = sequence.View();
      const int64_t bytes = index.group().bytes();
      const int32_t groups = index.UnitsFor(0, in.n);
      ASSERT_GT(sequence.blocks().size(), 1u);
      for (int layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < 2; ++head) {
          const PagedRows keys = KeysOf(view.pages, PageLayout::Of(in.g), layer, head);
          for (int32_t group = 0; group <= groups; ++group) {
            const std::byte* got = index.Row(view.index_blocks, 0, layer, 0, head, group);
            std::vector<std::byte> expected(bytes, std::byte{0xFF});
            const QuantiseKeysWork work{keys, group * index.levels[0].unit_tokens, index.group(),
                                        expected.data()};
            if (group < groups) QuantiseKeysRef(&work, 1, InlineExecutor());
            ASSERT_TRUE(std::equal(expected.begin(), expected.end(), got))
                << "seed " << kSeed << " layer " << layer << " head " << head << " group " << group;
          }
        }
      }
    }
  }
}

TEST_P(Segment, RowsOfFillingUnitsAreNotWritten) {
  const Inputs in(SmallGeometry(), 100, kSeed);
  HeldSequence sequence(in.g, "quest{page = 64}");
  RunTo(sequence, in, in.n, 100, backend());
  Settle(sequence, backend());
  const IndexLayout& index = sequence.state->index();
  const auto* row =
      reinterpret_cast<const uint8_t*>(index.Row(sequence.View().index_blocks, 0, 0, 0, 0, 1));
  EXPECT_TRUE(std::all_of(row, row + 128, [](uint8_t b) { return b == 0xFF; }));
  EXPECT_EQ(sequence.state->indexed_tokens(), 100);
}

TEST_P(Segment, HeldTokensAreIndexedFromWhereTheirIndexEnds) {
  const Inputs in(SmallGeometry(), 128, kSeed);
  HeldSequence built(in.g, "quest");
  RunTo(built, in, in.n, 128, backend());
  Settle(built, backend());
  const auto complete = built.blocks();
  // A prefix hit whose index reaches token 64 only.
  built.state = std::make_unique<SequenceState>(in.g, PlanOf("quest"), 128, 64);
  const SequenceView view = built.View();
  const IndexLayout& index = built.state->index();
  for (int layer = 0; layer < 2; ++layer) {
    for (int32_t unit = 0; unit < 8; ++unit) {
      for (int field = 0; field < 2; ++field) {
        for (int head = 0; head < 2; ++head) {
          if (unit >= 4) {
            std::memset(index.Row(view.index_blocks, 0, layer, field, head, unit), 0xFF, 128);
          }
        }
      }
    }
  }
  ASSERT_NE(built.blocks(), complete);
  Settle(built, backend());
  EXPECT_EQ(built.blocks(), complete);
}

KVS_FOR_EACH_BACKEND(Segment);

TEST(SegmenterNone, HasNoIndex) {
  const IndexLayout index = SegmenterOf(SegmenterKind::kNone).Layout(Plan(), SmallGeometry());
  EXPECT_EQ(index.kind, IndexLayout::Kind::kNone);
  EXPECT_EQ(index.BlocksFor(100000), 0);
}

}  // namespace
}  // namespace kvstrata
