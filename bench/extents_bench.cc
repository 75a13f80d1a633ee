// SPDX-License-Identifier: Apache-2.0
// Extents of one host arena: ours (server/memory/extent_allocator.h) beside jemalloc over the same
// address range, as docs/adr/0001-host-extents.md compares them.
//
// Extents of codecs' sizes live and die at random. `full`: bytes in extents when the first
// allocation fails, of the arena's; `churn`: likewise after many times the arena's bytes came and
// went; `ns`: of one allocation and one free. No byte of an arena is touched.
// Usage: extents_bench
#include <jemalloc/jemalloc.h>
#include <sys/mman.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/memory/extent_allocator.h"

namespace kvstrata {
namespace {

constexpr uint64_t kArena = uint64_t{256} << 20, kPage = 4096;

class Ours {
 public:
  std::optional<uint64_t> Allocate(uint64_t bytes) { return extents_.Allocate(bytes); }
  void Free(uint64_t at, uint64_t bytes) { extents_.Free(at, bytes); }

 private:
  ExtentAllocator extents_{kArena, kPage};
};

// What "experimental.arenas_create_ext" takes; jemalloc 5.3 has it in no public header.
struct ArenaConfig {
  extent_hooks_t* extent_hooks;
  bool metadata_use_hooks;
};

// One jemalloc arena; its extents come from the range, from front to back, and never go.
class Jemalloc {
 public:
  Jemalloc() {
    base_ = static_cast<std::byte*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    end_ = base_;
    current_ = this;
    config_.extent_hooks = &hooks_;
    config_.metadata_use_hooks = false;
    size_t size = sizeof(arena_);
    Must(mallctl("experimental.arenas_create_ext", &arena_, &size, &config_, sizeof(config_)));
    ssize_t never = -1;
    const std::string arena = "arena." + std::to_string(arena_);
    Must(mallctl((arena + ".dirty_decay_ms").c_str(), nullptr, nullptr, &never, sizeof(never)));
    Must(mallctl((arena + ".muzzy_decay_ms").c_str(), nullptr, nullptr, &never, sizeof(never)));
  }
  std::optional<uint64_t> Allocate(uint64_t bytes) {
    void* p = mallocx(bytes, flags());
    if (p == nullptr) return std::nullopt;
    return static_cast<uint64_t>(static_cast<std::byte*>(p) - base_);
  }
  void Free(uint64_t at, uint64_t bytes) { sdallocx(base_ + at, bytes, flags()); }

 private:
  static void Must(int error) {
    if (error != 0) std::exit(std::printf("mallctl: error %d\n", error));
  }
  int flags() const {
    return static_cast<int>(MALLOCX_ARENA(arena_)) | MALLOCX_TCACHE_NONE | MALLOCX_ALIGN(kPage);
  }
  static void* TakeRange(extent_hooks_t*, void* at, size_t size, size_t alignment, bool* zero,
                         bool* commit, unsigned) {
    if (at != nullptr) return nullptr;
    const auto end = reinterpret_cast<uintptr_t>(current_->end_);
    const uintptr_t begin = (end + alignment - 1) / alignment * alignment;
    const auto limit = reinterpret_cast<uintptr_t>(current_->base_) + kArena;
    if (begin > limit || size > limit - begin) return nullptr;
    current_->end_ = reinterpret_cast<std::byte*>(begin + size);
    *zero = *commit = true;
    return reinterpret_cast<void*>(begin);
  }
  static bool Keep(extent_hooks_t*, void*, size_t, bool, unsigned) { return true; }
  static bool MayCut(extent_hooks_t*, void*, size_t, size_t, size_t, bool, unsigned) {
    return false;
  }
  static bool MayJoin(extent_hooks_t*, void*, size_t, void*, size_t, bool, unsigned) {
    return false;
  }

  static inline Jemalloc* current_ = nullptr;
  extent_hooks_t hooks_{TakeRange, Keep,    nullptr, nullptr, nullptr,
                        nullptr,   nullptr, MayCut,  MayJoin};
  ArenaConfig config_{};
  unsigned arena_ = 0;
  std::byte *base_ = nullptr, *end_ = nullptr;
};

struct Sizes {
  const char* name;
  uint64_t low, high;  // log-uniform between them, whole pages
  uint64_t Next(std::mt19937_64* random) const {
    std::uniform_real_distribution<double> log(std::log(low), std::log(high));
    return (static_cast<uint64_t>(std::exp(log(*random))) + kPage - 1) / kPage * kPage;
  }
};

struct Outcome {
  double full = 0, churn = 0, ns = 0;
};

template <typename Allocator>
Outcome Run(const Sizes& sizes, uint64_t seed) {
  Allocator allocator;
  std::mt19937_64 random(seed);
  std::vector<std::pair<uint64_t, uint64_t>> live;
  uint64_t bytes = 0;
  const auto fill = [&] {
    for (;;) {
      const uint64_t size = sizes.Next(&random);
      const std::optional<uint64_t> at = allocator.Allocate(size);
      if (!at) return static_cast<double>(bytes) / kArena;
      live.emplace_back(*at, size);
      bytes += size;
    }
  };
  const auto drop = [&] {
    std::swap(live[random() % live.size()], live.back());
    allocator.Free(live.back().first, live.back().second);
    bytes -= live.back().second;
    live.pop_back();
  };
  Outcome outcome;
  outcome.full = fill();
  double sum = 0;
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t n = live.size() / 8 + 1; n > 0; --n) drop();
    sum += fill();
  }
  outcome.churn = sum / kRounds;
  for (size_t n = live.size() / 4; n > 0; --n) drop();
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kOps = 200000;
  for (int i = 0; i < kOps; ++i) {
    drop();
    const uint64_t size = sizes.Next(&random);
    const std::optional<uint64_t> at = allocator.Allocate(size);
    if (!at) continue;
    live.emplace_back(*at, size);
    bytes += size;
    if (live.size() < 4) fill();
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  outcome.ns = took.count() / kOps;
  return outcome;
}

}  // namespace
}  // namespace kvstrata

int main() {
  using namespace kvstrata;
  for (const Sizes& sizes :
       {Sizes{"packed, 8K..256K", 8 << 10, 256 << 10}, Sizes{"spans, 64K..2M", 64 << 10, 2 << 20},
        Sizes{"one size, 68K", 68 << 10, (68 << 10) + 1}}) {
    for (const uint64_t seed : {1, 2, 3}) {
      const Outcome a = Run<Ours>(sizes, seed), b = Run<Jemalloc>(sizes, seed);
      std::printf("%-17s seed %lu: full %.3f, jemalloc %.3f; churn %.3f, %.3f; ns %.0f, %.0f\n",
                  sizes.name, seed, a.full, b.full, a.churn, b.churn, a.ns, b.ns);
    }
  }
  return 0;
}
