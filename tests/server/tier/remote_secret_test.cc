// SPDX-License-Identifier: Apache-2.0
// remote.secret_file: what is a secret, who may read it, and that errors name the field, what was
// found and the next step, never the secret.
#include "server/tier/remote/remote_secret.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <functional>

#include "tests/fakes/scratch_dir.h"

namespace kvstrata::remote {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uid_t kNobody = 65534;
constexpr gid_t kTenants = 10001, kOfSecrets = 10002;
const std::string kGood = "5f4dcc3b5aa765d61d8327deb882cf99";

class RemoteSecretTest : public ::testing::Test {
 protected:
  std::string File(const std::string& text, mode_t mode = 0600) {
    const std::string path = dir_ / "secret";
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  // Code and message of what Read says; "" : it is a secret.
  std::string Said(const std::string& path, gid_t tenants = kTenants) {
    const Status status = RemoteSecret::Read(path, tenants).status();
    if (status.ok()) return "";
    EXPECT_EQ(status.reason(), "REMOTE_SECRET");
    EXPECT_THAT(status.message(), HasSubstr("remote.secret_file = '" + path + "'"));
    EXPECT_THAT(status.message(), Not(HasSubstr(kGood)));
    return status.ToString();
  }
  static DerivedKey NameKey(const RemoteSecret& secret) {
    return secret.Keys("uid:1000", Seal::kNone).name;
  }
  // Whether `test` holds in a process of nobody's, without its privileges, in the groups of a pod
  // with fsGroup.
  static bool AsNobody(const std::function<bool()>& test) {
    const pid_t child = fork();
    if (child == 0) {
      const std::array<gid_t, 2> groups = {kTenants, kOfSecrets};
      const bool dropped = setgroups(groups.size(), groups.data()) == 0 && setgid(kNobody) == 0 &&
                           setuid(kNobody) == 0;
      _exit(dropped && test() ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  ScratchDir dir_;
};

TEST_F(RemoteSecretTest, ALineIsTheSecretHoweverItEnds) {
  const DerivedKey key = NameKey(RemoteSecret::Of(kGood).value());
  for (const char* end : {"", "\n", "\r\n"}) {
    for (const mode_t mode : {0600, 0400}) {
      const Result<RemoteSecret> read = RemoteSecret::Read(File(kGood + end, mode), kTenants);
      ASSERT_TRUE(read.ok()) << read.status().ToString();
      EXPECT_EQ(NameKey(*read), key);
    }
  }
  EXPECT_NE(NameKey(RemoteSecret::Of(kGood + "x").value()), key);
}

TEST_F(RemoteSecretTest, NodesOfOneSecretAndSealHaveOneFingerprint) {
  const RemoteSecret secret = RemoteSecret::Of(kGood).value();
  EXPECT_EQ(secret.Fingerprint(Seal::kNone), "1956f541");
  EXPECT_EQ(secret.Fingerprint(Seal::kGcm), "8c2761b3");
  EXPECT_EQ(RemoteSecret::Of(kGood + "\n")->Fingerprint(Seal::kNone), "1956f541");
  EXPECT_NE(RemoteSecret::Of(kGood + "x")->Fingerprint(Seal::kNone), "1956f541");
}

TEST_F(RemoteSecretTest, HasItsLengthAndCharacters) {
  EXPECT_EQ(Said(File(std::string(512, '~') + "\n")), "");
  EXPECT_THAT(Said(File(std::string(31, 'x') + "\n")),
              HasSubstr("32 to 512 characters, this one 31"));
  EXPECT_THAT(Said(File("")), HasSubstr("this one 0"));
  EXPECT_THAT(Said(File(std::string(513, 'x'))), HasSubstr("this one more"));
  EXPECT_THAT(Said(File(std::string(100000, 'x'))), HasSubstr("this one more"));
  EXPECT_THAT(Said(File(kGood + " " + kGood)), HasSubstr("byte 32"));
  EXPECT_THAT(Said(File(kGood + "\n\n")), HasSubstr("byte 32"));
  EXPECT_THAT(Said(File(kGood + std::string(1, '\0'))), HasSubstr("byte 32"));
  EXPECT_THAT(Said(File("\xC3\xBC" + kGood)), HasSubstr("byte 0"));
  EXPECT_THAT(Said(File("short")), HasSubstr("openssl rand -hex 32"));
}

TEST_F(RemoteSecretTest, OthersMayNotTouchIt) {
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0644, 0666, 0440}) {
    EXPECT_THAT(Said(File(kGood, mode)), HasSubstr("chmod 600")) << std::oct << mode;
  }
  EXPECT_THAT(Said(File(kGood, 0644)), HasSubstr("has mode 0644"));
}

TEST_F(RemoteSecretTest, IsAPlainFileThatIsThere) {
  EXPECT_THAT(Said(dir_ / "missing"), HasSubstr("NOT_FOUND"));
  EXPECT_THAT(Said(dir_.path()), HasSubstr("no plain file"));
  EXPECT_THAT(Said("/dev/zero"), HasSubstr("no plain file"));
  const std::string fifo = dir_ / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(Said(fifo), HasSubstr("no plain file"));
  const std::string link = dir_ / "link";
  ASSERT_EQ(symlink(File(kGood).c_str(), link.c_str()), 0);
  EXPECT_EQ(Said(link), "") << "as Kubernetes mounts secrets";
}

TEST_F(RemoteSecretTest, OfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "wants root";
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  const std::string path = File(kGood);
  EXPECT_TRUE(AsNobody([&] { return Said(path).find("PERMISSION_DENIED") != std::string::npos; }))
      << "nobody cannot read root's";
  ASSERT_EQ(chown(path.c_str(), kNobody, kNobody), 0);
  EXPECT_TRUE(AsNobody([&] { return Said(path).empty(); })) << "nobody reads nobody's";
  EXPECT_THAT(Said(path), HasSubstr("belongs to user 65534")) << "root does not trust nobody's";
}

// As Kubernetes mounts a secret for a pod with fsGroup: root's, mode 0440, of that group.
TEST_F(RemoteSecretTest, RootMayLetAGroupOfTheDaemonsReadIt) {
  if (geteuid() != 0) GTEST_SKIP() << "wants root";
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  const std::string path = File(kGood);
  const auto with = [&](uid_t owner, gid_t group, mode_t mode) {
    EXPECT_EQ(chown(path.c_str(), owner, group), 0);
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
  };
  for (const mode_t mode : {0440, 0640, 0040}) {
    with(0, kOfSecrets, mode);
    EXPECT_TRUE(AsNobody([&] { return Said(path).empty(); })) << std::oct << mode;
    EXPECT_THAT(Said(path), HasSubstr("chmod 600")) << "root needs no group to read its own";
  }
  for (const mode_t mode : {0444, 0460, 0450, 0441}) {
    with(0, kOfSecrets, mode);
    EXPECT_TRUE(AsNobody([&] { return Said(path).find("and group 10002") != std::string::npos; }))
        << std::oct << mode;
  }
  with(0, kTenants, 0440);
  EXPECT_TRUE(AsNobody([&] { return Said(path).find("socket.group") != std::string::npos; }))
      << "clients could read it";
  with(kNobody, kOfSecrets, 0440);
  EXPECT_TRUE(AsNobody([&] { return Said(path).find("chmod 600") != std::string::npos; }))
      << "who owns it needs no group";
}

}  // namespace
}  // namespace kvstrata::remote
