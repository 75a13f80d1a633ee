// SPDX-License-Identifier: Apache-2.0
// The files of a configuration: the one that is named, the default one, those of conf.d beside it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>

#include "tests/server/config_fixture.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;
using ConfigFilesTest = test::ConfigTest;

TEST_F(ConfigFilesTest, DefaultFileIsReadIfItExists) {
  UseFile("[log]\nlevel = \"debug\"\n");
  sources_.default_file = std::exchange(sources_.file, "");
  EXPECT_EQ(Load().log_level, LogLevel::kDebug);
  EXPECT_THAT(Load().files, testing::ElementsAre(sources_.default_file));
}

TEST_F(ConfigFilesTest, SyntaxErrorsSayWhere) {
  UseFile("[pool]\ndevice_bytes = \n");
  EXPECT_EQ(Fail().reason(), "CONFIG_SYNTAX");
  EXPECT_THAT(Fail().message(), HasSubstr("k.toml:2:"));
}

TEST_F(ConfigFilesTest, FilesThatCannotBeRead) {
  sources_.file = directory_ / "missing.toml";
  EXPECT_EQ(Fail().code(), Code::kNotFound);
  EXPECT_THAT(Fail().message(), HasSubstr("missing.toml"));
  sources_.file = directory_.path();
  EXPECT_EQ(Fail().reason(), "CONFIG_FILE");
  sources_.file = directory_ / "k.toml";
  ASSERT_EQ(mkfifo(sources_.file.c_str(), 0600), 0);
  EXPECT_THAT(Fail().message(), HasSubstr("not a regular file")) << "a FIFO must not block us";
  unlink(sources_.file.c_str());
  UseFile(std::string((1 << 20) + 1, '#'));
  EXPECT_THAT(Fail().message(), HasSubstr("larger than 1 MiB"));
}

TEST_F(ConfigFilesTest, FilesOfTheFolderComeLaterInOrder) {
  UseFile("[session]\nmax = 5\n[pin]\nlimit_bytes = \"1MiB\"\n[plans]\na = \"full\"\n");
  AddFile("20-b.toml", "session.max = 7\n");
  AddFile("10-a.toml",
          "session.max = 6\npin.limit_bytes = \"2MiB\"\n\n[plans.a]\npreset = 'quest'\n");
  AddFile("30.toml~", "nonsense");
  AddFile(".40.toml", "nonsense");
  const Config config = Load();
  EXPECT_EQ(config.store.max_sessions, 7u);
  EXPECT_EQ(Entry(config, "session.max").where, directory_ / "conf.d/20-b.toml:1:15");
  EXPECT_EQ(config.store.pin_limit_bytes, uint64_t{2} << 20);
  EXPECT_EQ(Entry(config, "pin.limit_bytes").where, directory_ / "conf.d/10-a.toml:2:19");
  EXPECT_EQ(Entry(config, "plans.a").value, "quest");
  EXPECT_THAT(Entry(config, "plans.a").where, HasSubstr("/conf.d/10-a.toml:4:"));
  EXPECT_EQ(Entry(config, "session.headroom_tokens").where, "");
  EXPECT_THAT(config.files, testing::ElementsAre(sources_.file, directory_ / "conf.d/10-a.toml",
                                                 directory_ / "conf.d/20-b.toml"));
  sources_.environment["KVSTRATA_SESSION_MAX"] = "8";
  EXPECT_EQ(Entry(Load(), "session.max").where, "KVSTRATA_SESSION_MAX");
}

TEST_F(ConfigFilesTest, TheFolderOfTheDefaultFileIsReadWithoutIt) {
  AddFile("a.toml", "session.max = 6\n");
  EXPECT_EQ(Load().store.max_sessions, 6u);
}

TEST_F(ConfigFilesTest, MistakesInTheFolderNameItsFiles) {
  UseFile("session.max = 5\n");
  AddFile("a.toml", "\nsession.max = 0\n");
  AddFile("b.toml", "\nsession.maxx = 6\n");
  LoadedConfig loaded = ReadConfig(sources_);
  ASSERT_EQ(loaded.mistakes.size(), 2u);
  EXPECT_THAT(loaded.mistakes[0].message(), HasSubstr("/conf.d/b.toml:2:"));
  EXPECT_THAT(loaded.mistakes[1].message(), HasSubstr("/conf.d/a.toml:2:"));
  AddFile("b.toml", "[pool\n");
  AddFile("c.toml", "[pool\n");
  loaded = ReadConfig(sources_);
  EXPECT_FALSE(loaded.complete);
  ASSERT_EQ(loaded.mistakes.size(), 2u) << "both files";
  EXPECT_EQ(loaded.mistakes[1].reason(), "CONFIG_SYNTAX");
  EXPECT_THAT(loaded.mistakes[1].message(), HasSubstr("/conf.d/c.toml:1:"));
}

TEST_F(ConfigFilesTest, AFolderThatIsNoneIsAMistake) {
  UseFile("session.max = 5\n");
  std::ofstream(directory_ / "conf.d") << "session.max = 5\n";
  EXPECT_EQ(Fail().reason(), "CONFIG_FILE");
  EXPECT_THAT(Fail().message(), HasSubstr(directory_ / "conf.d'"));
}

}  // namespace
}  // namespace kvstrata
