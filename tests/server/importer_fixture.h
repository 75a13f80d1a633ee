// SPDX-License-Identifier: Apache-2.0
// What the importer's tests share: an engine that lends its blocks to a store in this process
// (Lender), and a GPU that is a table of functions (fake_gpu), which can hold a copy or a release
// up.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "server/work/importer.h"
#include "tests/fakes/fake_gpu_memory.h"
#include "tests/fakes/lent_blocks.h"

namespace kvstrata::testing {

inline constexpr Geometry kGeometry{2, 4, 2, 64, 16, DType::kBF16};
inline constexpr int32_t kBlocks = 96;

// Finite bf16 numbers that name where they belong.
inline void RowOf(int32_t layer, int side, int32_t head, int32_t position, std::byte* to) {
  for (int32_t c = 0; c < kGeometry.head_dim; ++c) {
    const auto mix =
        static_cast<uint32_t>((((layer * 2 + side) * 2 + head) * 4096 + position) * 64 + c);
    const auto value = static_cast<uint16_t>(0x3E00 + (mix * 2654435761u >> 23));
    std::memcpy(to + c * 2, &value, 2);
  }
}

inline std::vector<int32_t> Ids(int32_t n, int32_t first = 100) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = first + i;
  return ids;
}

inline LentTensor TensorOf(const LentBlocks& blocks, int32_t layer, int side) {
  LentTensor t;
  t.handle.kind = TensorKind::kMemfd;
  t.handle.fd = blocks.fd();
  t.handle.bytes = blocks.bytes();
  const BlockStrides s = blocks.StridesOf(layer, side);
  const BlockShape& shape = blocks.shape();
  t.layout = {static_cast<uint64_t>(s.offset),
              s.block,
              s.slot,
              s.head,
              static_cast<int32_t>(kGeometry.dtype),
              shape.blocks,
              shape.block_tokens,
              shape.heads,
              kGeometry.head_dim};
  return t;
}

// Holds callers up while it is shut.
class Gate {
 public:
  void Shut() {
    MutexLock lock(mu_);
    shut_ = true;
  }
  void Open() {
    MutexLock lock(mu_);
    shut_ = false;
    changed_.notify_all();
  }
  void Pass() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mu_.native());
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return !shut_; });
    --waiting_;
  }
  bool AwaitSomebody() {
    std::unique_lock<std::mutex> lock(mu_.native());
    return changed_.wait_for(lock, std::chrono::seconds(10),
                             [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return waiting_ > 0; });
  }

 private:
  Mutex mu_;
  std::condition_variable changed_;
  bool shut_ KVS_GUARDED_BY(mu_) = false;
  int waiting_ KVS_GUARDED_BY(mu_) = 0;
};

// A GPU whose memory is this process's: an IPC handle begins with an address and a length.
namespace fake_gpu {
inline Gate copies, releases;
inline std::atomic<int> open{0};

inline int OpenIpc(int, const uint8_t* handle, cuda::DeviceArena* memory) {
  std::memcpy(memory, handle, sizeof(*memory));
  if (memory->address == 0) return 1;
  ++open;
  return 0;
}
inline int CloseIpc(int, cuda::DeviceArena* memory) {
  releases.Pass();
  *memory = {};
  --open;
  return 0;
}
inline int CopyPages(int, const cuda::PageCopy* pages, uint64_t count) {
  copies.Pass();
  for (uint64_t i = 0; i < count; ++i)
    std::memcpy(pages[i].to, pages[i].from, pages[i].shape.width);
  return 0;
}
inline int AllocatePageLocked(uint64_t bytes, void** at) {
  *at = std::malloc(bytes);
  return *at == nullptr ? 2 : 0;
}
inline int FreePageLocked(void* at) {
  std::free(at);
  return 0;
}
inline const char* ErrorText(int) { return "no such memory"; }

inline const cuda::CudaOps& Ops() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps table;
    table.error_text = ErrorText;
    table.open_ipc = OpenIpc;
    table.close_ipc = CloseIpc;
    table.copy_pages = CopyPages;
    table.allocate_page_locked = AllocatePageLocked;
    table.free_page_locked = FreePageLocked;
    return table;
  }();
  return ops;
}

inline LentTensor TensorOf(const LentBlocks& blocks, int32_t layer, int side) {
  LentTensor t = testing::TensorOf(blocks, layer, side);
  t.handle.kind = TensorKind::kCudaIpc;
  const cuda::DeviceArena memory{reinterpret_cast<uint64_t>(blocks.data()), blocks.bytes()};
  std::memcpy(t.handle.ipc.data(), &memory, sizeof(memory));
  return t;
}
}  // namespace fake_gpu

// One session that lends, in a store of its own.
class Lender {
 public:
  explicit Lender(uint64_t host_pages = 512, const ImporterOptions& options = {},
                  int32_t page_tokens = 16) {
    StoreOptions pools;
    pools.arena_bytes = 64 << 10;
    geometry_ = kGeometry;
    geometry_.page_tokens = page_tokens;
    pools.host_bytes = host_pages * static_cast<uint64_t>(geometry_.page_bytes());
    pools.device_bytes = uint64_t{1} << 20;
    pools.headroom_tokens = 16;
    auto gpu = std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false));
    store_ = std::move(*Store::Create(pools, std::move(gpu), NewHostMemory()));
    importer_ = std::make_unique<Importer>(options, store_.get(), &Backends().front());
    session_ = OpenSession(&model_);
    PeerIdentity peer;
    peer.uid = geteuid();
    lending_ = importer_->NewSession(session_, 0, peer);
  }
  ~Lender() {
    lending_.reset();
    importer_.reset();
  }

  uint64_t OpenSession(uint64_t* model) {
    PeerIdentity peer;
    peer.tenant = "uid:1";
    const Result<SessionSegments> segments =
        store_->sessions().OpenSession(peer, Transport::kLinked, "test", [](const ArenaGrant&) {});
    EXPECT_TRUE(segments.ok()) << segments.status().ToString();
    ModelDesc desc;
    desc.name = "lent";
    desc.digest = "digest";
    desc.geometry = geometry_;
    *model = *store_->models().RegisterModel(segments->session, desc);
    return segments->session;
  }

  void RegisterAll(const LentBlocks& blocks, bool gpu = false) {
    for (int32_t layer = 0; layer < kGeometry.layers; ++layer) {
      const auto of = gpu ? fake_gpu::TensorOf : TensorOf;
      const Status status =
          lending_->Register(model_, layer, of(blocks, layer, 0), of(blocks, layer, 1));
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
  }

  OpenedSequence Open(std::string_view plan, const std::vector<int32_t>& ids) {
    Result<OpenedSequence> opened = store_->openings().OpenSequence(session_, model_, plan, ids);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    EXPECT_TRUE(opened->imported);
    lending_->Opened(opened->sequence, model_, std::span(ids).first(opened->held_tokens));
    return *opened;
  }
  Status Seal(uint64_t sequence, uint32_t first, const std::vector<int32_t>& blocks,
              const std::vector<int32_t>& tokens) {
    return lending_->Seal({sequence, first, blocks, tokens});
  }
  // Waits for the copies of a sequence.
  Status Settle(uint64_t sequence) {
    auto done = std::make_shared<std::promise<Status>>();
    std::future<Status> settled = done->get_future();
    lending_->Settle(sequence, [done](const Status& status) { done->set_value(status); });
    if (settled.wait_for(std::chrono::seconds(10)) != std::future_status::ready)
      return Internal("TEST", "no answer");
    return settled.get();
  }

  // How many rows of the sequence's pages are others than positions [0, tokens) have.
  int Differing(uint64_t sequence, int32_t tokens) {
    const PageLayout layout = PageLayout::Of(geometry_);
    const Result<SequenceDetail> detail = store_->inspection().Show(sequence);
    EXPECT_TRUE(detail.ok());
    int differing = 0;
    std::vector<std::byte> want(static_cast<size_t>(geometry_.row_bytes()));
    for (int32_t p = 0; p < tokens; ++p) {
      const std::byte* const page =
          AddressOf(detail->pages[static_cast<size_t>(p / layout.page_tokens)]);
      for (int32_t layer = 0; layer < geometry_.layers; ++layer) {
        for (int32_t head = 0; head < geometry_.kv_heads; ++head) {
          for (int side = 0; side < 2; ++side) {
            const int slot = p % layout.page_tokens;
            RowOf(layer, side, head, p, want.data());
            const int64_t at = side == 0 ? layout.KeyOffset(layer, head, slot)
                                         : layout.ValueOffset(layer, head, slot);
            differing += std::memcmp(page + at, want.data(), want.size()) != 0;
          }
        }
      }
    }
    return differing;
  }
  const std::byte* AddressOf(const PageInfo& page) {
    const std::byte* base = store_->devices().ArenaBase(page.arena);
    if (store_->devices().handle_type(page.tier) != HandleType::kMemfd) base += kGpuShift;
    return base + page.offset;
  }
  void ExpectClean() {
    for (const auto& finding : store_->inspection().Audit().findings) ADD_FAILURE() << finding;
  }
  uint64_t UsedBytes() {
    store_->references().Reclaim();
    uint64_t used = 0;
    for (const PoolInfo& pool : store_->inspection().Pools()) {
      used += pool.used_bytes + pool.retired_bytes - pool.cached_bytes;
    }
    return used;
  }

  Store& store() { return *store_; }
  Importer& importer() { return *importer_; }
  std::unique_ptr<SessionImport>& lending() { return lending_; }
  uint64_t session() const { return session_; }
  uint64_t model() const { return model_; }
  const Geometry& geometry() const { return geometry_; }

 private:
  Geometry geometry_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Importer> importer_;
  uint64_t session_ = 0, model_ = 0;
  std::unique_ptr<SessionImport> lending_;
};

inline BlockShape ShapeOf(int32_t block_tokens) {
  return {kGeometry.layers, kBlocks * 16 / block_tokens, block_tokens, kGeometry.kv_heads,
          kGeometry.row_bytes()};
}

// Block ids in random order.
inline std::vector<int32_t> Scattered(const BlockShape& shape) {
  static const uint64_t seed = [] {
    const uint64_t s = std::random_device{}();
    std::printf("seed %lu\n", s);
    return s;
  }();
  std::vector<int32_t> ids(static_cast<size_t>(shape.blocks));
  for (int32_t i = 0; i < shape.blocks; ++i) ids[static_cast<size_t>(i)] = i;
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  return ids;
}

}  // namespace kvstrata::testing
