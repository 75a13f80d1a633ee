// The importer over a store in this process: what it copies, refuses, forgets and survives. Memory
// of a GPU is played by a table of functions (FakeGpu), which can hold a copy or a release up.
#include "server/work/importer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <random>

#include "kernels/segment/segmenter.h"
#include "tests/fakes/far_memory.h"
#include "tests/fakes/lent_blocks.h"

namespace kvstrata {
namespace {

using namespace std::chrono_literals;
using testing::BlockLayout;
using testing::BlockShape;
using testing::BlockStrides;
using ::testing::HasSubstr;
using testing::kBlockLayouts;
using testing::LentBlocks;

constexpr Geometry kGeometry{2, 4, 2, 64, 16, DType::kBF16};
constexpr int32_t kBlocks = 96;

// Finite bf16 numbers that name where they belong.
void RowOf(int32_t layer, int side, int32_t head, int32_t position, std::byte* to) {
  for (int32_t c = 0; c < kGeometry.head_dim; ++c) {
    const auto mix =
        static_cast<uint32_t>((((layer * 2 + side) * 2 + head) * 4096 + position) * 64 + c);
    const auto value = static_cast<uint16_t>(0x3E00 + (mix * 2654435761u >> 23));
    std::memcpy(to + c * 2, &value, 2);
  }
}

std::vector<int32_t> Ids(int32_t n, int32_t first = 100) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = first + i;
  return ids;
}

LentTensor TensorOf(const LentBlocks& blocks, int32_t layer, int side) {
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
  void Pass() {
    std::unique_lock<std::mutex> lock(mu_.native());
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return !shut_; });
    --waiting_;
  }
  bool AwaitSomebody() {
    std::unique_lock<std::mutex> lock(mu_.native());
    return changed_.wait_for(lock, 10s,
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
Gate copies, releases;
std::atomic<int> open{0};

int OpenIpc(int, const uint8_t* handle, cuda::DeviceArena* memory) {
  std::memcpy(memory, handle, sizeof(*memory));
  if (memory->address == 0) return 1;
  ++open;
  return 0;
}
int CloseIpc(int, cuda::DeviceArena* memory) {
  releases.Pass();
  *memory = {};
  --open;
  return 0;
}
int CopyPages(int, const cuda::PageCopy* pages, uint64_t count) {
  copies.Pass();
  for (uint64_t i = 0; i < count; ++i)
    std::memcpy(pages[i].to, pages[i].from, pages[i].shape.width);
  return 0;
}
int AllocatePinned(uint64_t bytes, void** at) {
  *at = std::malloc(bytes);
  return *at == nullptr ? 2 : 0;
}
int FreePinned(void* at) {
  std::free(at);
  return 0;
}
const char* ErrorText(int) { return "no such memory"; }

const cuda::CudaOps& Ops() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps table;
    table.error_text = ErrorText;
    table.open_ipc = OpenIpc;
    table.close_ipc = CloseIpc;
    table.copy_pages = CopyPages;
    table.allocate_pinned = AllocatePinned;
    table.free_pinned = FreePinned;
    return table;
  }();
  return ops;
}

LentTensor TensorOf(const LentBlocks& blocks, int32_t layer, int side) {
  LentTensor t = kvstrata::TensorOf(blocks, layer, side);
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
    const auto never = std::make_shared<std::atomic<bool>>(false);
    store_ = std::move(
                 Store::Create(pools, std::make_unique<testing::FarMemory>(never), NewHostPinned()))
                 .value();
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
        store_->OpenSession(peer, Road::kLinked, "test", [](const ArenaGrant&) {});
    EXPECT_TRUE(segments.ok()) << segments.status().ToString();
    ModelDesc desc;
    desc.name = "lent";
    desc.digest = "digest";
    desc.geometry = geometry_;
    *model = *store_->RegisterModel(segments->session, desc);
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
    Result<OpenedSequence> opened = store_->OpenSequence(session_, model_, plan, ids);
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
    if (settled.wait_for(10s) != std::future_status::ready) return Internal("TEST", "no answer");
    return settled.get();
  }

  // How many rows of the sequence's pages are others than positions [0, tokens) have.
  int Differing(uint64_t sequence, int32_t tokens) {
    const PageLayout layout = PageLayout::Of(geometry_);
    const Result<SequenceDetail> detail = store_->Show(sequence);
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
    const std::byte* base = store_->ArenaBase(page.arena);
    if (store_->memory(page.tier) != Memory::kMemfd) base += testing::kFarShift;
    return base + page.offset;
  }
  void ExpectClean() {
    for (const std::string& finding : store_->Audit().findings) ADD_FAILURE() << finding;
  }
  uint64_t UsedBytes() {
    store_->Reclaim();
    uint64_t used = 0;
    for (const PoolInfo& pool : store_->Pools()) {
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

BlockShape ShapeOf(int32_t block_tokens) {
  return {kGeometry.layers, kBlocks * 16 / block_tokens, block_tokens, kGeometry.kv_heads,
          kGeometry.row_bytes()};
}

// Block ids in random order.
std::vector<int32_t> Scattered(const BlockShape& shape) {
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

// --- what is copied ------------------------------------------------------------------------------

struct CopyCase {
  BlockLayout layout;
  int32_t block_tokens, page_tokens;
  bool gpu;
  friend void PrintTo(const CopyCase& c, std::ostream* out) {
    *out << c.layout.name << ", blocks of " << c.block_tokens << ", pages of " << c.page_tokens
         << (c.gpu ? ", cudaIpc" : ", memfd");
  }
};
std::vector<CopyCase> CopyCases() {
  std::vector<CopyCase> cases;
  for (const BlockLayout& layout : kBlockLayouts) {
    for (const auto& [block, page] : {std::pair(16, 16), {8, 16}, {64, 16}, {16, 32}}) {
      for (const bool gpu : {false, true}) cases.push_back({layout, block, page, gpu});
    }
  }
  return cases;
}

class ImportedTensorsTest : public ::testing::TestWithParam<CopyCase> {};
INSTANTIATE_TEST_SUITE_P(All, ImportedTensorsTest, ::testing::ValuesIn(CopyCases()));

TEST_P(ImportedTensorsTest, ScatteredBlocksBecomePagesBitByBit) {
  const CopyCase& c = GetParam();
  ImporterOptions options;
  if (c.gpu) options.devices = {{&fake_gpu::Ops(), 0}};
  const BlockShape shape = ShapeOf(c.block_tokens);
  LentBlocks blocks(shape, c.layout);
  Lender lender(512, options, c.page_tokens);
  lender.RegisterAll(blocks, c.gpu);
  const std::vector<int32_t> at = Scattered(shape);
  constexpr int32_t kTokens = 640;
  blocks.Put(at, kTokens, RowOf);
  const std::vector<int32_t> ids = Ids(kTokens);
  const OpenedSequence s = lender.Open("full", ids);
  // In pieces of one to three blocks, as decoding fills them.
  for (int32_t b = 0, n = 0; b < kTokens / c.block_tokens; b += n) {
    n = std::min(b % 3 + 1, kTokens / c.block_tokens - b);
    const Status sealed = lender.Seal(
        s.sequence, static_cast<uint32_t>(b * c.block_tokens), {at.begin() + b, at.begin() + b + n},
        {ids.begin() + b * c.block_tokens, ids.begin() + (b + n) * c.block_tokens});
    ASSERT_TRUE(sealed.ok()) << sealed.ToString();
  }
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), static_cast<uint32_t>(kTokens));
  EXPECT_EQ(lender.Differing(s.sequence, kTokens), 0);
  EXPECT_EQ(lender.store().Show(s.sequence)->pages.front().tier, Tier::kHost);
  lender.ExpectClean();
}

TEST(ImporterTest, AnotherSessionFindsPagesAndIndex) {
  for (const char* plan : {"quest", "chess"}) {
    SCOPED_TRACE(plan);
    LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
    Lender lender;
    lender.RegisterAll(blocks);
    const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(1040);
    blocks.Put(at, 1040, RowOf);
    const OpenedSequence s = lender.Open(plan, ids);
    for (uint32_t first = 0; first < 1040; first += 208) {
      ASSERT_TRUE(lender
                      .Seal(s.sequence, first,
                            {at.begin() + first / 16, at.begin() + first / 16 + 13},
                            {ids.begin() + first, ids.begin() + first + 208})
                      .ok());
    }
    ASSERT_TRUE(lender.Settle(s.sequence).ok());
    uint64_t model = 0;
    const uint64_t other = lender.OpenSession(&model);
    const Result<OpenedSequence> hit = lender.store().OpenSequence(other, model, plan, ids);
    ASSERT_TRUE(hit.ok()) << hit.status().ToString();
    EXPECT_EQ(hit->held_tokens, 1024u);
    EXPECT_FALSE(hit->imported);
    EXPECT_EQ(lender.Differing(hit->sequence, 1024), 0);
    const IndexLayout index = IndexOf(hit->plan, kGeometry);
    const auto whole = static_cast<uint32_t>(1024 / index.block_tokens * index.block_tokens);
    EXPECT_EQ(hit->indexed_tokens, whole);
    // The index is what the segmenter makes of the same rows at once, incomplete blocks too.
    const SequenceDetail detail = *lender.store().Show(s.sequence);
    std::vector<std::byte*> pages, built;
    for (size_t i = 0; i < 65; ++i) {
      pages.push_back(const_cast<std::byte*>(lender.AddressOf(detail.pages[i])));
    }
    std::vector<std::vector<std::byte>> memory(
        static_cast<size_t>(index.BlocksFor(1040)),
        std::vector<std::byte>(static_cast<size_t>(index.block_bytes)));
    for (auto& block : memory) built.push_back(block.data());
    SequenceView view;
    view.pages = pages.data();
    view.index_blocks = built.data();
    view.tokens = 1040;
    SegmenterOf(hit->plan.segmenter)
        .Update(kGeometry, index, view, 0, 1040, Backends().front(), InlineExecutor());
    ASSERT_GE(detail.index_blocks.size(), built.size());
    for (size_t b = 0; b < built.size(); ++b) {
      EXPECT_EQ(std::memcmp(lender.AddressOf(detail.index_blocks[b]), built[b],
                            static_cast<size_t>(index.block_bytes)),
                0)
          << "index block " << b;
    }
    lender.ExpectClean();
  }
}

// Pages that the CPU cannot reach are filled through the host.
TEST(ImporterTest, SpillsToTheDevicePoolWhenHostIsFull) {
  LentBlocks blocks(ShapeOf(8), kBlockLayouts[1]);
  Lender lender(8);
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(320);
  blocks.Put(at, 320, RowOf);
  const OpenedSequence s = lender.Open("quest", ids);
  for (uint32_t first = 0; first < 320; first += 8) {
    ASSERT_TRUE(lender
                    .Seal(s.sequence, first, {at[first / 8]},
                          {ids.begin() + first, ids.begin() + first + 8})
                    .ok());
  }
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(lender.store().Show(s.sequence)->pages[19].tier, Tier::kDevice);
  EXPECT_EQ(lender.Differing(s.sequence, 320), 0);
  lender.ExpectClean();
}

TEST(ImporterTest, GoesOnBehindAPrefixHit) {
  LentBlocks blocks(ShapeOf(64), kBlockLayouts[0]);  // larger than a page: the hit ends inside one
  Lender lender;
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape());
  std::vector<int32_t> ids = Ids(128);
  blocks.Put(at, 128, RowOf);
  const OpenedSequence first = lender.Open("full", ids);
  ASSERT_TRUE(lender.Seal(first.sequence, 0, {at[0]}, {ids.begin(), ids.begin() + 64}).ok());
  ASSERT_TRUE(lender.Settle(first.sequence).ok());
  ids.resize(40);
  const OpenedSequence hit = lender.Open("full", ids);
  EXPECT_EQ(hit.held_tokens, 32u);
  ids = Ids(128);
  ASSERT_TRUE(lender.Seal(hit.sequence, 0, {at[0], at[1]}, ids).ok());
  ASSERT_TRUE(lender.Settle(hit.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(hit.sequence), 128u);
  EXPECT_EQ(lender.Differing(hit.sequence, 128), 0);
  // What contradicts the hit is another prompt's.
  const OpenedSequence again = lender.Open("full", Ids(40));
  std::vector<int32_t> wrong = Ids(64);
  wrong[31] = 7;
  EXPECT_EQ(lender.Seal(again.sequence, 0, {at[0]}, wrong).reason(), "BLOCKS_TOKENS");
  lender.ExpectClean();
}

// --- what is refused -----------------------------------------------------------------------------

TEST(ImporterTest, RefusesTensorsThatCannotBe) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]),
      open_ended(ShapeOf(16), kBlockLayouts[0], false);
  struct Case {
    const char* reason;
    std::string says;
    std::function<void(LentTensor*)> spoil;
  };
  const auto row = kGeometry.row_bytes();
  const Case cases[] = {
      {"TENSOR_DTYPE", "keys.dtype is 1", [](LentTensor* t) { t->layout.dtype = 1; }},
      {"TENSOR_SHAPE", "keys.heads is 3", [](LentTensor* t) { t->layout.heads = 3; }},
      {"TENSOR_SHAPE", "keys.head_dim is 128", [](LentTensor* t) { t->layout.head_dim = 128; }},
      {"TENSOR_SHAPE", "keys.blocks is 0", [](LentTensor* t) { t->layout.blocks = 0; }},
      {"TENSOR_SHAPE", "keys.blocks is -1", [](LentTensor* t) { t->layout.blocks = -1; }},
      {"TENSOR_SHAPE", "keys.block_tokens is 24",
       [](LentTensor* t) { t->layout.block_tokens = 24; }},
      {"TENSOR_SHAPE", "values.block_tokens is 16",
       [](LentTensor* t) { t->layout.block_tokens = 8; }},
      {"TENSOR_STRIDE", "keys.block_stride is -4096",
       [](LentTensor* t) { t->layout.block_stride = -4096; }},
      {"TENSOR_STRIDE", "keys.slot_stride is 127",
       [=](LentTensor* t) { t->layout.slot_stride = row - 1; }},
      {"TENSOR_STRIDE", "keys.head_stride is 129",
       [=](LentTensor* t) { t->layout.head_stride = row + 1; }},
      {"TENSOR_STRIDE", "keys.head_stride is 1099511627778",
       [](LentTensor* t) { t->layout.head_stride = (int64_t{1} << 40) + 2; }},
      {"TENSOR_OFFSET", "keys.offset is 18446744073709551614",
       [](LentTensor* t) { t->layout.offset = ~uint64_t{1}; }},
      {"TENSOR_OFFSET", "keys.offset is 1 ", [](LentTensor* t) { t->layout.offset = 1; }},
      {"TENSOR_OFFSET", "the memory's",
       [](LentTensor* t) {
         ++t->layout.blocks;
         t->layout.block_stride = int64_t{1} << 40;
       }},
      {"TENSOR_OFFSET", "the memory's",
       [&](LentTensor* t) { t->layout.offset = blocks.bytes() - 128; }},
      {"TENSOR_HANDLE", "bytes is 1000000000000",
       [](LentTensor* t) { t->handle.bytes = 1000000000000; }},
      {"TENSOR_HANDLE", "no memfd", [](LentTensor* t) { t->handle.fd = STDIN_FILENO; }},
      {"TENSOR_HANDLE", "F_SEAL_SHRINK", [&](LentTensor* t) { t->handle.fd = open_ended.fd(); }},
      {"TENSOR_KIND", "kind is 2", [](LentTensor* t) { t->handle.kind = TensorKind::kCudaFd; }},
  };
  Lender lender;
  for (const Case& c : cases) {
    LentTensor keys = TensorOf(blocks, 0, 0);
    c.spoil(&keys);
    const Status status =
        lender.lending()->Register(lender.model(), 0, keys, TensorOf(blocks, 0, 1));
    EXPECT_EQ(status.reason(), c.reason) << c.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
  const auto reg = [&](int32_t layer) {
    return lender.lending()->Register(lender.model(), layer, TensorOf(blocks, 0, 0),
                                      TensorOf(blocks, 0, 1));
  };
  EXPECT_EQ(reg(2).reason(), "TENSOR_LAYER");
  EXPECT_EQ(reg(-1).reason(), "TENSOR_LAYER");
  EXPECT_TRUE(reg(0).ok());
  EXPECT_EQ(reg(0).reason(), "TENSORS_REGISTERED");
  LentTensor foreign = fake_gpu::TensorOf(blocks, 0, 0);
  PeerIdentity stranger;
  stranger.uid = geteuid() + 1;
  const auto strangers = lender.importer().NewSession(lender.session(), 0, stranger);
  EXPECT_EQ(strangers->Register(lender.model(), 1, foreign, foreign).reason(), "TENSOR_IPC_USER");
  EXPECT_EQ(strangers->Register(99, 1, TensorOf(blocks, 0, 0), TensorOf(blocks, 0, 1)).reason(),
            "MODEL_UNKNOWN");
}

TEST(ImporterTest, RefusesBlocksThatCannotBe) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender;
  ASSERT_TRUE(lender.lending()
                  ->Register(lender.model(), 0, TensorOf(blocks, 0, 0), TensorOf(blocks, 0, 1))
                  .ok());
  const std::vector<int32_t> ids = Ids(64);
  const OpenedSequence s = lender.Open("full", ids);
  const std::vector<int32_t> one(ids.begin(), ids.begin() + 16);
  EXPECT_THAT(std::string(lender.Seal(s.sequence, 0, {0}, one).message()), HasSubstr("layer 1"));
  ASSERT_TRUE(lender.lending()
                  ->Register(lender.model(), 1, TensorOf(blocks, 1, 0), TensorOf(blocks, 1, 1))
                  .ok());
  EXPECT_EQ(lender.Seal(s.sequence, 0, {kBlocks}, one).reason(), "BLOCK_UNKNOWN");
  EXPECT_EQ(lender.Seal(s.sequence, 0, {-1}, one).reason(), "BLOCK_UNKNOWN");
  EXPECT_EQ(lender.Seal(s.sequence, 0, {0, 1}, one).reason(), "BLOCKS_TOKENS");
  EXPECT_EQ(lender.Seal(s.sequence, 16, {0}, one).reason(), "BLOCKS_OUT_OF_ORDER");
  EXPECT_EQ(lender.Seal(s.sequence, 8, {0}, one).reason(), "BLOCKS_OUT_OF_ORDER");
  EXPECT_EQ(lender.Seal(99, 0, {0}, one).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 0u);
  // The session may not do by itself what the daemon does for it.
  EXPECT_EQ(lender.store().Grow(lender.session(), s.sequence, 80, 0, 0).reason(),
            "SEQUENCE_IMPORTED");
  EXPECT_EQ(lender.store().Commit(lender.session(), s.sequence, 0, one, 0).reason(),
            "SEQUENCE_IMPORTED");
  EXPECT_EQ(lender.store().ForkSequence(lender.session(), s.sequence).status().reason(),
            "SEQUENCE_IMPORTED");
  lender.ExpectClean();
}

TEST(ImporterTest, SealedTwiceIsCopiedOnce) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender;
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(48);
  blocks.Put(at, 48, RowOf);
  const OpenedSequence s = lender.Open("full", ids);
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {at[0], at[1]}, {ids.begin(), ids.begin() + 32}).ok());
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  // The engine has its blocks back: what is in them now belongs to somebody else.
  std::memset(blocks.data(), 0xFF, blocks.bytes());
  blocks.Put({at[3], at[4], at[2]}, 48, RowOf);
  EXPECT_TRUE(lender.Seal(s.sequence, 0, {at[0], at[1]}, {ids.begin(), ids.begin() + 32}).ok());
  EXPECT_TRUE(lender.Seal(s.sequence, 16, {at[1], at[2]}, {ids.begin() + 16, ids.end()}).ok());
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 48u);
  EXPECT_EQ(lender.Differing(s.sequence, 48), 0);
  std::vector<int32_t> other(ids.begin() + 32, ids.end());
  other[5] = -3;
  const Status refused = lender.Seal(s.sequence, 32, {at[2]}, other);
  EXPECT_EQ(refused.reason(), "BLOCKS_TOKENS");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("position 37"));
}

// --- what fails, and who dies --------------------------------------------------------------------

TEST(ImporterTest, AFailedCopyIsToldOnceAndCanBeSealedAgain) {
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender(16);  // and 1 MiB of the device: 64 pages
  lender.RegisterAll(blocks);
  const std::vector<int32_t> at = Scattered(blocks.shape()), ids = Ids(kBlocks * 16);
  blocks.Put(at, kBlocks * 16, RowOf);
  const OpenedSequence s = lender.Open("full", {});
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {at[0]}, {ids.begin(), ids.begin() + 16}).ok());
  ASSERT_TRUE(
      lender.Seal(s.sequence, 16, {at.begin() + 1, at.end()}, {ids.begin() + 16, ids.end()}).ok());
  EXPECT_EQ(lender.Settle(s.sequence).reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 16u);
  lender.ExpectClean();
  ASSERT_TRUE(lender.Seal(s.sequence, 16, {at[1]}, {ids.begin() + 16, ids.begin() + 32}).ok());
  EXPECT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(*lender.lending()->Acknowledged(s.sequence), 32u);
  EXPECT_EQ(lender.Differing(s.sequence, 32), 0);
  lender.ExpectClean();
}

TEST(ImporterTest, TooManyWaitingBlocksAreRefused) {
  ImporterOptions options;
  options.waiting_tokens = 64;
  options.devices = {{&fake_gpu::Ops(), 0}};
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  Lender lender(512, options);
  lender.RegisterAll(blocks, true);
  const std::vector<int32_t> ids = Ids(80);
  blocks.Put({0, 1, 2, 3, 4}, 80, RowOf);
  const OpenedSequence s = lender.Open("full", ids);
  fake_gpu::copies.Shut();
  ASSERT_TRUE(lender.Seal(s.sequence, 0, {0, 1, 2, 3}, {ids.begin(), ids.begin() + 64}).ok());
  ASSERT_TRUE(fake_gpu::copies.AwaitSomebody());
  EXPECT_EQ(lender.Seal(s.sequence, 64, {4}, {ids.begin() + 64, ids.end()}).reason(),
            "IMPORT_QUEUE");
  fake_gpu::copies.Open();
  ASSERT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_TRUE(lender.Seal(s.sequence, 64, {4}, {ids.begin() + 64, ids.end()}).ok());
  EXPECT_TRUE(lender.Settle(s.sequence).ok());
  EXPECT_EQ(lender.Differing(s.sequence, 80), 0);
}

// In the middle of a copy: a close, then the death of the session.
TEST(ImporterTest, NothingLeaksWhenTheEngineGoesInTheMiddleOfACopy) {
  ImporterOptions options;
  options.devices = {{&fake_gpu::Ops(), 0}};
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
    Lender lender(512, options);
    lender.RegisterAll(blocks, true);
    const std::vector<int32_t> ids = Ids(160);
    blocks.Put(Scattered(blocks.shape()), 160, RowOf);
    const OpenedSequence s = lender.Open("quest", ids);
    fake_gpu::copies.Shut();
    ASSERT_TRUE(lender.Seal(s.sequence, 0, Ids(10, 0), ids).ok());
    ASSERT_TRUE(fake_gpu::copies.AwaitSomebody());
    std::promise<Status> settled;
    lender.lending()->Settle(s.sequence, [&](const Status& status) { settled.set_value(status); });
    if (dies) {
      lender.lending().reset();
      lender.store().EndSession(lender.session(), SessionEnd::kDied);
    } else {
      lender.lending()->Closed(s.sequence);
      EXPECT_TRUE(lender.store().CloseSequence(lender.session(), s.sequence).ok());
    }
    EXPECT_EQ(settled.get_future().get().reason(), "SEQUENCE_CLOSED");
    lender.ExpectClean();
    EXPECT_NE(lender.UsedBytes(), 0u) << "pages that are being written were freed";
    fake_gpu::copies.Open();
    const auto end = std::chrono::steady_clock::now() + 10s;
    while (lender.UsedBytes() != 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    EXPECT_EQ(lender.UsedBytes(), 0u);
    lender.ExpectClean();
  }
}

TEST(ImporterTest, AReleaseThatHangsHoldsNobodyUp) {
  ImporterOptions options;
  options.devices = {{&fake_gpu::Ops(), 0}};
  const int before = fake_gpu::open;
  LentBlocks blocks(ShapeOf(16), kBlockLayouts[0]);
  {
    Lender lender(512, options);
    lender.RegisterAll(blocks, true);
    EXPECT_EQ(fake_gpu::open, before + 1) << "one memory is opened once";
    fake_gpu::releases.Shut();
    lender.lending().reset();  // returns at once
    EXPECT_TRUE(fake_gpu::releases.AwaitSomebody());
    PeerIdentity peer;
    peer.uid = geteuid();
    lender.lending() = lender.importer().NewSession(lender.session(), 0, peer);
    lender.RegisterAll(blocks, true);
    const std::vector<int32_t> ids = Ids(16);
    blocks.Put({0}, 16, RowOf);
    const OpenedSequence s = lender.Open("full", ids);
    ASSERT_TRUE(lender.Seal(s.sequence, 0, {0}, ids).ok());
    EXPECT_TRUE(lender.Settle(s.sequence).ok());
  }
  fake_gpu::releases.Open();
}

class CountedMemory final : public TensorMemory {
 public:
  CountedMemory(Gate* gate, std::atomic<int>* gone) : gate_(gate), gone_(gone) {}
  ~CountedMemory() override {
    if (gate_ != nullptr) gate_->Pass();
    ++*gone_;
  }
  Status Read(std::span<const Piece>, std::byte*) override { return OkStatus(); }

 private:
  Gate* const gate_;
  std::atomic<int>* const gone_;
};

TEST(TensorReleasesTest, WhatHangsIsGivenUpAndTheRestGoesOn) {
  Gate gate;
  std::atomic<int> gone{0};
  TensorReleases releases(0ms);
  gate.Shut();
  releases.Put(new CountedMemory(&gate, &gone));
  ASSERT_TRUE(gate.AwaitSomebody());
  for (int i = 0; i < 3; ++i) releases.Put(new CountedMemory(nullptr, &gone));
  EXPECT_EQ(gone, 0);
  EXPECT_EQ(releases.pending(), 4u);
  while (releases.GiveUpLate() == 0) std::this_thread::yield();
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (gone < 3 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(gone, 3);
  gate.Open();
  releases.Await(end);
  EXPECT_EQ(releases.pending(), 0u);
  EXPECT_EQ(releases.GiveUpLate(), 0u);
}

}  // namespace
}  // namespace kvstrata
