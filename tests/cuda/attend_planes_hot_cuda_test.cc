// SPDX-License-Identifier: Apache-2.0
// Op attend_planes on the GPU with lower runs in the host's memory, and with copies of some of
// their rows on the GPU (HotRows). What is read of copies is what is read in place, so outputs are
// the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/cuda/planes_case.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

PlanesShape OnHost(int dim = 128, int group = 4) {
  PlanesShape s;
  s.dim = dim;
  s.group = group;
  s.lower_on_host = true;
  s.rule.sinks = 0;  // all that is fine may have a copy
  s.rule.recent = 1;
  return s;
}

// Copies for a case's sequences, with room for `groups` groups each.
class Copies {
 public:
  Copies(const PlanesCase& c, int rows, int groups) {
    const PlanesShape& s = c.inputs().shape();
    const int64_t heads = s.kv_heads, row_bytes = c.inputs().format().row_bytes();
    const auto of_sequence = static_cast<size_t>(heads * groups * rows);
    tags_ = DeviceArray<uint8_t>(std::vector<uint8_t>(of_sequence * s.batch, 0));
    rows_ = DeviceArray<std::byte>(of_sequence * s.batch * static_cast<size_t>(row_bytes));
    std::vector<uint64_t> words;
    for (int b = 0; b < s.batch; ++b) {
      words.push_back(tags_.address() + b * of_sequence);
      words.push_back(rows_.address() + b * of_sequence * static_cast<uint64_t>(row_bytes));
      words.push_back(static_cast<uint64_t>(groups));
    }
    static_assert(sizeof(HotSequence) == 3 * sizeof(uint64_t));
    table_ = DeviceArray<uint64_t>(words);
    hot_ = {reinterpret_cast<const HotSequence*>(table_.get()), rows, 0};
  }
  const HotRows& hot() const { return hot_; }

 private:
  DeviceArray<uint8_t> tags_;
  DeviceArray<std::byte> rows_;
  DeviceArray<uint64_t> table_;
  HotRows hot_;
};

// Copies in a case's blocks.
class BlockCopies {
 public:
  explicit BlockCopies(int rows) {
    hot_.rows = rows;
    hot_.launch = launch_.get();
  }
  // For one launch.
  HotRows Next() {
    launch_.Write({++number_});
    return hot_;
  }

 private:
  DeviceArray<uint32_t> launch_{std::vector<uint32_t>{0}};
  uint32_t number_ = 0;
  HotRows hot_;
};

PlanesShape InBlocks(int rows, int dim = 128, int group = 4) {
  PlanesShape s = OnHost(dim, group);
  s.block_groups = 1;
  s.hot_in_blocks = rows;
  return s;
}

uint64_t Sum(const std::vector<uint64_t>& of) {
  uint64_t sum = 0;
  for (const uint64_t x : of) sum += x;
  return sum;
}

uint64_t FineBytes(const PlanesCase& c) {
  uint64_t fine = 0;
  for (size_t item = 0; item < c.inputs().Items(); ++item) {
    const uint8_t* const flags = &c.got().fine[item * c.inputs().Stride()];
    fine += static_cast<uint64_t>(CountFlags(flags, c.inputs().Sealed(item)));
  }
  return fine * static_cast<uint64_t>(c.inputs().format().row_bytes());
}

// Runs with the copies; returns the bytes that they had.
uint64_t RunWith(PlanesCase& c, const HotRows& hot) {
  AttendPlanesBatch work = c.work();
  work.hot = hot;
  c.PoisonOutputs();
  EXPECT_EQ(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
  c.Read();
  return Sum(c.got().hot);
}

// Queries change a little.
void Drift(PlanesCase& c, Rng& rng) {
  const PlanesShape& s = c.inputs().shape();
  std::vector<float> q = c.inputs().q();
  for (float& x : q) x = RoundedTo(s.q_dtype, 0.97f * x + 0.2f * s.sharpness * Normal(rng));
  c.SetQueries(q);
}

void ExpectSame(const PlanesOutputs& got, const PlanesOutputs& want) {
  EXPECT_EQ(std::memcmp(got.rows.data(), want.rows.data(), want.rows.size() * sizeof(float)), 0);
  EXPECT_EQ(got.fine, want.fine);
  EXPECT_EQ(got.fetched, want.fetched);
}

TEST(AttendPlanesHotCuda, ReadsLowerRunsOnTheHost) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int keep : {8, 4}) {
      for (const bool in_full : {false, true}) {
        PlanesShape s = OnHost(dim, 1 + Below(rng, 8));
        s.keep = keep;
        s.rule.sinks = 4;
        s.rule.recent = in_full ? 100000 : 64;
        if (in_full) s.rule.fine_above = 0, s.rule.share = 1;
        PlanesCase c(s, rng);
        c.SetTokens({1 + Below(rng, 770), 700 + Below(rng, 70)});
        ASSERT_EQ(c.Run(), 0);
        c.ExpectRule();
      }
    }
  }
}

// Cold, then warm: all that is fine has a copy, and nothing of the host is read any more.
TEST(AttendPlanesHotCuda, WarmCopiesAreAllThatIsRead) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const auto& [keep, by_share] : {std::pair{8, false}, {4, false}, {8, true}, {4, true}}) {
      PlanesShape s = OnHost(dim, 1 + Below(rng, 8));
      s.keep = keep;
      s.rule.fine_above = by_share ? 0 : 16;
      PlanesCase c(s, rng);
      c.SetTokens({769, 600});
      ASSERT_EQ(c.Run(), 0);
      c.ExpectRule();
      const PlanesOutputs want = c.got();
      ASSERT_GT(FineBytes(c), 0u);
      Copies copies(c, 32, s.groups_max);
      EXPECT_EQ(RunWith(c, copies.hot()), 0u) << "cold";
      ExpectSame(c.got(), want);
      EXPECT_EQ(RunWith(c, copies.hot()), FineBytes(c)) << "warm";
      ExpectSame(c.got(), want);
      c.PoisonLower();
      EXPECT_EQ(RunWith(c, copies.hot()), FineBytes(c)) << "warm";
      ExpectSame(c.got(), want);
    }
  }
}

TEST(AttendPlanesHotCuda, WarmCopiesInBlocksAreAllThatIsRead) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128}) {
    for (const int keep : {8, 4}) {
      PlanesShape s = InBlocks(32, dim, 1 + Below(rng, 8));
      s.keep = keep;
      s.rule.fine_above = 16;
      PlanesCase c(s, rng);
      c.SetTokens({769, 600});
      ASSERT_EQ(c.Run(), 0);
      c.ExpectRule();
      const PlanesOutputs want = c.got();
      BlockCopies copies(32);
      EXPECT_EQ(RunWith(c, copies.Next()), 0u) << "cold";
      ExpectSame(c.got(), want);
      c.PoisonLower();
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(RunWith(c, copies.Next()), FineBytes(c)) << "warm";
        ExpectSame(c.got(), want);
      }
    }
  }
}

// The most that copies can have had where one of both sequences has those of a group in a launch.
uint64_t MostHitsOfOne(const PlanesCase& c) {
  const PlanesInputs& in = c.inputs();
  int64_t most = 0;
  for (int head = 0; head < in.shape().kv_heads; ++head) {
    for (int32_t token = 0; token < in.Sealed(0); token += 64) {
      int64_t of_group = 0;
      for (const int sequence : {0, 1}) {
        const auto item = static_cast<size_t>(sequence * in.shape().kv_heads + head);
        of_group = std::max(of_group, CountFlags(&c.got().fine[item * in.Stride() + token], 64));
      }
      most += of_group;
    }
  }
  return static_cast<uint64_t>(most * in.format().row_bytes());
}

// Places that are too few, queries that drift, and blocks that two sequences have.
TEST(AttendPlanesHotCuda, SharedBlocksHaveOneUserALaunch) {
  Rng rng(TestSeed());
  for (const int rows : {4, 8, 32}) {
    PlanesShape s = InBlocks(rows);
    s.rule.fine_above = 1;
    PlanesCase c(s, rng);
    c.ShareBlocks();
    BlockCopies copies(rows);
    uint64_t hits = 0;
    for (int step = 0; step < 12; ++step) {
      SCOPED_TRACE(std::to_string(rows) + " rows, step " + std::to_string(step));
      c.SetTokens({769, 769});
      ASSERT_EQ(c.Run(), 0);
      c.Read();
      const PlanesOutputs want = c.got();
      const uint64_t had = RunWith(c, copies.Next());
      ASSERT_NO_FATAL_FAILURE(ExpectSame(c.got(), want));
      EXPECT_LE(had, MostHitsOfOne(c));
      hits += had;
      Drift(c, rng);
    }
    EXPECT_GT(hits, 0u);
  }
}

// Room that is too little, for rows or for groups, and queries that drift: rows take the places of
// others, and some never have one.
TEST(AttendPlanesHotCuda, TooFewCopiesChangeNothing) {
  Rng rng(TestSeed());
  for (const auto& [rows, groups] : {std::pair{1, 12}, {3, 12}, {8, 12}, {8, 5}, {32, 12}}) {
    PlanesShape s = OnHost();
    s.rule.fine_above = 1;
    s.rule.sinks = 4;
    s.rule.recent = 40;
    PlanesCase c(s, rng);
    Copies copies(c, rows, groups);
    uint64_t hits = 0, fine = 0;
    for (int step = 0; step < 12; ++step) {
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(groups) + " groups, step " +
                   std::to_string(step));
      c.SetTokens({500 + 20 * step, 769});
      ASSERT_EQ(c.Run(), 0);
      c.Read();
      const PlanesOutputs want = c.got();
      hits += RunWith(c, copies.hot());
      ASSERT_NO_FATAL_FAILURE(ExpectSame(c.got(), want));
      fine += FineBytes(c);
      Drift(c, rng);
    }
    std::printf("%d rows a group, %d groups: %.0f %% of fine bytes are copies'\n", rows, groups,
                100.0 * static_cast<double>(hits) / static_cast<double>(fine));
    EXPECT_GT(hits, 0u);
    EXPECT_LT(hits, fine);
  }
}

// A sequence that attends in full passes its copies by, one without copies is read in place.
TEST(AttendPlanesHotCuda, SomeSequencesHaveNoCopies) {
  Rng rng(TestSeed());
  PlanesShape s = OnHost();
  s.batch = 3;
  PlanesCase c(s, rng);
  c.SetTokens({769, 700, 650});
  c.AttendInFull(1);
  ASSERT_EQ(c.Run(), 0);
  c.Read();
  const PlanesOutputs want = c.got();
  Copies copies(c, 32, s.groups_max);
  DeviceArray<HotSequence> sequences(std::vector<HotSequence>(3));
  std::vector<HotSequence> table(3);
  Check(cudaMemcpy(table.data(), copies.hot().sequences, sizeof(HotSequence) * 3,
                   cudaMemcpyDeviceToHost),
        "reading a table");
  table[2] = {};
  sequences.Write(table);
  HotRows hot = copies.hot();
  hot.sequences = sequences.get();
  for (int i = 0; i < 2; ++i) {
    RunWith(c, hot);
    ExpectSame(c.got(), want);
  }
  const std::vector<uint64_t>& hits = c.got().hot;
  EXPECT_GT(hits[0] + hits[1], 0u);
  EXPECT_EQ(hits[2] + hits[3] + hits[4] + hits[5], 0u);
}

TEST(AttendPlanesHotCuda, RefusesSetsThatItDoesNotTake) {
  Rng rng(TestSeed());
  PlanesCase c(OnHost(), rng);
  c.SetTokens({300, 400});
  Copies copies(c, 8, 12);
  AttendPlanesBatch work = c.work();
  work.hot = copies.hot();
  for (const int rows : {0, 33}) {
    work.hot.rows = rows;
    EXPECT_NE(kvs_cuda_ops()->attend_planes(work, nullptr), 0) << rows;
  }
  PlanesCase in_blocks(InBlocks(8), rng);
  in_blocks.SetTokens({300, 400});
  BlockCopies own(8);
  work = in_blocks.work();
  work.hot = own.Next();
  work.planes.block_groups = 2;
  EXPECT_NE(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
  work.planes.block_groups = 1;
  work.planes.hot_offset += 16;
  EXPECT_NE(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
  PlanesCase wide(InBlocks(8, 256), rng);
  wide.SetTokens({300, 400});
  work = wide.work();
  work.hot = own.Next();
  EXPECT_NE(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
