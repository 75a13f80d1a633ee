// SPDX-License-Identifier: Apache-2.0
// Imported mode against a real daemon: an engine that keeps its keys and values in a memfd of its
// own lends it, seals blocks, and other engines go on from there with pages that the daemon owns.
#include <algorithm>
#include <cstring>
#include <random>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/lent_blocks.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr int32_t kBlocks = 80;

// An engine with tensors of its own.
class LendingEngine {
 public:
  LendingEngine(const std::string& socket, const BlockLayout& layout, int32_t block_tokens,
                ToyModel model = {})
      : engine_(Linked(), socket, std::move(model)),
        blocks_({engine_.model().layers, kBlocks * 16 / block_tokens, block_tokens,
                 engine_.model().kv_heads, engine_.model().dim * int64_t{4}},
                layout) {}

  int RegisterAll() {
    int code = engine_.code();
    for (int32_t layer = 0; code == KVS_OK && layer < engine_.model().layers; ++layer) {
      const kvs_memory_handle memory = Memory();
      const kvs_block_tensor keys = Tensor(layer, 0, &memory), values = Tensor(layer, 1, &memory);
      code = Linked().kvs_tensors_register(session(), engine_.handle(), layer, &keys, &values);
    }
    return code;
  }
  kvs_memory_handle Memory() const {
    kvs_memory_handle memory{};
    memory.size = sizeof(memory);
    memory.kind = KVS_MEMORY_MEMFD;
    memory.fd = blocks_.fd();
    memory.bytes = blocks_.bytes();
    return memory;
  }
  kvs_block_tensor Tensor(int32_t layer, int side, const kvs_memory_handle* memory) const {
    const BlockStrides s = blocks_.StridesOf(layer, side);
    const BlockShape& shape = blocks_.shape();
    kvs_block_tensor t{};
    t.size = sizeof(t);
    t.memory = memory;
    t.offset = static_cast<uint64_t>(s.offset);
    t.address = blocks_.data() + s.offset;
    t.dtype = KVS_F32;
    t.blocks = shape.blocks;
    t.block_tokens = shape.block_tokens;
    t.heads = shape.heads;
    t.head_dim = engine_.model().dim;
    t.block_stride = s.block;
    t.slot_stride = s.slot;
    t.head_stride = s.head;
    return t;
  }

  // Computes `ids` into blocks at[0], at[1], ...
  void Compute(const std::vector<int32_t>& ids, const std::vector<int32_t>& at) {
    blocks_.Put(at, static_cast<int32_t>(ids.size()), RowOf(ids));
  }
  LentBlocks::RowOf RowOf(const std::vector<int32_t>& ids) const {
    return [this, ids](int32_t layer, int side, int32_t head, int32_t p, std::byte* to) {
      const auto kind = side == 0 ? ToyModel::kKey : ToyModel::kValue;
      for (int c = 0; c < engine_.model().dim; ++c) {
        const float x = engine_.model().Element(kind, layer, ids[static_cast<size_t>(p)],
                                                static_cast<uint32_t>(p), head, c);
        std::memcpy(to + c * 4, &x, 4);
      }
    };
  }
  int Seal(kvs_sequence s, uint32_t first, const std::vector<int32_t>& at,
           const std::vector<int32_t>& ids) {
    return Linked().kvs_blocks_seal(session(), s, first, at.data(), at.size(), ids.data(),
                                    ids.size());
  }
  uint32_t Acknowledged(kvs_sequence s) {
    uint32_t tokens = ~0u;
    EXPECT_EQ(Linked().kvs_blocks_acknowledged(session(), s, &tokens), KVS_OK) << engine_.error();
    return tokens;
  }

  Engine& engine() { return engine_; }
  LentBlocks& blocks() { return blocks_; }
  kvs_session* session() { return engine_.session(); }

 private:
  Engine engine_;
  LentBlocks blocks_;
};

std::vector<int32_t> Shuffled(int32_t n, uint64_t seed) {
  std::vector<int32_t> at(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) at[static_cast<size_t>(i)] = i;
  std::shuffle(at.begin(), at.end(), std::mt19937_64(seed));
  return at;
}

class ImportedTest : public ::testing::TestWithParam<BlockLayout> {
 protected:
  DaemonProcess daemon_;
  const uint64_t seed_ = [] {
    const uint64_t seed = std::random_device{}();
    std::printf("seed %lu\n", seed);
    return seed;
  }();
};
std::string CaseName(const ::testing::TestParamInfo<BlockLayout>& at) { return at.param.name; }
INSTANTIATE_TEST_SUITE_P(All, ImportedTest, ::testing::ValuesIn(kBlockLayouts), CaseName);

// The same prompt under the same plan, imported and owned: every output of every layer has the same
// bits, and is right where the plan attends everything.
TEST_P(ImportedTest, OthersGoOnAsFromPagesOfTheirOwn) {
  for (const char* plan : {"full", "quest{budget = 128, min_tokens = 0}"}) {
    SCOPED_TRACE(plan);
    const std::vector<int32_t> prompt = Prompt(1040, 5);
    ToyModel owned_model, lent_model;
    owned_model.digest = std::string("owned ") + plan;  // pages of one are not found by the other
    lent_model.digest = std::string("lent ") + plan;
    LendingEngine lender(daemon_.socket(), GetParam(), 16, lent_model);
    ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();
    uint32_t held = 1;
    const kvs_sequence s = lender.engine().Open(plan, prompt, &held);
    ASSERT_NE(s, 0u) << lender.engine().error();
    EXPECT_EQ(held, 0u);
    const std::vector<int32_t> at = Shuffled(kBlocks, seed_);
    lender.Compute(prompt, at);
    for (uint32_t first = 0; first < 1040; first += 80) {
      ASSERT_EQ(lender.Seal(s, first, {at.begin() + first / 16, at.begin() + first / 16 + 5},
                            {prompt.begin() + first, prompt.begin() + first + 80}),
                KVS_OK)
          << lender.engine().error();
    }
    ASSERT_EQ(Linked().kvs_settle(lender.session(), s), KVS_OK) << lender.engine().error();
    EXPECT_EQ(lender.Acknowledged(s), 1040u);
    lender.blocks().Poison();  // acknowledged: the engine's again

    Engine reader(Linked(), daemon_.socket(), lent_model),
        owner(Linked(), daemon_.socket(), owned_model);
    const kvs_sequence r = reader.Open(plan, prompt, &held);
    ASSERT_NE(r, 0u) << reader.error();
    EXPECT_EQ(held, 1024u);
    const kvs_sequence o = owner.Open(plan, prompt);
    ASSERT_NE(o, 0u) << owner.error();
    owner.Run(o, {prompt.begin(), prompt.begin() + 1024}, 0);
    ASSERT_EQ(owner.code(), KVS_OK) << owner.error();
    std::vector<int32_t> history(prompt.begin(), prompt.begin() + 1024);
    std::vector<int32_t> rest(prompt.begin() + 1024, prompt.end());
    for (int i = 0; i < 3; ++i) {
      const auto got = reader.Run(r, rest, static_cast<uint32_t>(history.size()));
      const auto want = owner.Run(o, rest, static_cast<uint32_t>(history.size()));
      ASSERT_FALSE(got.empty()) << reader.error();
      EXPECT_EQ(got, want) << "step " << i;
      history.insert(history.end(), rest.begin(), rest.end());
      rest = {1000 + i};
      if (i == 0) {
        ASSERT_EQ(Linked().kvs_prefill_done(reader.session(), r), KVS_OK);
        ASSERT_EQ(Linked().kvs_prefill_done(owner.session(), o), KVS_OK);
      }
    }
    if (std::strcmp(plan, "full") == 0) {
      EXPECT_TRUE(reader.DecodesRight(r, &history, 77));
    }
  }
  EXPECT_EQ(Operator(daemon_.socket()).Audit(), "");
}

// What is held comes back into the blocks of an engine that has not computed it.
TEST_P(ImportedTest, HeldTokensAreLoadedIntoBlocks) {
  const std::vector<int32_t> prompt = Prompt(200, 6);
  {
    Engine owner(Linked(), daemon_.socket());
    ASSERT_NE(owner.Prefill("full", prompt), 0u) << owner.error();
  }
  LendingEngine lender(daemon_.socket(), GetParam(), 32);
  ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();
  uint32_t held = 0;
  const kvs_sequence s = lender.engine().Open("full", prompt, &held);
  ASSERT_EQ(held, 192u);
  const std::vector<int32_t> at = Shuffled(kBlocks / 2, seed_);
  ASSERT_EQ(Linked().kvs_blocks_load(lender.session(), s, 0, at.data(), 6, nullptr), KVS_OK)
      << lender.engine().error();
  EXPECT_EQ(lender.blocks().Differing(at, 192, lender.RowOf(prompt)), 0);
  EXPECT_NE(lender.blocks().Differing(at, 200, lender.RowOf(prompt)), 0)
      << "is it compared at all?";
  // A part of it, into other blocks; nothing else is written.
  lender.blocks().Poison();
  ASSERT_EQ(Linked().kvs_blocks_load(lender.session(), s, 64, at.data() + 2, 1, nullptr), KVS_OK);
  std::vector<std::byte> after(lender.blocks().data(),
                               lender.blocks().data() + lender.blocks().bytes());
  const auto written =
      std::count_if(after.begin(), after.end(), [](std::byte b) { return b != std::byte{0xFF}; });
  EXPECT_LE(static_cast<size_t>(written), size_t{32} * 2 * 2 * 2 * 256);
  EXPECT_GT(written, 0);
  EXPECT_EQ(Linked().kvs_blocks_load(lender.session(), s, 16, at.data(), 1, nullptr),
            KVS_INVALID_ARGUMENT);
  EXPECT_EQ(Linked().kvs_blocks_load(lender.session(), s, 224, at.data(), 1, nullptr),
            KVS_INVALID_ARGUMENT);
  const int32_t none = kBlocks / 2;
  EXPECT_EQ(Linked().kvs_blocks_load(lender.session(), s, 0, &none, 1, nullptr),
            KVS_INVALID_ARGUMENT);
}

using ImportedOnceTest = ImportedTest;
INSTANTIATE_TEST_SUITE_P(One, ImportedOnceTest, ::testing::Values(kBlockLayouts[0]));

TEST_P(ImportedOnceTest, WhatCannotBeIsRefusedByFieldAndValue) {
  LendingEngine lender(daemon_.socket(), GetParam(), 16);
  const auto refused = [&](const std::function<void(kvs_block_tensor*, kvs_memory_handle*)>& spoil,
                           const char* reason, const char* says) {
    kvs_memory_handle memory = lender.Memory();
    kvs_block_tensor keys = lender.Tensor(0, 0, &memory), values = lender.Tensor(0, 1, &memory);
    spoil(&values, &memory);
    EXPECT_NE(Linked().kvs_tensors_register(lender.session(), lender.engine().handle(), 0, &keys,
                                            &values),
              KVS_OK);
    EXPECT_STREQ(Linked().kvs_error_reason(), reason) << Linked().kvs_error_message();
    EXPECT_NE(std::strstr(Linked().kvs_error_message(), says), nullptr)
        << Linked().kvs_error_message();
  };
  refused([](auto* t, auto*) { t->size = 8; }, "STRUCT_SIZE", "kvs_block_tensor.size 8");
  refused([](auto* t, auto*) { t->memory = nullptr; }, "ARGUMENT_NULL", "values.memory");
  refused([](auto*, auto* m) { m->kind = 9; }, "TENSOR_KIND", "kind is 9");
  refused([](auto*, auto* m) { m->fd = -1; }, "TENSOR_HANDLE", "fd is -1");
  refused([](auto*, auto* m) { m->fd = 1000; }, "TENSOR_HANDLE", "fd is 1000");
  refused([](auto*, auto* m) { m->fd = STDOUT_FILENO; }, "TENSOR_HANDLE", "no memfd");
  refused([](auto*, auto* m) { m->bytes = 0; }, "TENSOR_OFFSET", "the memory's 0 bytes");
  refused([](auto*, auto* m) { m->bytes += 1; }, "TENSOR_HANDLE", "the memfd has");
  refused([](auto*, auto* m) { m->kind = KVS_MEMORY_CUDA_IPC; }, "TENSOR_KIND", "kind is 3");
  refused([](auto* t, auto*) { t->slot_stride = 1; }, "TENSOR_STRIDE", "values.slot_stride is 1;");
  refused([](auto* t, auto*) { t->offset += uint64_t{1} << 40; }, "TENSOR_OFFSET",
          "values.offset is");
  refused([](auto* t, auto*) { t->blocks = 8 * kBlocks; }, "TENSOR_OFFSET", "inside the memory");
  refused([](auto* t, auto*) { t->dtype = KVS_BF16; }, "TENSOR_DTYPE", "values.dtype is 3");
  ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();

  const std::vector<int32_t> prompt = Prompt(64, 1);
  const kvs_sequence s = lender.engine().Open("full", prompt);
  ASSERT_NE(s, 0u);
  EXPECT_EQ(lender.engine().Begin(s, {1}), nullptr);
  EXPECT_STREQ(Linked().kvs_error_reason(), "SEQUENCE_IMPORTED");
  kvs_sequence child = 0;
  EXPECT_NE(Linked().kvs_sequence_fork(lender.session(), s, &child), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "SEQUENCE_IMPORTED");
  EXPECT_NE(lender.Seal(s, 16, {0}, {prompt.begin(), prompt.begin() + 16}), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "BLOCKS_OUT_OF_ORDER");
  EXPECT_NE(lender.Seal(s, 0, {kBlocks}, {prompt.begin(), prompt.begin() + 16}), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "BLOCK_UNKNOWN");
  EXPECT_EQ(Linked().kvs_ping(lender.session()), KVS_OK) << "it costs nobody the session";
}

// A build takes its turn behind the copies, and who opens that plan finds it.
TEST_P(ImportedOnceTest, AnIndexIsBuiltOverWhatWasImported) {
  const std::vector<int32_t> prompt = Prompt(1040, 7);
  LendingEngine lender(daemon_.socket(), GetParam(), 16);
  ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();
  const kvs_sequence s = lender.engine().Open("full", prompt);
  const std::vector<int32_t> at = Shuffled(kBlocks, seed_);
  lender.Compute(prompt, at);
  ASSERT_EQ(lender.Seal(s, 0, {at.begin(), at.begin() + 65}, prompt), KVS_OK);
  const char* const plan = "quest{budget = 128, min_tokens = 0}";
  kvs_build_result built{};
  built.size = sizeof(built);
  ASSERT_EQ(Linked().kvs_sequence_build(lender.session(), s, plan, &built), KVS_OK)
      << lender.engine().error();
  EXPECT_EQ(built.built_blocks, 2u);
  EXPECT_EQ(built.indexed_tokens, 1024u);
  Engine reader(Linked(), daemon_.socket());
  const kvs_sequence r = reader.Open(plan, prompt);
  ASSERT_EQ(Linked().kvs_sequence_build(reader.session(), r, nullptr, &built), KVS_OK);
  EXPECT_EQ(built.built_blocks, 0u);
  EXPECT_EQ(built.indexed_tokens, 1024u);
  EXPECT_EQ(Operator(daemon_.socket()).Audit(), "");
}

// Reported series and the end of the prompt come behind the copies.
TEST_P(ImportedOnceTest, ThePromptEndsBehindItsCopies) {
  LendingEngine lender(daemon_.socket(), GetParam(), 16);
  ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();
  const std::vector<int32_t> prompt = Prompt(1024, 2), at = Shuffled(kBlocks, seed_);
  lender.Compute(prompt, at);
  const kvs_sequence s = lender.engine().Open("full", prompt);
  ASSERT_EQ(lender.Seal(s, 0, {at.begin(), at.begin() + 64}, prompt), KVS_OK);
  ASSERT_EQ(Linked().kvs_prefill_done(lender.session(), s), KVS_OK);
  ASSERT_EQ(Linked().kvs_settle(lender.session(), s), KVS_OK) << lender.engine().error();
  const std::vector<float> surprisal(1024, 1.5f);
  ASSERT_EQ(Linked().kvs_report(lender.session(), s, 0, 1024, surprisal.data(), nullptr, nullptr),
            KVS_OK);
  ASSERT_EQ(Linked().kvs_settle(lender.session(), s), KVS_OK) << lender.engine().error();
  EXPECT_EQ(Operator(daemon_.socket()).Show(s).sequence().prompt_tokens(), 1024u);
  EXPECT_EQ(Linked().kvs_prefill_done(lender.session(), s), KVS_OK);  // an event: told later
  EXPECT_NE(Linked().kvs_settle(lender.session(), s), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "PREFILL_DONE");
}

// As any pages, they are on disk a moment later and outlive the daemon.
TEST(ImportedDiskTest, TheNextDaemonHoldsWhatWasImported) {
  const ScratchDir folder;
  const std::vector<std::string> flags = {
      "--set", "disk.path=" + folder / "tier", "--set", "disk.budget_bytes=64MiB",
      "--set", "disk.segment_bytes=1MiB",      "--set", "disk.load_timeout=60s"};
  std::vector<int32_t> prompt = Prompt(640, 9);
  {
    DaemonProcess daemon(flags);
    LendingEngine lender(daemon.socket(), kBlockLayouts[1], 32);
    ASSERT_EQ(lender.RegisterAll(), KVS_OK) << lender.engine().error();
    const std::vector<int32_t> at = Shuffled(kBlocks / 2, 4);
    lender.Compute(prompt, at);
    const kvs_sequence s = lender.engine().Open("quest", prompt);
    ASSERT_EQ(lender.Seal(s, 0, {at.begin(), at.begin() + 20}, prompt), KVS_OK);
    ASSERT_EQ(Linked().kvs_settle(lender.session(), s), KVS_OK) << lender.engine().error();
    Operator admin(daemon.socket());
    // 40 pages and the index block of the first 512 tokens.
    ASSERT_TRUE(Eventually([&] { return admin.Status().disks(0).written() >= 41; }));
    daemon.Stop(SIGKILL);
  }
  DaemonProcess daemon(flags);
  Engine reader(Linked(), daemon.socket());
  uint32_t held = 0;
  const kvs_sequence r = reader.Open("full", prompt, &held);
  ASSERT_NE(r, 0u) << reader.error();
  EXPECT_EQ(held, 624u);
  const std::vector<int32_t> rest(prompt.begin() + held, prompt.end());
  ASSERT_FALSE(reader.Run(r, rest, held).empty()) << reader.error();
  EXPECT_TRUE(reader.DecodesRight(r, &prompt, 5));
}

const bool kSealsAndWaits = RegisterRole("seals", [](const std::string& socket, int seed) {
  LendingEngine lender(socket, kBlockLayouts[seed % std::size(kBlockLayouts)], 16);
  if (lender.RegisterAll() != KVS_OK) return 1;
  const std::vector<int32_t> prompt = Prompt(kBlocks * 16, seed), at = Shuffled(kBlocks, 1);
  lender.Compute(prompt, at);
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> other = prompt;
    other[0] = i;
    const kvs_sequence s = lender.engine().Open("quest", other);
    if (s == 0 || lender.Seal(s, 0, at, other) != KVS_OK) return 2;
    if (i == 0) Say('s');
  }
  Say('e');
  pause();
  return 0;
});

// kill -9 while the daemon copies: at a different place each time, as the machine happens to run.
TEST_P(ImportedOnceTest, KilledInTheMiddleOfCopiesNothingLeaks) {
  Operator admin(daemon_.socket());
  for (int cycle = 0; cycle < 12; ++cycle) {
    SCOPED_TRACE(cycle);
    ClientProcess client("seals", daemon_.socket(), cycle);
    ASSERT_TRUE(client.Says('s'));
    const bool all = cycle % 3 == 2;
    EXPECT_TRUE(!all || client.Says('e'));
    client.Kill();
    EXPECT_EQ(admin.Audit(), "");
  }
  EXPECT_TRUE(Eventually([&] { return admin.UsedBytes() == 0; })) << admin.UsedBytes();
  EXPECT_TRUE(Eventually([&] { return admin.RetiredBytes() == 0; }));
  EXPECT_EQ(admin.Audit(), "");
  // What was committed before is right.
  Engine reader(Linked(), daemon_.socket());
  std::vector<int32_t> prompt = Prompt(kBlocks * 16, 2);
  prompt[0] = 0;
  uint32_t held = 0;
  const kvs_sequence r = reader.Open("full", prompt, &held);
  ASSERT_NE(r, 0u) << reader.error();
  std::printf("%u of %zu tokens were copied\n", held, prompt.size());
  // Keys are of (token, position): those of token 0 were computed for another id.
  if (held == 0) return;
  prompt.resize(held);
  const std::vector<kvs_page> pages = [&] {
    std::vector<kvs_page> all(held / 16);
    size_t n = 0;
    EXPECT_EQ(Linked().kvs_page_table(reader.session(), r, all.data(), all.size(), &n, nullptr),
              KVS_OK);
    return all;
  }();
  for (uint32_t p = 1; p < held; p += 37) {
    const auto* row = static_cast<const float*>(pages[p / 16].address) + (p % 16) * 64;
    EXPECT_EQ(row[5], reader.model().Element(ToyModel::kKey, 0, prompt[p], p, 0, 5)) << p;
  }
}

}  // namespace
}  // namespace kvstrata::testing
