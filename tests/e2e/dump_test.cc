// SPDX-License-Identifier: Apache-2.0
// What `kvstrata debug dump` writes of a daemon that works: every file that docs/cli.md names, and
// nothing of a prompt, of the names that engines gave, or of anybody's environment.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

const std::set<std::string> kFiles = {
    "version.json", "status.json", "config.json", "config.toml", "sessions.json", "sequences.json",
    "work.json",    "pins.json",   "quotas.json", "events.json", "metrics.txt",   "doctor.json"};

class DumpTest : public ::testing::Test {
 protected:
  // The program's exit code.
  int Dump(const std::string& socket, const std::string& to) const {
    const std::string program =
        std::filesystem::read_symlink("/proc/self/exe").replace_filename("kvstrata").string();
    const std::string command = "'" + program + "' debug dump '" + to +
                                "' --timeout 1m --socket '" + socket + "' > '" +
                                folder_ / "said' 2>&1";
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  static std::string Text(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const ScratchDir folder_;
};

TEST_F(DumpTest, EveryFileAndNoSecret) {
  setenv("KVSTRATA_TEST_PASSWORD", "hunter2-of-the-daemon", 1);
  DaemonProcess daemon({"--set", "log.level=trace", "--set", "plans.mine=quest{budget = 64}"});
  Engine engine(Linked(), daemon.socket());
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 64; ++i) ids.push_back(1'900'000'000 + i * 7919);
  kvs_open_options options{};
  options.size = sizeof(options);
  options.key = "request-of-mrs-smith";
  kvs_opened opened{};
  opened.size = sizeof(opened);
  ASSERT_EQ(Linked().kvs_sequence_open_with(engine.session(), engine.handle(), "mine", ids.data(),
                                            ids.size(), &options, &opened),
            KVS_OK);
  ASSERT_FALSE(engine.Run(opened.sequence, ids, 0).empty()) << engine.error();
  EXPECT_EQ(engine.Open("no such plan", ids), 0u) << "a refusal, which is an event";

  const std::string to = folder_ / "dump";
  ASSERT_EQ(Dump(daemon.socket(), to), 0) << Text(folder_ / "said");
  struct stat st {};
  ASSERT_EQ(stat(to.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0700u);
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(to)) {
    files.insert(entry.path().filename());
    const std::string text = Text(entry.path());
    EXPECT_FALSE(text.empty()) << entry.path();
    for (const int32_t id : ids) {
      EXPECT_EQ(text.find(std::to_string(id)), text.npos) << entry.path() << " has token " << id;
    }
    EXPECT_EQ(text.find("mrs-smith"), text.npos) << entry.path();
    EXPECT_EQ(text.find("hunter2"), text.npos) << entry.path();
  }
  EXPECT_EQ(files, kFiles);
  EXPECT_NE(Text(to + "/sequences.json").find("(left out)"), std::string::npos);
  EXPECT_NE(Text(to + "/events.json").find("PLAN_UNKNOWN"), std::string::npos);
  EXPECT_NE(Text(to + "/metrics.txt").find("kvstrata_sequences 1\n"), std::string::npos);
  EXPECT_NE(Text(to + "/doctor.json").find("\"checks\""), std::string::npos);
  EXPECT_NE(Text(to + "/config.toml").find("plans.mine = \"quest{budget = 64}\"\n"),
            std::string::npos);
  EXPECT_EQ(Dump(daemon.socket(), to), 2) << "nothing is written over";
  EXPECT_NE(Text(folder_ / "said").find("DUMP_FOLDER"), std::string::npos);
}

TEST_F(DumpTest, WithoutADaemonItLeavesWhatNeedsNone) {
  const std::string to = folder_ / "dump";
  EXPECT_EQ(Dump(folder_ / "no.sock", to), 1);
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(to)) {
    files.insert(entry.path().filename());
  }
  EXPECT_EQ(files, (std::set<std::string>{"version.json", "doctor.json"}));
  EXPECT_NE(Text(folder_ / "said").find("DAEMON_UNREACHABLE"), std::string::npos);
}

// docs/cli.md names them.
TEST_F(DumpTest, TheDocumentNamesEveryFile) {
  const std::string document = Text(KVS_SOURCE_DIR "/docs/cli.md");
  for (const std::string& file : kFiles) {
    EXPECT_NE(document.find("| `" + file + "` |"), std::string::npos) << file;
  }
}

}  // namespace
}  // namespace kvstrata::testing
