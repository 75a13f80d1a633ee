// SPDX-License-Identifier: Apache-2.0
// Files of trained parameters: what is read, how often, and in whose thread.
#include "server/store/options/parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "tests/fakes/scratch_dir.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

TEST(ParameterFilesTest, NamesOfOtherPlacesAreRefused) {
  ParameterFiles files({"/tmp"}, [](auto, auto&, auto&, auto&) {
    return Result<ParametersPtr>(std::make_shared<CodecParameters>());
  });
  Plan plan;
  EXPECT_EQ(files.Get(plan, SmallModel().geometry)->values, nullptr) << "none named";
  for (const char* name : {"/etc/passwd", "../x", "a/b", "..", ".", ".hidden", "a..b"}) {
    plan.lowrank.parameters = name;
    EXPECT_EQ(files.Get(plan, SmallModel().geometry).status().reason(), "PARAMETERS_NAME") << name;
  }
  plan.lowrank.parameters = "kvstrata-no-such-file";
  EXPECT_EQ(files.Get(plan, SmallModel().geometry).status().reason(), "PARAMETERS_MISSING");
  ParameterFiles nowhere({""}, nullptr);
  EXPECT_EQ(nowhere.Get(plan, SmallModel().geometry).status().reason(), "PARAMETERS_MISSING");
}

// A folder of parameters, and a parser that counts how often it is asked.
class ParameterFolder : public ::testing::Test {
 protected:
  void SetUp() override { plan_.lowrank.parameters = "p.safetensors"; }

  // A file that begins as it should.
  void Write(const std::string& more = "") {
    std::ofstream(folder_ / "p.safetensors") << std::string("\2\0\0\0\0\0\0\0{}", 10) << more;
  }
  ParameterFiles::Parser Parser() {
    return [this](std::span<const std::byte> file, const std::string& name, const Geometry&,
                  const Plan&) -> Result<ParametersPtr> {
      EXPECT_GE(file.size(), 10u);
      EXPECT_EQ(name, "p.safetensors");
      ++loads_;
      if (sound_) return ParametersPtr(std::make_shared<CodecParameters>());
      return InvalidArgument("PARAMETERS_INVALID", "tensor W");
    };
  }

  const ScratchDir scratch_;
  const std::filesystem::path folder_ = scratch_.path();
  Plan plan_;
  int loads_ = 0;
  bool sound_ = true;
};

TEST_F(ParameterFolder, WhatIsNoFileOfParametersIsNotRead) {
  ParameterFiles files({folder_}, Parser());
  const auto refused = [&] { return files.Get(plan_, SmallModel().geometry).status(); };
  const auto path = folder_ / "p.safetensors";
  EXPECT_EQ(refused().reason(), "PARAMETERS_MISSING");
  std::filesystem::create_directory(path);
  EXPECT_THAT(std::string(refused().message()),
              ::testing::HasSubstr("'p.safetensors': is a directory"));
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(refused().reason(), "PARAMETERS_INVALID") << "and nobody waits for its writer";
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/etc/passwd", path);
  EXPECT_THAT(std::string(refused().message()), ::testing::HasSubstr("symbolic link"));
  std::filesystem::remove(path);
  Write();
  std::filesystem::resize_file(path, ParameterFiles::kMaxBytes + 1);
  EXPECT_THAT(std::string(refused().message()), ::testing::HasSubstr("at most 1073741824"));
  std::filesystem::remove(path);
  std::ofstream(path) << "";
  std::filesystem::resize_file(path, ParameterFiles::kMaxBytes);  // zeros: no header
  EXPECT_EQ(refused().reason(), "PARAMETERS_INVALID");
  EXPECT_EQ(loads_, 0);
}

TEST_F(ParameterFolder, ARefusalIsRememberedUntilTheFileChanges) {
  ParameterFiles files({folder_}, Parser());
  Write();
  sound_ = false;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(files.Get(plan_, SmallModel().geometry).status().message(), "tensor W");
  }
  EXPECT_EQ(loads_, 1);
  sound_ = true;
  Write("longer");
  EXPECT_TRUE(files.Get(plan_, SmallModel().geometry).ok());
  EXPECT_EQ(loads_, 2);
}

TEST_F(ParameterFolder, NobodyReadsWhoMayNotWait) {
  ParameterFiles files({folder_}, Parser());
  Write();
  const Geometry geometry = SmallModel().geometry;
  EXPECT_EQ(files.Get(plan_, geometry, Files::kKnown).status().reason(), kFileUnread);
  EXPECT_EQ(loads_, 0);
  EXPECT_TRUE(files.Get(plan_, geometry, Files::kRead).ok());
  EXPECT_TRUE(files.Get(plan_, geometry, Files::kKnown).ok());
  EXPECT_EQ(loads_, 1);
}

// The thread of an engine's ring, or gRPC's, goes on: the file is read by the queue's.
TEST_F(ParameterFolder, AnOpenReadsInTheQueuesThread) {
  StoreOptions options;
  options.parameters_directory = folder_;
  options.parse_parameters = Parser();
  options.new_recompressor = [](const Plan&, const Geometry&, auto) {
    return std::unique_ptr<Recompressor>();
  };
  const auto store = *Store::Create(options);
  TestSession session(store.get());
  std::vector<std::function<void()>> posted;
  store->replication().SetReplicationQueue(
      [&](std::function<void()> open) { posted.push_back(open); });
  int opened = 0;
  const auto open = [&] {
    store->openings().OpenSequence(session.id(), session.model(),
                                   "sekv{parameters = 'p.safetensors'}", Tokens(20),
                                   [&](const Result<OpenedSequence>& o) {
                                     EXPECT_TRUE(o.ok()) << o.status().ToString();
                                     ++opened;
                                   });
  };
  Write();
  open();
  ASSERT_EQ(posted.size(), 1u);
  EXPECT_EQ(loads_, 0);
  EXPECT_EQ(opened, 0);
  posted.front()();
  EXPECT_EQ(loads_, 1);
  EXPECT_EQ(opened, 1);
  open();
  EXPECT_EQ(opened, 2) << "it is known now";
  EXPECT_EQ(posted.size(), 1u);
  store->replication().SetReplicationQueue(nullptr);
}

// What comes with the daemon is found without configuration, without its ending, and behind what
// the configuration has.
TEST_F(ParameterFolder, NamesAreLookedForInEachFolder) {
  const auto own = folder_ / "own", shipped = folder_ / "shipped";
  std::filesystem::create_directory(own);
  std::filesystem::create_directory(shipped);
  const auto put = [](const std::filesystem::path& path, const std::string& more) {
    std::ofstream(path) << std::string("\2\0\0\0\0\0\0\0{}", 10) << more;
  };
  size_t bytes = 0;
  const auto parse = [&](std::span<const std::byte> file, auto&, auto&,
                         auto&) -> Result<ParametersPtr> {
    bytes = file.size();
    return ParametersPtr(std::make_shared<CodecParameters>());
  };
  plan_.lowrank.parameters = "tiny";
  const auto found = [&](const std::vector<std::string>& folders) {
    bytes = 0;
    ParameterFiles files(folders, parse);
    const auto got = files.Get(plan_, SmallModel().geometry);
    EXPECT_TRUE(got.ok() || got.status().reason() == "PARAMETERS_MISSING")
        << got.status().ToString();
    return bytes;
  };
  EXPECT_EQ(found({"", shipped}), 0u);
  put(shipped / "tiny.safetensors", "");
  EXPECT_EQ(found({"", shipped}), 10u);
  EXPECT_EQ(found({own, shipped}), 10u);
  put(own / "tiny.safetensors", "own");
  EXPECT_EQ(found({own, shipped}), 13u);
  put(own / "tiny", "exact");
  EXPECT_EQ(found({own, shipped}), 15u);
  EXPECT_EQ(found({folder_ / "none", shipped}), 10u);
}

TEST(ParameterFilesTest, EachIsLoadedOncePerShape) {
  const auto folder = std::filesystem::temp_directory_path() / "kvstrata-parameters-test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "p.safetensors") << std::string("\2\0\0\0\0\0\0\0{}", 10);
  int loads = 0;
  ParameterFiles files(
      {folder}, [&loads](auto, const std::string& name, auto&, auto&) -> Result<ParametersPtr> {
        EXPECT_EQ(name, "p.safetensors");
        ++loads;
        if (loads == 3) return InvalidArgument("PARAMETERS_INVALID", "tensor W");
        return ParametersPtr(std::make_shared<CodecParameters>());
      });
  Plan plan;
  plan.lowrank.parameters = "p.safetensors";
  const auto first = files.Get(plan, SmallModel().geometry);
  const auto second = files.Get(plan, SmallModel().geometry);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->values, second->values);
  EXPECT_EQ(first->digest.size(), 32u);
  EXPECT_EQ(loads, 1);
  plan.lowrank.r_max = 16;
  EXPECT_NE(files.Get(plan, SmallModel().geometry)->values, first->values);
  plan.lowrank.r_max = 8;
  EXPECT_EQ(files.Get(plan, SmallModel().geometry).status().reason(), "PARAMETERS_INVALID");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kvstrata::testing
