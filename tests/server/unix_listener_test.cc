// SPDX-License-Identifier: Apache-2.0
// Socket paths, also such that others tampered with: links, pipes, foreign files, hostile
// directories.
#include "server/sockets/unix_listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <vector>

#include "tests/fakes/scratch_dir.h"
#include "tests/server/attach_client.h"

namespace kvstrata {
namespace {

using test::Dial;
using testing::HasSubstr;

constexpr uid_t kNobody = 65534;

class PathTest : public testing::Test {
 protected:
  void SetUp() override { path_ = directory_ + "/k.sock"; }
  Status Listen() {
    auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
    return listener.status();
  }
  static mode_t ModeOf(const std::string& path) {
    struct stat st {};
    EXPECT_EQ(lstat(path.c_str(), &st), 0);
    return st.st_mode & 07777;
  }
  // A socket file whose listener is gone.
  void LeaveStaleSocket(const std::string& path) {
    const UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(fd.get(), 1), 0);
  }
  const ScratchDir scratch_;
  const std::string& directory_ = scratch_.path();
  std::string path_;
};

TEST_F(PathTest, ModeIsExactWhateverTheUmask) {
  for (const mode_t mask : {0000, 0022, 0077, 0777}) {
    const mode_t before = umask(mask);
    auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
    umask(before);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    EXPECT_EQ(ModeOf(path_), mode_t{0660}) << mask;
  }
  EXPECT_FALSE(std::filesystem::exists(path_)) << "unlinked with its listener";
}

TEST_F(PathTest, AcceptSaysThatDescriptorsRanOut) {
  const auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
  ASSERT_TRUE(listener.ok()) << listener.status().ToString();
  const UniqueFd clients[] = {Dial(path_), Dial(path_)};
  std::vector<UniqueFd> admitted;
  const auto accept = [&] {
    return (*listener)->Accept([&](UniqueFd socket) { admitted.push_back(std::move(socket)); });
  };
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{static_cast<rlim_t>(clients[1].get()) + 2, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const int error = accept();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, EMFILE);
  EXPECT_EQ(admitted.size(), 1u);
  EXPECT_EQ(accept(), 0);
  EXPECT_EQ(admitted.size(), 2u);
}

TEST_F(PathTest, ItsGroupIsTheOneThatIsTold) {
  if (geteuid() != 0) GTEST_SKIP() << "wants root";
  constexpr gid_t kGroup = 10003;
  const auto group_of = [&](int64_t group) {
    auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, group);
    EXPECT_TRUE(listener.ok()) << listener.status().ToString();
    struct stat st {};
    EXPECT_EQ(lstat(path_.c_str(), &st), 0);
    EXPECT_EQ(st.st_gid, SocketGroup(path_, group));
    return st.st_gid;
  };
  EXPECT_EQ(group_of(-1), getegid());
  EXPECT_EQ(group_of(kGroup), kGroup);
  ASSERT_EQ(chown(directory_.c_str(), 0, kGroup), 0);
  EXPECT_EQ(group_of(-1), getegid());
  ASSERT_EQ(chmod(directory_.c_str(), 02700), 0);
  EXPECT_EQ(group_of(-1), kGroup) << "the directory hands on its group";
  EXPECT_EQ(group_of(10004), gid_t{10004});
}

TEST_F(PathTest, StaleSocketIsReplaced) {
  LeaveStaleSocket(path_);
  auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
  ASSERT_TRUE(listener.ok()) << listener.status().ToString();
  EXPECT_TRUE(Dial(path_));
}

TEST_F(PathTest, LiveSocketIsRefused) {
  auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
  ASSERT_TRUE(listener.ok());
  EXPECT_EQ(Listen().reason(), "SOCKET_IN_USE");
  EXPECT_TRUE(Dial(path_)) << "the first one was not touched";
  const std::string stream = directory_ + "/stream.sock";
  auto other_type = UnixListener::Listen(stream, SOCK_STREAM, -1);
  ASSERT_TRUE(other_type.ok());
  EXPECT_EQ(UnixListener::Listen(stream, SOCK_SEQPACKET, -1).status().reason(), "SOCKET_IN_USE");
}

TEST_F(PathTest, OtherFilesAreRefusedAndKept) {
  const std::string target = directory_ + "/target";
  std::ofstream(target) << "precious";
  const auto refuse = [&](const char* kind) {
    const Status status = Listen();
    EXPECT_EQ(status.reason(), "SOCKET_PATH");
    EXPECT_THAT(status.message(), HasSubstr(kind));
    EXPECT_THAT(status.message(), HasSubstr(path_));
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::symlink_status(path_)));
    std::filesystem::remove_all(path_);
  };
  std::ofstream(path_) << "x";
  refuse("a regular file");
  ASSERT_EQ(symlink(target.c_str(), path_.c_str()), 0);
  refuse("a symbolic link");
  ASSERT_EQ(symlink("/nowhere/at/all", path_.c_str()), 0);
  refuse("a symbolic link");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  refuse("a FIFO");
  ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
  refuse("a directory");
  EXPECT_TRUE(std::filesystem::exists(target));
}

TEST_F(PathTest, SymlinkToALiveSocketIsRefused) {
  const std::string real = directory_ + "/real.sock";
  auto listener = UnixListener::Listen(real, SOCK_SEQPACKET, -1);
  ASSERT_TRUE(listener.ok());
  ASSERT_EQ(symlink(real.c_str(), path_.c_str()), 0);
  EXPECT_EQ(Listen().reason(), "SOCKET_PATH");
}

TEST_F(PathTest, LengthIsChecked) {
  path_ = directory_ + "/" + std::string(kMaxSocketPath - directory_.size() - 1, 'x');
  EXPECT_TRUE(Listen().ok());
  path_ += 'x';
  EXPECT_THAT(Listen().message(), HasSubstr("108 bytes; at most 107"));
  EXPECT_TRUE(CheckSocketPath(std::string(100, 'x')).ok());
  EXPECT_THAT(CheckSocketPath(std::string(101, 'x')).message(), HasSubstr("at most 100"));
  EXPECT_FALSE(CheckSocketPath("").ok());
  EXPECT_FALSE(CheckSocketPath("/tmp/").ok());
  EXPECT_FALSE(CheckSocketPath(std::string("a\0b", 3)).ok());
}

TEST_F(PathTest, DirectoryMustExistAndBeOurs) {
  path_ = directory_ + "/missing/k.sock";
  EXPECT_EQ(Listen().reason(), "SOCKET_DIRECTORY");
  EXPECT_THAT(Listen().message(), HasSubstr("mkdir -p"));
  ASSERT_TRUE(MakeSocketDirectory(path_, 0700).ok());
  EXPECT_EQ(ModeOf(directory_ + "/missing"), mode_t{0700});
  EXPECT_TRUE(MakeSocketDirectory(path_, 0755).ok()) << "what exists is left alone";
  EXPECT_EQ(ModeOf(directory_ + "/missing"), mode_t{0700});
  EXPECT_TRUE(Listen().ok());
  ASSERT_EQ(chmod((directory_ + "/missing").c_str(), 0777), 0);
  EXPECT_THAT(Listen().message(), HasSubstr("lets other users replace the socket"));
  ASSERT_EQ(chmod((directory_ + "/missing").c_str(), 01777), 0);
  EXPECT_TRUE(Listen().ok()) << "sticky, like /tmp";
}

TEST_F(PathTest, LockHasOneOwner) {
  auto first = LockSocketPath(path_);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  const Status second = LockSocketPath(path_).status();
  EXPECT_EQ(second.reason(), "SOCKET_IN_USE");
  EXPECT_THAT(second.message(), HasSubstr("pid " + std::to_string(getpid())));
  first.value().Reset();
  EXPECT_TRUE(LockSocketPath(path_).ok());
}

TEST_F(PathTest, PlantedLockFilesAreRefused) {
  const std::string lock = path_ + ".lock", victim = directory_ + "/victim";
  std::ofstream(victim) << "precious";
  ASSERT_EQ(symlink(victim.c_str(), lock.c_str()), 0);
  EXPECT_FALSE(LockSocketPath(path_).ok());
  std::filesystem::remove(lock);
  ASSERT_EQ(link(victim.c_str(), lock.c_str()), 0);
  EXPECT_FALSE(LockSocketPath(path_).ok());
  std::filesystem::remove(lock);
  ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);
  EXPECT_FALSE(LockSocketPath(path_).ok());
  std::ifstream in(victim);
  std::string text;
  in >> text;
  EXPECT_EQ(text, "precious");
}

// What root would not notice: run as nobody, in a sticky directory where others were first.
class NobodyTest : public PathTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root to become nobody";
    PathTest::SetUp();
    ASSERT_EQ(chmod(directory_.c_str(), 01777), 0);
  }
  void TearDown() override {
    EXPECT_EQ(seteuid(getuid()), 0);
    PathTest::TearDown();
  }
  static void BecomeNobody() { ASSERT_EQ(seteuid(kNobody), 0); }
};

TEST_F(NobodyTest, ForeignStaleSocketIsNotUnlinked) {
  LeaveStaleSocket(path_);
  BecomeNobody();
  EXPECT_EQ(Listen().code(), Code::kPermissionDenied);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(NobodyTest, RootRefusesNobodysSocketAndLock) {
  BecomeNobody();
  LeaveStaleSocket(path_);
  std::ofstream(path_ + ".lock") << "";
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(Listen().code(), Code::kPermissionDenied);
  EXPECT_EQ(LockSocketPath(path_).status().code(), Code::kPermissionDenied);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(NobodyTest, DirectoryOfSomebodyElse) {
  const std::string hostile = directory_ + "/hostile";
  ASSERT_EQ(mkdir(hostile.c_str(), 0777), 0);
  ASSERT_EQ(chown(hostile.c_str(), 12345, 12345), 0);
  ASSERT_EQ(chmod(hostile.c_str(), 0755), 0);
  EXPECT_EQ(CheckSocketDirectory(hostile + "/k.sock").reason(), "SOCKET_DIRECTORY");
  ASSERT_EQ(lchown(hostile.c_str(), 0, 0), 0);
  const std::string planted = directory_ + "/planted";
  ASSERT_EQ(symlink(hostile.c_str(), planted.c_str()), 0);
  EXPECT_TRUE(CheckSocketDirectory(planted + "/k.sock").ok());
  ASSERT_EQ(lchown(planted.c_str(), 12345, 12345), 0);
  EXPECT_THAT(CheckSocketDirectory(planted + "/k.sock").message(), HasSubstr("symbolic link"));
  BecomeNobody();
  EXPECT_EQ(UnixListener::Listen(hostile + "/k.sock", SOCK_SEQPACKET, -1).status().code(),
            Code::kPermissionDenied);
  EXPECT_EQ(LockSocketPath(hostile + "/k.sock").status().code(), Code::kPermissionDenied);
}

// Two that start at the same time: exactly one gets the lock.
TEST_F(PathTest, RaceHasOneWinner) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ready{0}, winners{0}, refused{0}, done{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        ++ready;
        while (ready.load() < 4) std::this_thread::yield();
        auto lock = LockSocketPath(path_);
        (lock.ok() ? winners : refused)++;
        ++done;
        while (done.load() < 4) std::this_thread::yield();  // held until all have tried
      });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_EQ(winners.load(), 1);
    ASSERT_EQ(refused.load(), 3);
  }
}

}  // namespace
}  // namespace kvstrata
