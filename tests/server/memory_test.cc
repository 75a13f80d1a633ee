// SPDX-License-Identifier: Apache-2.0
// Memory resources by one conformance suite, the adaptors, and the extent allocator against a
// bitmap.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "server/memory/cgroup.h"
#include "server/memory/extent_allocator.h"
#include "server/memory/memory_resource.h"
#include "tests/fakes/failing_resource.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata {
namespace {

constexpr uint64_t kBytes = 1 << 20;

struct Factory {
  const char* name;
  std::function<std::unique_ptr<MemoryResource>()> make;
};

class Conformance : public ::testing::TestWithParam<Factory> {
 protected:
  std::unique_ptr<MemoryResource> memory_ = GetParam().make();
};

// The VmFlags line of the mapping that begins at `at`.
std::string VmFlags(const void* at) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(at) << '-';
  std::ifstream smaps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.rfind(start.str(), 0) == 0) found = true;
    if (found && line.rfind("VmFlags:", 0) == 0) return line + " ";
  }
  return "";
}

TEST_P(Conformance, MemoryIsZeroedAndWritable) {
  Result<MappedMemory> memory = memory_->Allocate(kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  ASSERT_EQ(memory->bytes, kBytes);
  for (uint64_t i = 0; i < kBytes; i += 997) ASSERT_EQ(memory->base[i], std::byte{0});
  memory->base[kBytes - 1] = std::byte{7};
  std::byte seen{};
  ASSERT_EQ(pread(memory->read_only_fd.get(), &seen, 1, kBytes - 1), 1);
  EXPECT_EQ(seen, std::byte{7});
  memory_->Free(std::move(*memory));
}

TEST_P(Conformance, MemoryIsSealedPrivateAndStaysOutOfDumpsAndChildren) {
  Result<MappedMemory> memory = memory_->Allocate(kBytes);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(fcntl(memory->fd.get(), F_GET_SEALS), F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  EXPECT_NE(ftruncate(memory->fd.get(), 4096), 0);
  struct stat info {};
  ASSERT_EQ(fstat(memory->fd.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const std::string flags = VmFlags(memory->base);
  EXPECT_NE(flags.find(" dd "), std::string::npos) << flags;  // MADV_DONTDUMP
  EXPECT_NE(flags.find(" dc "), std::string::npos) << flags;  // MADV_DONTFORK
  memory_->Free(std::move(*memory));
}

TEST_P(Conformance, ReadOnlyDescriptorCannotBeMappedForWriting) {
  Result<MappedMemory> memory = memory_->Allocate(kBytes);
  ASSERT_TRUE(memory.ok());
  const int fd = memory->read_only_fd.get();
  EXPECT_EQ(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  void* readable = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_NE(mprotect(readable, kBytes, PROT_READ | PROT_WRITE), 0);
  munmap(readable, kBytes);
  memory_->Free(std::move(*memory));
}

TEST_P(Conformance, FreedMemoryReturnsWhileAClientStillMapsIt) {
  Result<MappedMemory> memory = memory_->Allocate(kBytes);
  ASSERT_TRUE(memory.ok());
  memory->base[0] = std::byte{7};
  void* client = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, memory->read_only_fd.get(), 0);
  ASSERT_NE(client, MAP_FAILED);
  memory_->Free(std::move(*memory));
  EXPECT_EQ(*static_cast<std::byte*>(client), std::byte{0});
  munmap(client, kBytes);
}

TEST_P(Conformance, RefusesSizesThatAreNoPages) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4097}}) {
    const Result<MappedMemory> memory = memory_->Allocate(bytes);
    ASSERT_FALSE(memory.ok());
    EXPECT_EQ(memory.status().reason(), "MEMORY_SIZE");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Conformance,
    ::testing::Values(Factory{"device", NewEmulatedDevice}, Factory{"host", NewHostMemory},
                      Factory{"limited",
                              [] { return NewLimitedResource(NewHostMemory(), &kBytes); }},
                      Factory{"failing", [] { return NewFailingResource(NewHostMemory(), 1); }}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(LimitedResource, GivesNoMoreThanItsCapacityAndTakesBack) {
  uint64_t capacity = 2 * kBytes;
  auto memory = NewLimitedResource(NewEmulatedDevice(), &capacity);
  Result<MappedMemory> a = memory->Allocate(kBytes), b = memory->Allocate(kBytes);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(memory->Allocate(4096).status().reason(), "POOL_EXHAUSTED");
  memory->Free(std::move(*a));
  capacity = kBytes / 2;  // below what is out
  EXPECT_EQ(memory->Allocate(4096).status().reason(), "POOL_EXHAUSTED");
  capacity = 2 * kBytes;
  Result<MappedMemory> c = memory->Allocate(kBytes);
  EXPECT_TRUE(c.ok());
  memory->Free(std::move(*b));
  memory->Free(std::move(*c));
}

TEST(FailingResource, FailsFromTheGivenAllocationOn) {
  auto memory = NewFailingResource(NewEmulatedDevice(), 1);
  Result<MappedMemory> a = memory->Allocate(4096);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(memory->Allocate(4096).status().reason(), "MEMORY_EXHAUSTED");
  memory->Free(std::move(*a));
  EXPECT_EQ(memory->Allocate(4096).status().reason(), "MEMORY_EXHAUSTED");
}

// A root with /proc and /sys of one machine.
class FakeMachine {
 public:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path at = root_.path() + path;
    std::filesystem::create_directories(at.parent_path());
    std::ofstream(at) << text;
  }
  std::optional<CgroupMemory> Read() const { return ReadCgroupMemory(root_.path()); }

 private:
  const ScratchDir root_;
};

TEST(Cgroup, TheLowestLimitOnTheWayUpHolds) {
  FakeMachine machine;
  machine.Write("/proc/self/cgroup", "0::/system/kvstrata\n");
  machine.Write("/proc/self/mountinfo",
                "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  EXPECT_FALSE(machine.Read().has_value());
  machine.Write("/sys/fs/cgroup/system/kvstrata/memory.max", "max\n");
  machine.Write("/sys/fs/cgroup/system/kvstrata/memory.current", "1000\n");
  EXPECT_FALSE(machine.Read().has_value());
  machine.Write("/sys/fs/cgroup/system/memory.max", "1000000\n");
  machine.Write("/sys/fs/cgroup/system/memory.current", "400000\n");
  machine.Write("/sys/fs/cgroup/system/memory.stat",
                "anon 1\ninactive_file 100000\nactive_file 50000\nshmem 7\n");
  const std::optional<CgroupMemory> found = machine.Read();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->limit, 1000000u);
  EXPECT_EQ(found->charged, 400000u);
  EXPECT_EQ(found->reclaimable, 150000u);
  EXPECT_EQ(found->available(), 750000u);
  EXPECT_TRUE(found->file.ends_with("/sys/fs/cgroup/system/memory.max")) << found->file;
}

TEST(Cgroup, Version1CountsWhereTheOtherHasNoMemory) {
  FakeMachine machine;
  machine.Write("/proc/self/cgroup", "5:cpu,memory:/docker/a\n0::/\n");
  machine.Write("/proc/self/mountinfo",
                "30 20 0:26 / /unified rw - cgroup2 cgroup2 rw\n"
                "31 20 0:27 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  machine.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  machine.Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
  EXPECT_FALSE(machine.Read().has_value()) << "its way of saying none";
  machine.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
  machine.Write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 3\ntotal_inactive_file 2\n");
  const std::optional<CgroupMemory> found = machine.Read();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->limit, 1000u);
  EXPECT_EQ(found->available(), 997u);
}

TEST(Cgroup, DefaultPoolsGiveWay) {
  const CgroupMemory cgroup{"", 100 << 20, 30 << 20, 10 << 20};  // 80 MiB are left
  EXPECT_EQ(DefaultPoolBytes(cgroup, 64 << 20, 1), uint64_t{60} << 20);
  EXPECT_EQ(DefaultPoolBytes(cgroup, 64 << 20, 2), uint64_t{30} << 20);
  EXPECT_EQ(DefaultPoolBytes(cgroup, 20 << 20, 2), uint64_t{20} << 20);
  const uint64_t each = DefaultPoolBytes(cgroup, uint64_t{4} << 30, 2);
  EXPECT_TRUE(CheckCgroupBudget(cgroup, each, each).ok());
  const CgroupMemory full{"", 100 << 20, 100 << 20, 0};
  EXPECT_EQ(DefaultPoolBytes(full, 64 << 20, 1), uint64_t{64} << 20);
}

TEST(Cgroup, PoolsBeyondItAreRefusedWithTheFigures) {
  const CgroupMemory cgroup{"/sys/fs/cgroup/memory.max", 100 << 20, 30 << 20, 10 << 20};
  EXPECT_TRUE(CheckCgroupBudget(cgroup, 80 << 20, 0).ok());
  EXPECT_TRUE(CheckCgroupBudget(cgroup, 40 << 20, 40 << 20).ok());
  const Status refused = CheckCgroupBudget(cgroup, 41 << 20, 40 << 20);
  EXPECT_EQ(refused.reason(), "POOL_BEYOND_CGROUP");
  for (const char* figure : {"41 MiB", "40 MiB", "80 MiB", "100 MiB", "30 MiB", "10 MiB",
                             "/sys/fs/cgroup/memory.max", "pool.host_bytes"}) {
    EXPECT_NE(std::string(refused.message()).find(figure), std::string::npos) << refused.message();
  }
}

// The model: one flag for each granule.
class Bitmap {
 public:
  explicit Bitmap(size_t n) : taken_(n, false) {}
  void Set(uint64_t first, uint64_t n, bool value) {
    for (uint64_t i = first; i < first + n; ++i) {
      ASSERT_NE(taken_[i], value) << "granule " << i;
      taken_[i] = value;
    }
  }
  // Free runs as (length, first).
  std::vector<std::pair<uint64_t, uint64_t>> Holes() const {
    std::vector<std::pair<uint64_t, uint64_t>> holes;
    for (size_t i = 0; i < taken_.size(); ++i) {
      if (taken_[i]) continue;
      if (i == 0 || taken_[i - 1]) holes.push_back({0, i});
      ++holes.back().first;
    }
    return holes;
  }

 private:
  std::vector<bool> taken_;
};

void ExpectSame(const ExtentAllocator& allocator, const Bitmap& model, uint64_t granule) {
  const auto holes = model.Holes();
  ASSERT_EQ(holes.size(), allocator.free_extents().size());  // equal: neighbours were joined
  uint64_t free = 0;
  for (const auto& [n, first] : holes) {
    const auto it = allocator.free_extents().find(first * granule);
    ASSERT_NE(it, allocator.free_extents().end());
    ASSERT_EQ(it->second, n * granule);
    free += n * granule;
  }
  ASSERT_EQ(allocator.used(), allocator.capacity() - free);
}

TEST(ExtentAllocator, AgreesWithABitmap) {
  constexpr uint64_t kGranule = 4096, kGranules = 256;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    ExtentAllocator allocator(kGranules * kGranule, kGranule);
    Bitmap model(kGranules);
    std::vector<std::pair<uint64_t, uint64_t>> taken;  // offset, size
    for (int step = 0; step < 400; ++step) {
      const uint64_t size = 1 + random() % (20 * kGranule);
      const uint64_t n = (size + kGranule - 1) / kGranule;
      if (random() % 2 == 0 && !taken.empty()) {
        const size_t i = random() % taken.size();
        allocator.Free(taken[i].first, taken[i].second);
        model.Set(taken[i].first / kGranule, (taken[i].second + kGranule - 1) / kGranule, false);
        taken.erase(taken.begin() + static_cast<ptrdiff_t>(i));
      } else if (random() % 3 == 0) {
        std::vector<uint64_t> offsets;
        const auto want = static_cast<uint32_t>(1 + random() % 8);
        uint64_t possible = 0;
        for (const auto& hole : model.Holes()) possible += hole.first / n;
        ASSERT_EQ(allocator.AllocateMany(size, want, &offsets), std::min<uint64_t>(want, possible));
        for (const uint64_t offset : offsets) {
          model.Set(offset / kGranule, n, true);
          taken.push_back({offset, size});
        }
      } else {
        auto holes = model.Holes();
        std::erase_if(holes, [&](const auto& hole) { return hole.first < n; });
        const auto offset = allocator.Allocate(size);
        ASSERT_EQ(offset.has_value(), !holes.empty());
        if (!offset) continue;
        // Best fit, the lower offset on ties.
        ASSERT_EQ(*offset / kGranule, std::min_element(holes.begin(), holes.end())->second);
        model.Set(*offset / kGranule, n, true);
        taken.push_back({*offset, size});
      }
      ExpectSame(allocator, model, kGranule);
    }
  }
}

TEST(ExtentAllocatorDeathTest, FreeingTwiceIsABug) {
  ExtentAllocator allocator(1 << 20, 4096);
  const uint64_t offset = *allocator.Allocate(8192);
  (void)*allocator.Allocate(8192);
  allocator.Free(offset, 8192);
  EXPECT_DEATH(allocator.Free(offset, 4096), "broken invariant");
}

}  // namespace
}  // namespace kvstrata
