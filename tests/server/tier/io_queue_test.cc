// SPDX-License-Identifier: Apache-2.0
// Both IoQueues by one conformance suite, and the choice between them.
#include "server/tier/disk/files/io_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <termios.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/unique_fd.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata {
namespace {

using Op = IoRequest::Op;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kDepth = 32, kBlock = 4096, kBlocks = 256;
constexpr uint64_t kBytes = uint64_t{kBlock} * kBlocks;

Deadline Soon() { return steady_clock::now() + std::chrono::seconds(30); }

struct Factory {
  const char* name;
  std::function<Result<std::unique_ptr<IoQueue>>()> make;
};

class Conformance : public ::testing::TestWithParam<Factory> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<IoQueue>> queue = GetParam().make();
    if (!queue.ok()) GTEST_SKIP() << queue.status().ToString();
    queue_ = std::move(*queue);
    const std::string path = dir_ / "file";
    fd_.Reset(open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600));
    if (!fd_) fd_.Reset(open(path.c_str(), O_RDWR | O_CREAT, 0600));
    ASSERT_TRUE(fd_);
    ASSERT_EQ(ftruncate(fd_.get(), kBytes), 0);
    file_ = *queue_->AddFile(fd_.get());
    void* mapped =
        mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    memory_ = static_cast<std::byte*>(mapped);
  }
  void TearDown() override {
    queue_.reset();
    if (memory_ != nullptr) munmap(memory_, 2 * kBytes);
  }

  // Runs all of them and returns each one's result by its tag.
  std::map<uint64_t, int32_t> Run(const std::vector<IoRequest>& requests) {
    std::map<uint64_t, int32_t> all;
    std::array<IoResult, 7> results;
    size_t sent = 0;
    while (all.size() < requests.size()) {
      sent += queue_->Submit(std::span(requests).subspan(sent));
      const size_t n = queue_->Wait(results, Soon());
      EXPECT_GT(n, 0u);
      if (n == 0) break;
      for (size_t i = 0; i < n; ++i)
        EXPECT_TRUE(all.emplace(results[i].tag, results[i].result).second);
    }
    return all;
  }
  int32_t RunOne(IoRequest request) { return Run({request}).at(request.tag); }

  ScratchDir dir_;
  UniqueFd fd_;
  uint32_t file_ = 0;
  std::byte* memory_ = nullptr;  // twice the file
  std::unique_ptr<IoQueue> queue_;
};

TEST_P(Conformance, WritesAndReadsBackEveryBlockInAnyOrder) {
  for (const bool registered : {false, true}) {
    if (registered) queue_->AddMemory(memory_, 2 * kBytes);
    std::mt19937 random(registered ? 1 : 2);
    for (uint64_t i = 0; i < kBytes; ++i) memory_[i] = static_cast<std::byte>(random());
    std::memset(memory_ + kBytes, 0, kBytes);
    std::vector<IoRequest> writes, reads;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint64_t at = uint64_t{b} * kBlock;
      writes.push_back({Op::kWrite, file_, kBlock, at, memory_ + at, b});
      reads.push_back({Op::kRead, file_, kBlock, at, memory_ + kBytes + at, 1000 + b});
    }
    std::shuffle(writes.begin(), writes.end(), random);
    std::shuffle(reads.begin(), reads.end(), random);
    for (const auto& [tag, result] : Run(writes))
      ASSERT_EQ(result, static_cast<int32_t>(kBlock)) << tag;
    EXPECT_EQ(RunOne({Op::kFlush, file_, 0, 0, nullptr, 9}), 0);
    for (const auto& [tag, result] : Run(reads))
      ASSERT_EQ(result, static_cast<int32_t>(kBlock)) << tag;
    EXPECT_EQ(std::memcmp(memory_, memory_ + kBytes, kBytes), 0);
  }
}

TEST_P(Conformance, ErrorsAndShortReadsAreResults) {
  EXPECT_EQ(RunOne({Op::kRead, file_, kBlock, kBytes, memory_, 1}), 0);
  EXPECT_EQ(RunOne({Op::kRead, file_, 2 * kBlock, kBytes - kBlock, memory_, 2}),
            static_cast<int32_t>(kBlock));
  const UniqueFd read_only(open((dir_ / "file").c_str(), O_RDONLY));
  const uint32_t file = *queue_->AddFile(read_only.get());
  EXPECT_EQ(RunOne({Op::kWrite, file, kBlock, 0, memory_, 3}), -EBADF);
  EXPECT_EQ(RunOne({Op::kRead, file, kBlock, 0, memory_, 4}), static_cast<int32_t>(kBlock));
}

// Requests that the device does not answer until Release. io_uring: reads from a terminal on which
// nobody types. Threads cannot pread a terminal: reads into a page that a userfaultfd holds back.
class StuckConformance : public Conformance {
 protected:
  void SetUp() override {
    Conformance::SetUp();
    if (IsSkipped()) return;
    queue_->name() == "io_uring" ? OpenTerminal() : HoldPage();
  }

  void OpenTerminal() {
    int master = -1, slave = -1;
    ASSERT_EQ(openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
    master_.Reset(master);
    slave_.Reset(slave);
    termios raw{};
    ASSERT_EQ(tcgetattr(slave, &raw), 0);
    cfmakeraw(&raw);
    ASSERT_EQ(tcsetattr(slave, TCSANOW, &raw), 0);
    terminal_ = *queue_->AddFile(slave);
  }

  void HoldPage() {
    fault_.Reset(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC)));
    if (!fault_) GTEST_SKIP() << "userfaultfd: " << std::strerror(errno);
    uffdio_api api{UFFD_API, 0, 0};
    ASSERT_EQ(ioctl(fault_.get(), UFFDIO_API, &api), 0);
    uffdio_register held{page(), UFFDIO_REGISTER_MODE_MISSING, 0};
    ASSERT_EQ(ioctl(fault_.get(), UFFDIO_REGISTER, &held), 0);
  }

  IoRequest Stuck(uint64_t tag) {
    if (fault_) return {Op::kRead, file_, kBlock, 0, memory_, tag};
    return {Op::kRead, terminal_, 1, 0, memory_, tag};
  }
  void Release(size_t requests) {
    if (fault_) {
      uffdio_range held = page();
      ASSERT_EQ(ioctl(fault_.get(), UFFDIO_UNREGISTER, &held), 0);
    } else {
      const std::string typed(requests, 'x');
      ASSERT_EQ(write(master_.get(), typed.data(), requests), static_cast<ssize_t>(requests));
    }
  }

 private:
  uffdio_range page() const { return {reinterpret_cast<uintptr_t>(memory_), kBlock}; }

  UniqueFd master_, slave_, fault_;
  uint32_t terminal_ = 0;
};

TEST_P(StuckConformance, SubmitTakesDepthAndNoMore) {
  std::vector<IoRequest> requests;
  for (uint32_t i = 0; i <= kDepth; ++i) requests.push_back(Stuck(i));
  EXPECT_EQ(queue_->Submit(requests), kDepth);
  EXPECT_EQ(queue_->Submit(requests), 0u);
  Release(kDepth);
  std::set<uint64_t> tags;
  std::array<IoResult, 5> results;
  while (tags.size() < kDepth) {
    const size_t n = queue_->Wait(results, Soon());
    ASSERT_GT(n, 0u);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_GT(results[i].result, 0);
      tags.insert(results[i].tag);
    }
  }
  EXPECT_EQ(*tags.rbegin(), kDepth - 1);
}

TEST_P(StuckConformance, AWaitEndsAtItsDeadlineAndTheResultComesLater) {
  std::array<IoResult, 4> results;
  EXPECT_EQ(queue_->Wait(results, Soon()), 0u);  // nothing in flight: nothing to wait for
  ASSERT_EQ(queue_->Submit(std::array{Stuck(5)}), 1u);
  EXPECT_EQ(queue_->Wait(results, steady_clock::now() + milliseconds(20)), 0u);
  EXPECT_EQ(queue_->Wait(results, {}), 0u);
  // One that does not answer holds up no other.
  const IoRequest other{Op::kRead, file_, kBlock, 0, memory_ + kBlock, 6};
  ASSERT_EQ(queue_->Submit(std::array{other}), 1u);
  ASSERT_EQ(queue_->Wait(results, Soon()), 1u);
  EXPECT_EQ(results[0].tag, 6u);
  Release(1);
  ASSERT_EQ(queue_->Wait(results, Soon()), 1u);
  EXPECT_EQ(results[0].tag, 5u);
  EXPECT_GT(results[0].result, 0);
}

TEST_P(StuckConformance, TheDestructorLeavesAStuckRequestBehind) {
  ASSERT_EQ(queue_->Submit(std::array{Stuck(5)}), 1u);
  queue_.reset();  // would hang
  Release(1);
}

const auto kFactories = ::testing::Values(
    Factory{"uring", [] { return NewUringQueue(kDepth); }},
    Factory{"pread", [] { return Result<std::unique_ptr<IoQueue>>(NewPreadQueue(kDepth)); }});
const auto kName = [](const auto& param) { return std::string(param.param.name); };
INSTANTIATE_TEST_SUITE_P(All, Conformance, kFactories, kName);
INSTANTIATE_TEST_SUITE_P(All, StuckConformance, kFactories, kName);

// What Docker's seccomp profile does.
void ForbidUring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  KVS_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  KVS_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

TEST(NewIoQueueDeathTest, TakesThreadsWhereUringIsForbiddenAndSaysWhy) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ForbidUring();
        const IoQueueChoice choice = NewIoQueue(4);
        std::fprintf(stderr, "%s: %s\n", std::string(choice.queue->name()).c_str(),
                     choice.degraded.ToString().c_str());
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "pread: UNAVAILABLE IO_URING: .*not permitted.*seccomp");
}

}  // namespace
}  // namespace kvstrata
