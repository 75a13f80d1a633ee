// SPDX-License-Identifier: Apache-2.0
// The disk tier on a directory that behaves, by io_uring and by threads.
#include "server/tier/disk/disk_tier.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "server/tier/disk/format/format.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/test_queues.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSegment = 1 << 20;

DiskTierOptions Options(const std::string& directory, uint64_t segments = 8) {
  DiskTierOptions options;
  options.directory = directory;
  options.segment_bytes = kSegment;
  options.budget_bytes = segments * kSegment * 64 / 63 + 65536;  // with its checkpoints
  options.depth = 16;
  return options;
}

std::unique_ptr<DiskTier> MustOpen(const DiskTierOptions& options) {
  Result<std::unique_ptr<DiskTier>> tier = DiskTier::Open(options, Soon());
  EXPECT_TRUE(tier.ok()) << tier.status().ToString();
  return tier.ok() ? std::move(*tier) : nullptr;
}

std::map<std::string, std::vector<uint64_t>> Listing(const DiskTier& tier) {
  std::map<std::string, std::vector<uint64_t>> all;
  tier.ForEach([&](const std::string& key, std::span<const uint64_t> sizes) {
    all[key].assign(sizes.begin(), sizes.end());
  });
  return all;
}

class OnEitherQueue : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    options_ = Options(dir_ / "tier", 16);
    if (std::string_view(GetParam()) == "pread") {
      options_.new_queue = [](uint32_t depth) {
        return IoQueueChoice{NewPreadQueue(depth), OkStatus()};
      };
    }
    tier_ = MustOpen(options_);
    ASSERT_NE(tier_, nullptr);
  }
  void Reopen() {
    tier_.reset();
    tier_ = MustOpen(options_);
  }

  ScratchDir dir_;
  DiskTierOptions options_;
  std::unique_ptr<DiskTier> tier_;
};

TEST_P(OnEitherQueue, ValuesOfAllShapesComeBackAndSurviveAStart) {
  const std::vector<std::vector<uint64_t>> shapes = {{1},
                                                     {4096},
                                                     {4097},
                                                     {65536},
                                                     {65537},
                                                     {100000, 1, 4096},
                                                     {131072, 77},
                                                     {900000},
                                                     {512, 512, 512},
                                                     {300000, 300000},
                                                     std::vector<uint64_t>(16, 4095),
                                                     std::vector<uint64_t>(16, 20001)};
  for (size_t i = 0; i < shapes.size(); ++i) {
    const std::string key = "key " + std::to_string(i);
    ASSERT_TRUE(PutOne(tier_.get(), key, ValueOf(key, 0, shapes[i], i % 2 == 0)).ok());
  }
  for (const bool checkpointed : {false, true}) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const std::string key = "key " + std::to_string(i);
      const AlignedBuffers got(shapes[i], checkpointed);
      EXPECT_TRUE(tier_->Contains(key));
      EXPECT_EQ(tier_->Sizes(key), shapes[i]);
      const Status status = GetOne(tier_.get(), key, got);
      ASSERT_TRUE(status.ok()) << key << status.ToString();
      ASSERT_TRUE(SameBytes(got, ValueOf(key, 0, shapes[i]))) << key;
    }
    if (checkpointed) {
      ASSERT_TRUE(tier_->Checkpoint(Soon()).ok());
    }
    Reopen();
    EXPECT_EQ(tier_->Stats().scanned_segments == 0, checkpointed);
  }
}

TEST(DiskTier, AValueWithRoomForItsHeaderIsOneWrite) {
  const ScratchDir dir;
  IoHistory history;
  DiskTierOptions options = Options(dir / "tier");
  options.new_queue = [&](uint32_t) {
    return IoQueueChoice{NewRecordingQueue(NewInlineQueue(), &history), OkStatus()};
  };
  const auto tier = MustOpen(options);
  ASSERT_TRUE(PutOne(tier.get(), "first", ValueOf("first", 0, {253952})).ok());
  history.clear();  // the segment is marked dirty by now
  ASSERT_TRUE(PutOne(tier.get(), "without", ValueOf("without", 0, {253952})).ok());
  EXPECT_EQ(history.size(), 2u);
  history.clear();
  ASSERT_TRUE(PutOne(tier.get(), "with", ValueOf("with", 0, {253952}, true)).ok());
  ASSERT_EQ(history.size(), 1u);
  EXPECT_EQ(history[0].bytes.size(), 253952u + 4096u);
}

TEST_P(OnEitherQueue, ManyValuesInOneBatch) {
  constexpr size_t kCount = 300;
  std::vector<AlignedBuffers> values, got;
  std::vector<TierPut> puts;
  std::vector<TierGet> gets;
  for (size_t i = 0; i < kCount; ++i) {
    const std::string key = std::to_string(i);
    values.push_back(ValueOf(key, 0, {16384}));
    got.emplace_back(std::vector<uint64_t>{16384});
    puts.push_back(PutOf(key, values.back()));
    gets.push_back({key, got.back().buffers(), got.back().owner(), {}});
  }
  tier_->Put(puts, Soon());
  tier_->Get(gets, Soon());
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(puts[i].status.ok()) << puts[i].status.ToString();
    ASSERT_TRUE(gets[i].status.ok()) << gets[i].status.ToString();
    ASSERT_TRUE(SameBytes(values[i], got[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, OnEitherQueue, ::testing::Values("default", "pread"),
                         [](const auto& param) { return std::string(param.param); });

class DiskTierTest : public ::testing::Test {
 protected:
  ScratchDir dir_{"/dev/shm"};
  DiskTierOptions options_ = Options(dir_ / "tier");
};

TEST_F(DiskTierTest, ErasedKeysAreGoneAndTheirSlotsUsedAgain) {
  auto tier = MustOpen(options_);
  const auto value = ValueOf("a", 0, {200000});
  for (int round = 0; round < 100; ++round) {  // 20 MB through 8
    ASSERT_TRUE(PutOne(tier.get(), "a", value).ok());
    ASSERT_TRUE(tier->Erase(std::vector<std::string>{"a", "never there"}, Soon()).ok());
    EXPECT_FALSE(tier->Contains("a"));
    EXPECT_EQ(GetOne(tier.get(), "a", value).reason(), "DISK_MISS");
  }
  EXPECT_EQ(tier->Stats().used_bytes, 0u);
  tier.reset();
  tier = MustOpen(options_);
  EXPECT_TRUE(Listing(*tier).empty());
}

TEST_F(DiskTierTest, APutOfAKeyThatIsThereIsDone) {
  auto tier = MustOpen(options_);
  ASSERT_TRUE(PutOne(tier.get(), "a", ValueOf("a", 0, {5000})).ok());
  ASSERT_TRUE(PutOne(tier.get(), "a", ValueOf("a", 1, {5000})).ok());
  const AlignedBuffers got({5000});
  ASSERT_TRUE(GetOne(tier.get(), "a", got).ok());
  EXPECT_TRUE(SameBytes(got, ValueOf("a", 0, {5000})));
}

TEST_F(DiskTierTest, AFullTierNamesVictims) {
  auto tier = MustOpen(options_);
  const std::vector<uint64_t> big = {196000}, small = {10000};
  std::vector<std::string> stored;
  for (;;) {
    const std::string key = "big " + std::to_string(stored.size());
    const Status status = PutOne(tier.get(), key, ValueOf(key, 0, big));
    if (!status.ok()) {
      EXPECT_EQ(status.reason(), "DISK_FULL");
      break;
    }
    stored.push_back(key);
  }
  EXPECT_EQ(stored.size(), 8u * 5);  // slots of 49 blocks in 254
  for (int i = 0; i < 100; ++i) {    // their sizes are the same: one at a time
    const std::vector<std::string> victims = tier->Victims(big);
    ASSERT_EQ(victims.size(), 1u);
    ASSERT_TRUE(tier->Erase(victims, Soon()).ok());
    const std::string key = "more " + std::to_string(i);
    ASSERT_TRUE(PutOne(tier.get(), key, ValueOf(key, 0, big)).ok());
  }
  const std::vector<std::string> segment = tier->Victims(small);  // no segment of that size yet
  EXPECT_EQ(segment.size(), 5u);
  ASSERT_TRUE(tier->Erase(segment, Soon()).ok());
  EXPECT_TRUE(tier->Victims(small).empty());
  EXPECT_TRUE(PutOne(tier.get(), "small", ValueOf("small", 0, small)).ok());
}

TEST_F(DiskTierTest, AValueReadLatelyIsNoVictim) {
  auto tier = MustOpen(Options(dir_ / "tier", 1));
  const std::vector<uint64_t> sizes = {196000};
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(PutOne(tier.get(), std::to_string(i), ValueOf("", i, sizes)).ok());
  }
  const std::string first = tier->Victims(sizes).at(0);  // clears what Put set
  for (int i = 0; i < 5; ++i) {
    if (std::to_string(i) == first) continue;
    ASSERT_TRUE(GetOne(tier.get(), std::to_string(i), AlignedBuffers(sizes)).ok());
  }
  EXPECT_EQ(tier->Victims(sizes).at(0), first);
}

TEST_F(DiskTierTest, RefusesWhatIsNoValue) {
  auto tier = MustOpen(options_);
  const auto value = ValueOf("", 0, {100000});
  const auto refused = [&](TierPut put) {
    tier->Put({&put, 1}, Soon());
    return put.status.reason() == "DISK_VALUE";
  };
  EXPECT_TRUE(refused({"", value.readable(), {}, {}}));
  EXPECT_TRUE(refused({std::string(65, 'k'), value.readable(), {}, {}}));
  EXPECT_TRUE(refused({"k", {}, {}, {}}));
  EXPECT_TRUE(refused({"k", {value.readable()[0].first(0)}, {}, {}}));
  EXPECT_TRUE(refused({"k", {value.readable()[0].subspan(1)}, {}, {}}));
  EXPECT_TRUE(refused({"k", ValueOf("", 0, {kSegment}).readable(), {}, {}}));
  EXPECT_TRUE(refused({"k", ValueOf("", 0, std::vector<uint64_t>(17, 1)).readable(), {}, {}}));
  EXPECT_FALSE(refused({std::string(64, 'k'), value.readable(), {}, {}}));
  EXPECT_EQ(GetOne(tier.get(), std::string(64, 'k'), AlignedBuffers({99999})).reason(),
            "DISK_VALUE");
}

TEST_F(DiskTierTest, OneDaemonADirectory) {
  auto tier = MustOpen(options_);
  EXPECT_EQ(DiskTier::Open(options_, Soon()).status().reason(), "DISK_LOCKED");
  tier.reset();
  EXPECT_NE(MustOpen(options_), nullptr);
}

std::map<std::string, uint64_t> SizesIn(const std::string& directory) {
  std::map<std::string, uint64_t> sizes;
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    sizes[file.path().filename()] = file.file_size();
  }
  return sizes;
}

TEST_F(DiskTierTest, AnotherSegmentSizeIsRefusedAndTouchesNothing) {
  const std::vector<uint64_t> sizes = {300000};
  auto tier = MustOpen(options_);
  for (const char* key : {"a", "b", "c", "d", "e"}) {  // two segments full
    ASSERT_TRUE(PutOne(tier.get(), key, ValueOf(key, 0, sizes)).ok());
  }
  ASSERT_TRUE(tier->Checkpoint(Soon()).ok());
  tier.reset();
  const auto before = SizesIn(options_.directory);
  for (const uint64_t bytes : {kSegment / 2, kSegment * 2}) {
    DiskTierOptions other = options_;
    other.segment_bytes = bytes;
    for (const Status& status :
         {DiskTier::CheckPlace(other), DiskTier::Open(other, Soon()).status()}) {
      EXPECT_EQ(status.reason(), "DISK_SEGMENT_BYTES");
      EXPECT_NE(status.message().find("have 1048576 bytes"), std::string::npos);
    }
    EXPECT_EQ(SizesIn(options_.directory), before);
  }
  EXPECT_TRUE(DiskTier::CheckPlace(options_).ok());
  EXPECT_EQ(Listing(*MustOpen(options_)).size(), 5u);
}

TEST_F(DiskTierTest, ASegmentWhoseFileIsTooLongKeepsItsValues) {
  auto tier = MustOpen(options_);
  ASSERT_TRUE(PutOne(tier.get(), "a", ValueOf("a", 0, {300000})).ok());
  tier.reset();
  std::filesystem::resize_file(options_.directory + "/segment.0", 3 * kSegment);
  tier = MustOpen(options_);
  EXPECT_EQ(tier->Stats().cut_segments, 1u);
  EXPECT_EQ(std::filesystem::file_size(options_.directory + "/segment.0"), kSegment);
  EXPECT_EQ(Listing(*tier).size(), 1u);
}

TEST_F(DiskTierTest, ASmallerBudgetDeletes) {
  ASSERT_NE(MustOpen(options_), nullptr);
  ASSERT_NE(MustOpen(Options(options_.directory, 2)), nullptr);
  EXPECT_TRUE(std::filesystem::exists(options_.directory + "/segment.1"));
  EXPECT_FALSE(std::filesystem::exists(options_.directory + "/segment.2"));
}

TEST_F(DiskTierTest, WithAndWithoutCheckpointTheIndexIsTheSame) {
  std::random_device device;
  const uint32_t seed = getenv("KVS_TEST_SEED") ? atoi(getenv("KVS_TEST_SEED")) : device();
  SCOPED_TRACE("KVS_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  auto tier = MustOpen(options_);
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < 20; ++i) {
      const std::string key = std::to_string(random() % 60);
      if (random() % 3 == 0) {
        ASSERT_TRUE(tier->Erase({&key, 1}, Soon()).ok());
      } else if (random() % 10 == 0) {
        ASSERT_TRUE(tier->Checkpoint(Soon()).ok());
      } else {
        (void)PutOne(tier.get(), key, ValueOf(key, 0, {1 + random() % 90000, 1 + random() % 9000}));
      }
    }
    const auto before = Listing(*tier);
    tier.reset();
    tier = MustOpen(options_);  // what a killed daemon leaves
    ASSERT_EQ(Listing(*tier), before);
    tier.reset();
    for (const char* name : {"/checkpoint.0", "/checkpoint.1"}) {
      std::filesystem::remove(options_.directory + name);
    }
    tier = MustOpen(options_);
    ASSERT_EQ(Listing(*tier), before);
  }
}

// Fills what is there, by key and number; how many.
uint64_t Fill(DiskTier* tier, const std::string& name) {
  uint64_t n = 0;
  for (;; ++n) {
    const std::string key = name + std::to_string(n);
    const Status status = PutOne(tier, key, ValueOf(key, 0, {196000}));
    if (status.ok()) continue;
    EXPECT_EQ(status.reason(), "DISK_FULL");
    return n;
  }
}

uint64_t BudgetOf(const std::string& directory, uint64_t segments) {
  return Options(directory, segments).budget_bytes;
}

TEST_P(OnEitherQueue, AFullTierGrowsAndKeepsWhatItHad) {
  const uint64_t first = Fill(tier_.get(), "a");
  EXPECT_EQ(first, 16 * 5u);
  ASSERT_TRUE(tier_->Resize(BudgetOf(options_.directory, 24), Soon()).ok());
  EXPECT_EQ(tier_->Stats().capacity_bytes, 24 * kSegment);
  EXPECT_EQ(Fill(tier_.get(), "b"), 8 * 5u);
  const auto all = Listing(*tier_);
  for (const auto& [key, sizes] : all) {
    AlignedBuffers is(sizes);
    ASSERT_TRUE(GetOne(tier_.get(), key, is).ok()) << key;
    ASSERT_TRUE(SameBytes(is, ValueOf(key, 0, sizes))) << key;
  }
  ASSERT_TRUE(tier_->Checkpoint(Soon()).ok());
  // A start with that budget finds all, one with the old budget what lies in its files.
  options_.budget_bytes = BudgetOf(options_.directory, 24);
  Reopen();
  EXPECT_EQ(Listing(*tier_), all);
  EXPECT_EQ(tier_->Stats().scanned_segments, 0u);
  options_.budget_bytes = BudgetOf(options_.directory, 16);
  Reopen();
  EXPECT_EQ(Listing(*tier_).size(), first);
  EXPECT_EQ(tier_->Stats().scanned_segments, 0u) << "its checkpoint is of use all the same";
}

TEST_P(OnEitherQueue, ATierThatShrinksLosesTheLastFilesAndGrowsAgain) {
  const uint64_t stored = Fill(tier_.get(), "a");
  // The checkpoints keep their size.
  const uint64_t checkpoints = 2 * disk::CheckpointBytes(options_.budget_bytes);
  const Result<uint64_t> left = tier_->Resize(4 * kSegment + checkpoints, Soon());
  ASSERT_TRUE(left.ok()) << left.status().ToString();
  EXPECT_EQ(*left, 12 * 5u);
  EXPECT_EQ(tier_->Stats().entries, stored - *left);
  EXPECT_EQ(tier_->Stats().capacity_bytes, 4 * kSegment);
  EXPECT_EQ(std::filesystem::file_size(options_.directory + "/segment.4"), 0u);
  EXPECT_EQ(Fill(tier_.get(), "b"), 0u);
  for (const auto& [key, sizes] : Listing(*tier_)) {
    EXPECT_TRUE(GetOne(tier_.get(), key, AlignedBuffers(sizes)).ok());
  }
  ASSERT_TRUE(tier_->Resize(6 * kSegment + checkpoints, Soon()).ok());
  EXPECT_EQ(Fill(tier_.get(), "c"), 2 * 5u);
  EXPECT_TRUE(GetOne(tier_.get(), "c9", AlignedBuffers({196000})).ok());
  const auto all = Listing(*tier_);
  Reopen();  // as a killed daemon leaves it
  EXPECT_EQ(Listing(*tier_), all);
}

TEST_F(DiskTierTest, TheCheckpointHoldsAsManySmallValuesAsTheTier) {
  auto tier = MustOpen(options_);
  uint64_t stored = 0;
  for (Status status; status.ok(); ++stored) {
    char key[33];
    std::snprintf(key, sizeof(key), "%032llu", static_cast<unsigned long long>(stored));
    status = PutOne(tier.get(), key, ValueOf(key, 0, {4000}));
  }
  EXPECT_EQ(tier->Stats().entries, 8u * 127);
  EXPECT_TRUE(tier->Checkpoint(Soon()).ok());
  tier.reset();
  tier = MustOpen(options_);
  EXPECT_EQ(tier->Stats().entries, 8u * 127);
  EXPECT_EQ(tier->Stats().scanned_segments, 0u);
}

TEST_F(DiskTierTest, APinnedValueKeepsItsFile) {
  auto tier = MustOpen(options_);
  const uint64_t stored = Fill(tier.get(), "a");
  const std::string pinned = "a" + std::to_string(stored - 1);
  tier->Pin({&pinned, 1});
  const auto before = Listing(*tier);
  const uint64_t budget = BudgetOf(options_.directory, 2);
  EXPECT_EQ(tier->Resize(budget, Soon()).status().reason(), "RESIZE_PINNED");
  EXPECT_EQ(Listing(*tier), before);
  EXPECT_EQ(tier->Resize(4096, Soon()).status().reason(), "DISK_BUDGET");
  tier->Unpin({&pinned, 1});
  EXPECT_TRUE(tier->Resize(budget, Soon()).ok());
  EXPECT_FALSE(tier->Contains(pinned));
}

TEST(SizeClasses, WasteASixteenthAtMost) {
  for (uint64_t blocks = 1; blocks < 100000; ++blocks) {
    const uint64_t size = disk::ClassOf(blocks);
    ASSERT_GE(size, blocks);
    ASSERT_LE((size - blocks) * 16, blocks) << blocks;
    ASSERT_EQ(disk::ClassOf(size), size);
  }
}

}  // namespace
}  // namespace kvstrata
