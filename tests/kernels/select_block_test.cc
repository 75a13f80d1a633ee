// SPDX-License-Identifier: Apache-2.0
// Selector `block` over raw pages and over packed segments against docs/spec/mosaickv.md in double
// precision, and the options that it shares with `minmax`: the softmax over a group and the rest.
#include "gmock/gmock.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/select_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 51;

Geometry SmallGeometry(int32_t kv_heads = 2, int32_t group = 2) {
  return {.layers = 2, .query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 64};
}

using Ranges = std::vector<kvstrata::Run>;

int32_t CeilOf(double share, int32_t n) {
  return std::clamp(static_cast<int32_t>(std::ceil(share * n - 1e-9)), 1, n);
}

// The first block, then others by descending score until one exceeds `budget`; at least one other.
Ints ChooseBlocks(const Ranges& blocks, const Doubles& scores, int32_t budget) {
  Ints chosen = {0};
  int32_t room = budget;
  for (const int32_t i : Ranking(scores)) {
    if (i == 0) continue;
    const int32_t size = blocks[i].end - blocks[i].begin;
    if (chosen.size() > 1 && size > room) break;
    chosen.push_back(i);
    room -= size;
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Scores of all units from those of single heads [group][units]: the maximum, or the sum over the
// heads of the softmax over the candidates (the units from `first` on).
Doubles Grouped(const std::vector<Doubles>& heads, bool softmax, size_t first) {
  Doubles scores(heads[0].size(), softmax ? 0.0 : -INFINITY);
  for (const Doubles& head : heads) {
    Doubles own(head.begin() + first, head.end());
    for (double& x : own) x /= std::sqrt(64.0);
    if (softmax) own = Softmax(own);
    for (size_t u = first; u < scores.size(); ++u) {
      scores[u] = softmax ? scores[u] + own[u - first] : std::max(scores[u], head[u]);
    }
  }
  return scores;
}

// Scores of the means of whole blocks.
std::vector<Doubles> MeanScores(const Inputs& in, int32_t query, int layer, int head, int32_t block,
                                int32_t blocks) {
  std::vector<Doubles> heads(in.g.group(), Doubles(blocks));
  for (int32_t b = 0; b < blocks; ++b) {
    for (int c = 0; c < in.g.head_dim; ++c) {
      double mean = 0;
      for (int32_t t = b * block; t < (b + 1) * block; ++t) mean += in.Key(t, layer, head)[c];
      mean /= block;
      for (int g = 0; g < in.g.group(); ++g) {
        heads[g][b] += double{in.Query(query, layer, head * in.g.group() + g)[c]} * mean;
      }
    }
  }
  return heads;
}

Ints CoarseUnits(const std::vector<CoarseRun>& rows) {
  Ints units;
  for (const CoarseRun& r : rows) {
    EXPECT_EQ(r.level, 0);
    for (int32_t u = r.units.begin; u < r.units.end; ++u) units.push_back(u);
  }
  return units;
}

Ints Without(const Ints& all, const Ints& some) {
  Ints rest;
  std::set_difference(all.begin(), all.end(), some.begin(), some.end(), std::back_inserter(rest));
  return rest;
}

class Block : public EachBackend {};

struct RawCase {
  int32_t block, recent;
  double share;
  bool softmax, rest;
};

TEST_P(Block, RawTakesTheBlocksOfTheLargestMeans) {
  const RawCase cases[] = {{8, 16, 0.2, false, false}, {8, 16, 0.2, true, true},
                           {5, 1, 0.1, false, true},   {16, 40, 0.4, true, false},
                           {16, 1, 0.01, false, true}, {32, 32, 1.0, false, false}};
  int skipped = 0, counted = 0;
  for (const RawCase& c : cases) {
    const Inputs in(SmallGeometry(2, 3), 150, kSeed);
    Selecting s(
        in,
        "{selector = 'block', codec = 'raw', min_tokens = 0, page = " + std::to_string(c.block) +
            ", n_recent = " + std::to_string(c.recent) + ", share = " + std::to_string(c.share) +
            (c.softmax ? ", group = 'softmax'" : "") + (c.rest ? ", rest = 'mean'}" : "}"),
        backend());
    s.Prompt(20);
    s.PrefillDone();
    for (int32_t n = 21; n <= in.n; ++n) {
      const auto got = s.Step();
      const int32_t last = std::max(1, std::max(n - c.recent, 0) / c.block);
      const int32_t budget = CeilOf(c.share, n);
      const Ints always = UnionOf(Upto(0, std::min(c.block, n)), Upto(last * c.block, n));
      for (int layer = 0; layer < 2; ++layer) {
        if (static_cast<int32_t>(always.size()) + budget >= n) {
          ASSERT_TRUE(got[layer].full) << n;
          continue;
        }
        ASSERT_FALSE(got[layer].full) << n;
        ASSERT_EQ(got[layer].coarse.size(), c.rest ? 2u : 0u);
        for (int head = 0; head < 2; ++head) {
          const auto heads = MeanScores(in, n - 1, layer, head, c.block, last);
          const Doubles scores = Grouped(heads, c.softmax, 1);
          const int32_t k = std::max(1, budget / c.block);
          ++counted;
          if (!IsStable({scores.begin() + 1, scores.end()}, k)) {
            ++skipped;
            continue;
          }
          Ranges ranges;
          for (int32_t b = 0; b < last; ++b) ranges.push_back({b * c.block, (b + 1) * c.block});
          const Ints units = ChooseBlocks(ranges, scores, budget);
          ASSERT_EQ(got[layer].units[head], units) << "seed " << kSeed << " n " << n;
          Ints expected = always;
          for (const int32_t u : units) {
            expected = UnionOf(expected, Upto(ranges[u].begin, ranges[u].end));
          }
          ASSERT_EQ(PositionsOf(got[layer].runs[head]), expected) << n;
          if (!c.rest) continue;
          ASSERT_EQ(CoarseUnits(got[layer].coarse[head]), Without(Upto(1, last), units)) << n;
        }
      }
    }
  }
  EXPECT_GT(counted, 2000);
  EXPECT_LT(skipped, 20);
}

TEST_P(Block, RawTiesGoToTheLowerBlock) {
  Inputs in(SmallGeometry(), 100, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  for (const char* group : {"max", "softmax"}) {
    Selecting s(in,
                std::string("{selector = 'block', codec = 'raw', min_tokens = 0, page = 8, "
                            "n_recent = 8, share = 0.25, group = '") +
                    group + "'}",
                backend());
    s.Prompt(99);
    s.PrefillDone();
    EXPECT_EQ(s.Step()[1].units[0], (Ints{0, 1, 2, 3})) << group;
  }
}

// --- minmax: the same options ---

TEST_P(Block, MinMaxSumsTheHeadsSoftmaxesAndKeepsTheRest) {
  Inputs in(SmallGeometry(2, 3), 200, kSeed);
  // One head of each group is loud: by the maximum it would decide alone.
  for (int32_t t = 0; t < in.n; ++t) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head : {0, 3}) {
        float* q = const_cast<float*>(in.Query(t, layer, head));
        for (int c = 0; c < 64; ++c) q[c] *= 8;
      }
    }
  }
  Selecting s(in, "quest{page = 8, budget = 40, group = 'softmax', rest = 'mean', min_tokens = 0}",
              backend());
  Selecting loud(in, "quest{page = 8, budget = 40, min_tokens = 0}", backend());
  for (Selecting* each : {&s, &loud}) {
    each->Prompt(100);
    each->PrefillDone();
  }
  int skipped = 0, different = 0;
  for (int32_t n = 101; n <= in.n; ++n) {
    const auto got = s.Step(), plain = loud.Step();
    const int32_t last = (n - 1) / 8;
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        std::vector<Doubles> heads(3, Doubles(last));
        for (int g = 0; g < 3; ++g) {
          const float* q = in.Query(n - 1, layer, head * 3 + g);
          for (int32_t u = 0; u < last; ++u) {
            for (int c = 0; c < 64; ++c) {
              double low = INFINITY, high = -INFINITY;
              for (int32_t t = u * 8; t < (u + 1) * 8; ++t) {
                low = std::min<double>(low, in.Key(t, layer, head)[c]);
                high = std::max<double>(high, in.Key(t, layer, head)[c]);
              }
              heads[g][u] += std::max(q[c] * low, q[c] * high);
            }
          }
        }
        const Doubles scores = Grouped(heads, true, 0);
        ASSERT_TRUE(plain[layer].coarse.empty());
        different += got[layer].units[head] != plain[layer].units[head];
        const Ints rest = CoarseUnits(got[layer].coarse[head]);
        ASSERT_EQ(rest, Without(Upto(0, last), got[layer].units[head]));
        if (!IsStable(scores, 5)) {
          ++skipped;
          continue;
        }
        ASSERT_EQ(got[layer].units[head], TopK(scores, 5)) << "seed " << kSeed << " n " << n;
      }
    }
  }
  EXPECT_LT(skipped, 40);
  EXPECT_GT(different, 50);
}

// --- over packed ---

// Keys with a few strong directions, so that rotations and packing have something to find.
Inputs LowRankInputs(const Geometry& g, int32_t n) {
  Inputs in(g, n, kSeed);
  for (std::vector<float>* rows : {&in.keys, &in.values}) {
    for (size_t i = 0; i < rows->size(); ++i) {
      (*rows)[i] = ToFloat(FromFloat<BF16>((*rows)[i] * (i % 64 < 8 ? 3.0f : 0.2f)));
    }
  }
  return in;
}

// Row i of packed rows, in the rotated axes.
Doubles Unpacked(const PackedRows& rows, int32_t i) {
  Doubles dense(rows.dim, 0.0);
  const std::byte* row = rows.data + i * rows.stride;
  int at = 0;
  for (int b = 0; b < rows.bits; ++b) {
    if ((std::to_integer<int>(row[b / 8]) >> (b % 8) & 1) == 0) continue;
    for (int c = 0; c < rows.neighbours; ++c, ++at) {
      BF16 x;
      std::memcpy(&x, row + rows.value_offset + 2 * at, sizeof x);
      dense[b * rows.neighbours + c] = ToFloat(x);
    }
  }
  return dense;
}

double RotatedDot(const float* r, const float* q, const Doubles& row) {
  double sum = 0;
  for (size_t j = 0; j < row.size(); ++j) {
    if (row[j] != 0) sum += row[j] * Dot(r + j * row.size(), q, static_cast<int>(row.size()));
  }
  return sum;
}

struct PackedOracle {
  Ranges blocks;
  Doubles scores;
};

PackedOracle OracleOf(const PackedStorage& packed, const Inputs& in, int32_t query, int layer,
                      int head, bool softmax) {
  PackedOracle oracle;
  std::vector<Doubles> heads(in.g.group());
  for (size_t s = 0; s < packed.segments().size(); ++s) {
    const PackedHead& h = packed.head(static_cast<int>(s), layer, head);
    const kvstrata::Run tokens = packed.segments()[s].tokens;
    for (int32_t b = 0; tokens.begin + b * h.block < tokens.end; ++b) {
      const int32_t begin = tokens.begin + b * h.block;
      oracle.blocks.push_back({begin, std::min(begin + h.block, tokens.end)});
      const Doubles row = Unpacked(h.blocks, b);
      for (int g = 0; g < in.g.group(); ++g) {
        heads[g].push_back(RotatedDot(h.r_k, in.Query(query, layer, head * in.g.group() + g), row));
      }
    }
  }
  oracle.scores = Grouped(heads, softmax, 1);
  return oracle;
}

class PackedRun {
 public:
  PackedRun(const Inputs& in, const std::string& plan, const std::string& backend)
      : sequence(PlanOf(plan), in.g, in, nullptr, backend),
        selector(NewSelector(PlanOf(plan), in.g)) {}

  void Commit(int32_t end) {
    sequence.Commit(end);
    sequence.Settle();
    Result<std::unique_ptr<PackedStorage>> parsed =
        PackedStorage::Parse(sequence.View(), sequence.geometry());
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    packed = std::move(*parsed);
  }
  // The selection for the token behind the committed ones, whose key is on its page already.
  Selection Select(const Inputs& in, int layer) {
    Selection s;
    selector->Select(sequence.Context(packed.get()), layer, in.Query(sequence.tokens(), layer, 0),
                     &s);
    return s;
  }

  CodecSequence sequence;
  std::unique_ptr<Selector> selector;
  std::unique_ptr<PackedStorage> packed;
};

constexpr const char* kPackedPlans[] = {
    "mosaickv{max_loss = 1, min_tokens = 0, share = 0.2, segment = 96, buffer = 16, block = 4}",
    "mosaickv{max_loss = 1, min_tokens = 0, share = 0.3, segment = 96, buffer = 32, group = "
    "'softmax'}",
    "mosaickv{max_loss = 1, min_tokens = 0, share = 0.01, segment = 4096, buffer = 16, block = 16}",
    ("mosaickv{max_loss = 1, min_tokens = 0, share = 0.2, segment = 64, buffer = 16, strategy = "
     "'search', "
     "max_channel_loss = 0.35, max_block_loss = 0.93, close_loss = 6}")};

TEST_P(Block, PackedTakesTheBestBlocksOfAllSegments) {
  const Inputs in = LowRankInputs(SmallGeometry(), 330);
  int skipped = 0, counted = 0;
  for (const std::string text : kPackedPlans) {
    const bool softmax = text.find("softmax") != std::string::npos;
    PackedRun run(in, text, GetParam());
    run.sequence.Commit(203);
    run.sequence.PrefillDone();
    for (int32_t n = 204; n <= in.n; n += 11) {
      ASSERT_NO_FATAL_FAILURE(run.Commit(n - 1));
      ASSERT_GT(run.packed->end(), 0);
      const int32_t budget = CeilOf(PlanOf(text).block.share, n);
      for (int layer = 0; layer < 2; ++layer) {
        const Selection got = run.Select(in, layer);
        ASSERT_FALSE(got.full);
        for (int head = 0; head < 2; ++head) {
          const PackedOracle oracle = OracleOf(*run.packed, in, n - 1, layer, head, softmax);
          ASSERT_EQ(static_cast<int32_t>(oracle.blocks.size()),
                    run.packed->BlockCount(layer, head));
          const Ints units = ChooseBlocks(oracle.blocks, oracle.scores, budget);
          ++counted;
          if (!IsStable({oracle.scores.begin() + 1, oracle.scores.end()},
                        static_cast<int32_t>(units.size()) - 1)) {
            ++skipped;
            continue;
          }
          ASSERT_EQ(got.units[head], units) << text << " seed " << kSeed << " n " << n;
          Ints expected = Upto(run.packed->end(), n);
          for (const int32_t u : units) {
            expected = UnionOf(expected, Upto(oracle.blocks[u].begin, oracle.blocks[u].end));
          }
          ASSERT_EQ(PositionsOf(got.runs[head]), expected) << text << " n " << n;
        }
      }
    }
  }
  EXPECT_GT(counted, 150);
  EXPECT_LT(skipped, 10);
}

TEST_P(Block, PackedIsFullUntilSomethingIsPacked) {
  const Inputs in = LowRankInputs(SmallGeometry(), 60);
  PackedRun run(in, "mosaickv{max_loss = 1, min_tokens = 50, segment = 32, buffer = 16}",
                GetParam());
  run.sequence.Commit(20);
  EXPECT_TRUE(run.Select(in, 0).full);
  run.sequence.Commit(59);
  EXPECT_TRUE(run.Select(in, 0).full);  // no storage yet, whatever the length
  run.sequence.PrefillDone();
  ASSERT_NO_FATAL_FAILURE(run.Commit(59));
  EXPECT_FALSE(run.Select(in, 0).full);
}

// TokenSelect over packed: packed rows vote in rotated space, raw rows as they are.
TEST_P(Block, VotesReachPackedRows) {
  const Inputs in = LowRankInputs(SmallGeometry(), 230);
  const std::string text =
      "tokenselect{codec = 'packed', max_loss = 1, k = 24, n_init = 5, n_local = 9, theta = 1, "
      "min_tokens = 0, "
      "segment = 64, buffer = 32, keep = 48}";
  PackedRun run(in, text, GetParam());
  run.sequence.Commit(150);
  run.sequence.PrefillDone();
  int skipped = 0;
  for (int32_t n = 151; n <= in.n; n += 4) {
    ASSERT_NO_FATAL_FAILURE(run.Commit(n - 1));
    const Selection got = run.Select(in, 1);
    Doubles votes(n - 9 - 5, 0.0);
    for (int h = 0; h < in.g.query_heads; ++h) {
      Doubles logits;
      size_t s = 0;
      for (int32_t t = 5; t < n - 9; ++t) {
        double dot = 0;
        if (t >= run.packed->end()) {
          dot = Dot(in.Query(n - 1, 1, h), in.Key(t, 1, h / 2), 64);
        } else {
          while (run.packed->segments()[s].tokens.end <= t) ++s;
          const PackedHead& head = run.packed->head(static_cast<int>(s), 1, h / 2);
          dot = RotatedDot(head.r_k, in.Query(n - 1, 1, h),
                           Unpacked(head.keys, t - run.packed->segments()[s].tokens.begin));
        }
        logits.push_back(dot / 8);
      }
      const Doubles p = Softmax(logits);
      for (size_t t = 0; t < p.size(); ++t) votes[t] += p[t];
    }
    if (!IsStable(votes, 24)) {
      ++skipped;
      continue;
    }
    Ints chosen = TopK(votes, 24);
    for (int32_t& t : chosen) t += 5;
    ASSERT_EQ(PositionsOf(got.runs[0]), UnionOf(UnionOf(Upto(0, 5), chosen), Upto(n - 9, n))) << n;
  }
  EXPECT_LT(skipped, 3);
}

KVS_FOR_EACH_BACKEND(Block);

}  // namespace
}  // namespace kvstrata
