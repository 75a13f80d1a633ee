// SPDX-License-Identifier: Apache-2.0
// Arenas shared by two processes, as daemon and client share them: descriptors passed, read-only
// mappings, memory that outlives whoever made it, GPU memory that comes back after a kill.
#include "kernels/cuda/device_memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"

namespace kvstrata::cuda {
namespace {

constexpr uint64_t kBytes = 64 << 20;
constexpr int kChildFd = 9, kReportFd = 10;

const CudaOps& Ops() { return *kvs_cuda_ops(); }

#define ASSERT_CUDA(call)                         \
  do {                                            \
    const int code = (call);                      \
    ASSERT_EQ(code, 0) << Ops().error_text(code); \
  } while (false)

std::vector<uint32_t> Pattern(uint32_t first) {
  std::vector<uint32_t> words(kBytes / sizeof(uint32_t));
  std::iota(words.begin(), words.end(), first);
  return words;
}

void* At(const DeviceArena& arena) { return reinterpret_cast<void*>(arena.address); }

void Write(const DeviceArena& arena, const std::vector<uint32_t>& words) {
  ASSERT_CUDA(cudaMemcpy(At(arena), words.data(), kBytes, cudaMemcpyHostToDevice));
}
std::vector<uint32_t> Read(const DeviceArena& arena) {
  std::vector<uint32_t> words(kBytes / sizeof(uint32_t), 0xDEADBEEF);
  EXPECT_EQ(cudaMemcpy(words.data(), At(arena), kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return words;
}

uint64_t FreeBytes() {
  DeviceInfo info;
  EXPECT_EQ(Ops().describe_device(0, &info), 0);
  return info.free_bytes;
}

// This program again, as another process that runs the one test `name` with the arena's descriptor;
// it writes a byte to `report` when it has done what it should, then waits to be killed.
class Child {
 public:
  Child(const std::string& name, int fd) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, kChildFd);
    posix_spawn_file_actions_adddup2(&actions, ends[1], kReportFd);
    const std::string filter = "--gtest_filter=" + name;
    const char* const argv[] = {"/proc/self/exe", filter.c_str(), "--gtest_also_run_disabled_tests",
                                nullptr};
    EXPECT_EQ(posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr,
                          const_cast<char* const*>(argv), environ),
              0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    report_ = ends[0];
  }
  ~Child() {
    Kill();
    close(report_);
  }
  // Whether the child did it; false too if it died.
  bool Done() {
    char byte = 0;
    return read(report_, &byte, 1) == 1 && byte == 'y';
  }
  void Kill() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  int report_ = -1;
};

void ReportAndWait(bool done) {
  ASSERT_EQ(write(kReportFd, done ? "y" : "n", 1), 1);
  pause();  // the parent kills
}

// -- what children do

// Disabled: they run in processes that a parent test starts, never by themselves.
TEST(DISABLED_Child, ReadsReadOnly) {
  DeviceArena arena;
  ASSERT_CUDA(Ops().import_arena(0, kChildFd, kBytes, false, &arena));
  const bool same = Read(arena) == Pattern(7);
  // A write must fail, and must not change a byte.
  const std::vector<uint32_t> other = Pattern(1);
  const bool refused =
      cudaMemcpy(At(arena), other.data(), kBytes, cudaMemcpyHostToDevice) != cudaSuccess;
  ReportAndWait(same && refused);
}

TEST(DISABLED_Child, Writes) {
  DeviceArena arena;
  ASSERT_CUDA(Ops().import_arena(0, kChildFd, kBytes, true, &arena));
  Write(arena, Pattern(99));
  ReportAndWait(true);
}

TEST(DISABLED_Child, HoldsAfterItsMakerClosed) {
  DeviceArena arena;
  ASSERT_CUDA(Ops().import_arena(0, kChildFd, kBytes, false, &arena));
  ReportAndWait(Read(arena) == Pattern(3));
}

// -- tests

TEST(DeviceMemory, DescribesEveryDevice) {
  for (int i = 0; i < Ops().device_count(); ++i) {
    DeviceInfo info;
    ASSERT_CUDA(Ops().describe_device(i, &info));
    EXPECT_EQ(std::strlen(info.uuid), 40u);
    EXPECT_GE(info.major, 8);
    EXPECT_GT(info.arena_granularity, 0u);
    EXPECT_LE(info.free_bytes, info.total_bytes);
    std::printf("%d %s %s sm_%d%d\n", i, info.uuid, info.name, info.major, info.minor);
  }
  DeviceInfo info;
  EXPECT_NE(Ops().describe_device(Ops().device_count(), &info), 0);
}

TEST(DeviceMemory, AnotherProcessReadsButCannotWriteReadOnlyMappings) {
  DeviceArena arena;
  int fd = -1;
  ASSERT_CUDA(Ops().create_arena(0, kBytes, &arena, &fd));
  EXPECT_EQ(Read(arena), std::vector<uint32_t>(kBytes / 4)) << "a new arena is not zeroed";
  Write(arena, Pattern(7));
  EXPECT_TRUE(Child("DISABLED_Child.ReadsReadOnly", fd).Done());
  EXPECT_EQ(Read(arena), Pattern(7));
  ASSERT_CUDA(Ops().release_arena(0, &arena));
  close(fd);
}

TEST(DeviceMemory, WhatAKilledProcessWroteStays) {
  DeviceArena arena;
  int fd = -1;
  ASSERT_CUDA(Ops().create_arena(0, kBytes, &arena, &fd));
  {
    Child child("DISABLED_Child.Writes", fd);
    EXPECT_TRUE(child.Done());
    child.Kill();
  }
  EXPECT_EQ(Read(arena), Pattern(99));
  ASSERT_CUDA(Ops().release_arena(0, &arena));
  close(fd);
}

TEST(DeviceMemory, LivesWhileSomebodyHoldsItAndComesBackAfterKills) {
  const uint64_t before = FreeBytes();
  for (int i = 0; i < 5; ++i) {
    DeviceArena arena;
    int fd = -1;
    ASSERT_CUDA(Ops().create_arena(0, kBytes, &arena, &fd));
    Write(arena, Pattern(3));
    Child child("DISABLED_Child.HoldsAfterItsMakerClosed", fd);
    close(fd);
    ASSERT_CUDA(Ops().release_arena(0, &arena));
    EXPECT_TRUE(child.Done());
    child.Kill();
  }
  EXPECT_EQ(FreeBytes(), before);
}

TEST(DeviceMemory, RefusesWhatItCannotDo) {
  DeviceArena arena;
  int fd = -1;
  EXPECT_NE(Ops().create_arena(0, 4096, &arena, &fd), 0) << "not a multiple of the granularity";
  DeviceInfo info;
  ASSERT_CUDA(Ops().describe_device(0, &info));
  const uint64_t too_much =
      (info.total_bytes + info.arena_granularity) / info.arena_granularity * info.arena_granularity;
  EXPECT_EQ(Ops().create_arena(0, too_much, &arena, &fd), cudaErrorMemoryAllocation);
  const int memfd = memfd_create("not-an-arena", MFD_CLOEXEC);
  EXPECT_NE(Ops().import_arena(0, memfd, kBytes, true, &arena), 0);
  close(memfd);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error stuck";
}

// The host pool: a sealed memfd, registered in the daemon to be written, in a client to be read.
TEST(DeviceMemory, RegistersMemfdsForCopies) {
  constexpr size_t kHost = 8 << 20;
  const int fd = memfd_create("host", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(fd, kHost), 0);
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  void* rw = mmap(nullptr, kHost, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* ro = mmap(nullptr, kHost, PROT_READ, MAP_SHARED, fd, 0);
  std::memset(rw, 0x5A, kHost);
  ASSERT_CUDA(Ops().register_host(rw, kHost, false));
  ASSERT_CUDA(Ops().register_host(ro, kHost, true));
  EXPECT_EQ(Ops().register_host(rw, kHost, false), cudaErrorHostMemoryAlreadyRegistered);
  DeviceArena arena;
  int arena_fd = -1;
  ASSERT_CUDA(Ops().create_arena(0, kHost, &arena, &arena_fd));
  ASSERT_CUDA(cudaMemcpy(At(arena), ro, kHost, cudaMemcpyHostToDevice));
  std::memset(rw, 0, kHost);
  ASSERT_CUDA(cudaMemcpy(rw, At(arena), kHost, cudaMemcpyDeviceToHost));
  EXPECT_EQ(static_cast<const char*>(ro)[kHost - 1], 0x5A);
  ASSERT_CUDA(Ops().unregister_host(ro));
  ASSERT_CUDA(Ops().unregister_host(rw));
  ASSERT_CUDA(Ops().release_arena(0, &arena));
  close(arena_fd);
  munmap(rw, kHost);
  munmap(ro, kHost);
  close(fd);
}

}  // namespace
}  // namespace kvstrata::cuda
