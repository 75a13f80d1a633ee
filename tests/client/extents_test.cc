// SPDX-License-Identifier: Apache-2.0
// Extents as the linked transport sees them, over a daemon in this process whose codec copies rows
// (tests/fakes/copying_codec.h): mapped read-only, checked, unchanged under a parked reader.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "client/linked/linked_session.h"
#include "server/attach/attach_server.h"
#include "server/store/store_parts.h"
#include "server/work/recompress.h"
#include "tests/fakes/copying_codec.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata {

struct AuditTestPeer {
  static kvstrata::Sequence& SequenceOf(Store& store, uint64_t id) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return *store.parts_->catalog.SequenceOf(id);
  }
};

namespace client {
namespace {

using kvstrata::testing::CodecControl;
using kvstrata::testing::CopyingCodec;
using namespace std::chrono_literals;

constexpr int64_t kRow = 128;  // one layer, one head, 64 x bf16: what the codec copies is a row

std::vector<int32_t> Ids(int n, int first = 0) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = first + i;
  return ids;
}

// The key of a token: bf16 numbers that name its position.
std::vector<uint16_t> KeyOf(int position) {
  std::vector<uint16_t> key(64);
  for (size_t c = 0; c < key.size(); ++c) {
    key[c] = static_cast<uint16_t>(0x3F00 + (static_cast<size_t>(position) * 7 + c) % 128);
  }
  return key;
}

class ExtentsTest : public ::testing::Test {
 protected:
  ~ExtentsTest() override {
    control_->Hold(false);
    session_.reset();
    server_.reset();
    work_.reset();
    store_.reset();
  }

  void SetUp() override {
    StoreOptions options;
    options.device_bytes = options.host_bytes = uint64_t{8} << 20;
    options.arena_bytes = 256 << 10;
    options.new_recompressor = [this](const Plan&, const Geometry& geometry, ParametersPtr) {
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    store_ = std::move(Store::Create(options)).value();
    work_ = std::make_unique<RecompressQueue>(WorkOptions{}, store_.get(), &Backends().front());
    auto listener = UnixListener::Listen(directory_ / "k.attach", SOCK_SEQPACKET, -1);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    kvstrata::AttachOptions attach;
    attach.backend = "ref";
    attach.settle_timeout = settle_timeout_;
    server_ = std::move(AttachServer::Start(attach, std::move(*listener), store_.get())).value();
    Attach();
  }

  // As Session::Attach, with the state in reach.
  void Attach(std::chrono::milliseconds timeout = 5000ms) {
    session_.reset();
    auto state = std::make_unique<Session::State>();
    state->options.socket = directory_ / "k";
    state->options.client_name = "extents_test";
    state->options.timeout = timeout;
    auto connection = Connection::Dial(state->options.socket, "", "extents_test",
                                       state->options.timeout, &state->arenas);
    ASSERT_TRUE(connection.ok()) << connection.status().ToString();
    state->connection = std::move(*connection);
    state->backend = *FindBackend("ref");
    state->executor = &InlineExecutor();
    state->ring = std::make_unique<RingClient>(state->connection.get(), state->options.timeout);
    state->OpenTables();
    state_ = state.get();
    session_ = std::make_unique<Session>(std::move(state));
    ModelSpec model;
    model.name = "small";
    model.digest = "digest";
    model.geometry = {1, 2, 1, 64, 16, DType::kBF16};
    const Result<uint64_t> handle = session_->RegisterModel(model);
    ASSERT_TRUE(handle.ok()) << handle.status().ToString();
    model_ = *handle;
  }

  uint64_t Open(KeepRaw keep) {
    const Result<Opened> opened = session_->Open(model_, "window", {}, {});
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    AuditTestPeer::SequenceOf(*store_, opened->sequence).plan.stored.keep_raw = keep;
    return opened->sequence;
  }
  // One step of `n` tokens, without attention.
  Status Append(uint64_t sequence, int n) {
    const int first = static_cast<int>(*session_->Tokens(sequence));
    const std::vector<int32_t> ids = Ids(n, first);
    const BatchMember member{sequence, ids};
    int32_t code = 0;
    KVS_ASSIGN_OR_RETURN(auto step, session_->StepBegin({&member, 1}, nullptr, &code));
    KVS_RETURN_IF_ERROR(Write(step.get(), first, n));
    return step->End(nullptr);
  }
  static Status Write(SessionStep* step, int first, int n) {
    std::vector<uint16_t> rows;
    for (int t = first; t < first + n; ++t) {
      const std::vector<uint16_t> key = KeyOf(t);
      rows.insert(rows.end(), key.begin(), key.end());
    }
    const Rows in{reinterpret_cast<const std::byte*>(rows.data()), kRow, kRow, DType::kBF16};
    return step->Append(0, in, in);
  }

  std::shared_ptr<Sequence> Find(uint64_t sequence) { return *state_->Find(sequence); }
  // Each token below `tokens` is on a page, or in an extent, or both; all say what it is.
  static void ExpectHeld(const SequenceView& view, int tokens) {
    for (int t = 0; t < tokens; ++t) {
      const std::vector<uint16_t> key = KeyOf(t);
      int places = 0;
      if (const std::byte* page = view.pages[t / 16]; page != nullptr) {
        ASSERT_EQ(std::memcmp(page + t % 16 * kRow, key.data(), kRow), 0) << "page, token " << t;
        ++places;
      }
      for (int i = 0; i < view.extent_count; ++i) {
        const ExtentView& e = view.extents[i];
        if (t < e.tokens.begin || t >= e.tokens.end) continue;
        const std::byte* at = e.data + sizeof(ExtentHeader) + (t - e.tokens.begin) * kRow;
        ASSERT_EQ(std::memcmp(at, key.data(), kRow), 0) << "extent " << i << ", token " << t;
        ++places;
      }
      ASSERT_GT(places, 0) << "token " << t << " is nowhere";
    }
  }
  void ExpectClean() {
    for (const std::string& finding : store_->inspection().Audit().findings)
      ADD_FAILURE() << finding;
  }
  uint64_t Retired() {
    uint64_t bytes = 0;
    for (const PoolInfo& pool : store_->inspection().Pools()) bytes += pool.retired_bytes;
    return bytes;
  }

  std::chrono::microseconds settle_timeout_{60'000'000};
  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  const ScratchDir directory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<RecompressQueue> work_;
  std::unique_ptr<AttachServer> server_;
  std::unique_ptr<Session> session_;
  Session::State* state_ = nullptr;
  uint64_t model_ = 0;
};

TEST_F(ExtentsTest, AViewHasThemAndItsGivenBackPagesAreNull) {
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  ASSERT_TRUE(session_->Settle(id).ok());
  const auto s = Find(id);
  const SequenceView view = s->View();
  EXPECT_EQ(view.tokens, 100);
  ASSERT_EQ(view.extent_count, 3);
  EXPECT_EQ(view.extents[2].tokens, (kvstrata::Run{64, 96}));
  EXPECT_EQ(view.extents[2].bytes,
            static_cast<int64_t>(sizeof(ExtentHeader)) + 32 * kRow + kExtentAlign);
  EXPECT_EQ(view.version, s->table.table->version);
  EXPECT_EQ(view.pages[5], nullptr);
  EXPECT_NE(view.pages[6], nullptr);
  ExpectHeld(view, 100);

  const Result<PageTable> table = session_->GetPageTable(id);
  ASSERT_TRUE(table.ok());
  ASSERT_EQ(table->pages.size(), 7u);
  EXPECT_EQ(table->pages[0].address, nullptr);
  EXPECT_EQ(table->pages[0].flags, uint32_t{shm::kPageAbsent});
  EXPECT_NE(table->pages[6].address, nullptr);
  ExpectClean();
}

TEST_F(ExtentsTest, RawPagesOnHostStayInTheView) {
  const uint64_t id = Open(KeepRaw::kHost);
  ASSERT_TRUE(Append(id, 100).ok());
  ASSERT_TRUE(session_->Settle(id).ok());
  const SequenceView view = Find(id)->View();
  EXPECT_EQ(view.extent_count, 3);
  for (int i = 0; i < 7; ++i) ASSERT_NE(view.pages[i], nullptr) << i;
  ExpectHeld(view, 100);
  EXPECT_EQ(session_->GetPageTable(id)->pages[0].tier, 1u);
}

TEST_F(ExtentsTest, StepsForksAndPrivateCopiesGoOnWithHoles) {
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  ASSERT_TRUE(session_->Settle(id).ok());
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Append(id, 1).ok()) << i;
  ASSERT_TRUE(Append(id, 300).ok());  // beyond the table's room
  const Result<Opened> child = session_->Fork(id);
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  ASSERT_TRUE(Append(id, 20).ok());
  ASSERT_TRUE(Append(child->sequence, 20).ok());
  // A fork inside an open step: the parent's page becomes private while it is written.
  const std::vector<int32_t> ids = Ids(5, 470);
  const BatchMember member{id, ids};
  int32_t code = 0;
  auto step = session_->StepBegin({&member, 1}, nullptr, &code);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  ASSERT_TRUE(Write(step->get(), 470, 5).ok());
  const Result<Opened> second = session_->Fork(id);
  ASSERT_TRUE(second.ok()) << second.status().ToString();
  ASSERT_TRUE((*step)->End(nullptr).ok());
  step->reset();
  for (const uint64_t each : {id, child->sequence, second->sequence}) {
    ASSERT_TRUE(session_->Settle(each).ok());
    const auto tokens = static_cast<int>(*session_->Tokens(each));
    EXPECT_EQ(tokens, each == id ? 475 : 470);
    ExpectHeld(Find(each)->View(), tokens);
  }
  ExpectClean();
}

TEST_F(ExtentsTest, AParkedReaderSeesItsBytesThroughManyRecompressions) {
  control_->unit = 16;
  control_->merge = true;  // each run replaces the extent and releases pages
  const uint64_t id = Open(KeepRaw::kNo), other = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  ASSERT_TRUE(session_->Settle(id).ok());
  const std::vector<int32_t> ids = Ids(1, 100);
  const BatchMember member{id, ids};
  int32_t code = 0;
  auto step = session_->StepBegin({&member, 1}, nullptr, &code);
  ASSERT_TRUE(step.ok());
  const SequenceView view = Find(id)->View();  // as the step sees it
  ASSERT_EQ(view.extent_count, 1);
  const std::vector<std::byte> before(view.extents[0].data,
                                      view.extents[0].data + view.extents[0].bytes);
  // The sequence itself cannot commit meanwhile; its moves and another one's recompressions can.
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(Append(other, 16).ok());
    ASSERT_TRUE(session_->Settle(other).ok());
  }
  EXPECT_GT(Retired(), uint64_t{40} * 4096);
  EXPECT_EQ(std::memcmp(before.data(), view.extents[0].data, before.size()), 0);
  ExpectHeld(view, 100);
  ASSERT_TRUE(Write(step->get(), 100, 1).ok());
  ASSERT_TRUE((*step)->End(nullptr).ok());
  step->reset();
  store_->references().Reclaim();
  EXPECT_EQ(Retired(), 0u);
  ASSERT_TRUE(session_->Settle(id).ok());
  ExpectHeld(Find(id)->View(), 101);
  ExpectHeld(Find(other)->View(), 640);
  ExpectClean();
}

// A step that began before its own sequence was recompressed, several times.
TEST_F(ExtentsTest, AnOpenStepStaysOnItsVersion) {
  control_->unit = 16;
  control_->merge = true;
  const uint64_t id = Open(KeepRaw::kNo);
  control_->Hold(true);
  ASSERT_TRUE(Append(id, 100).ok());
  const std::vector<int32_t> ids = Ids(1, 100);
  const BatchMember member{id, ids};
  int32_t code = 0;
  auto step = session_->StepBegin({&member, 1}, nullptr, &code);
  ASSERT_TRUE(step.ok());
  const SequenceView view = Find(id)->View();
  ASSERT_EQ(view.extent_count, 0);
  control_->Hold(false);
  const auto settled = std::chrono::steady_clock::now() + 20s;
  while (store_->inspection().Show(id)->info.absent_pages != 6) {
    ASSERT_LT(std::chrono::steady_clock::now(), settled);
    std::this_thread::sleep_for(1ms);
  }
  ExpectHeld(view, 100);  // on raw pages that nobody else has any more
  EXPECT_GE(Retired(), uint64_t{6} * 4096);
  ASSERT_TRUE(Write(step->get(), 100, 1).ok());
  ASSERT_TRUE((*step)->End(nullptr).ok());
  step->reset();
  ASSERT_TRUE(session_->Settle(id).ok());
  ExpectHeld(Find(id)->View(), 101);
  EXPECT_EQ(Find(id)->View().pages[0], nullptr);
  ExpectClean();
}

TEST_F(ExtentsTest, TablesThatBreakBoundsAreErrors) {
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  ASSERT_TRUE(session_->Settle(id).ok());
  kvstrata::Sequence& inside = AuditTestPeer::SequenceOf(*store_, id);
  shm::SequenceTable* const table = inside.table;
  shm::ExtentEntry* const extents = shm::Extents(table);
  const auto refused = [&] {
    ++table->version;  // or it would not look again
    return session_->GetPageTable(id).status().reason();
  };
  EXPECT_EQ(refused(), "");
  const shm::ExtentEntry sound = extents[1];
  const auto with = [&](auto change) {
    change(&extents[1]);
    const std::string reason = refused();
    extents[1] = sound;
    return reason;
  };
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->offset = uint64_t{1} << 40; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->bytes = uint64_t{1} << 40; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->bytes = ~uint64_t{0} - 4096; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->offset = ~uint64_t{7}; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->bytes = 0; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->offset += 4; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->begin = -1; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->end = e->begin - 1; }), "TABLE_INVALID");
  EXPECT_EQ(with([](shm::ExtentEntry* e) { e->begin = 90, e->end = 95; }), "TABLE_INVALID");
  table->extent_count = 1 << 30;
  EXPECT_EQ(refused(), "TABLE_INVALID");
  table->extent_count = 3;
  EXPECT_EQ(refused(), "");
  inside.version = table->version;
  ExpectHeld(Find(id)->View(), 100);
}

TEST_F(ExtentsTest, SettleKeepsTheCallersTimeoutAndTheRingGoesOn) {
  Attach(300ms);
  control_->Hold(true);
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  EXPECT_EQ(session_->Settle(id).code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(session_->Ping().ok()) << "the attach loop waits for nobody";
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Append(id, 1).ok());
  control_->Hold(false);
  // Answers to earlier ones come late: they must not be taken for this one's.
  while (!session_->Settle(id).ok()) {
  }
  ExpectHeld(Find(id)->View(), 200);
  EXPECT_EQ(Find(id)->View().extent_count, 6);
  ExpectClean();
}

class SettleTimeoutTest : public ExtentsTest {
 protected:
  SettleTimeoutTest() { settle_timeout_ = std::chrono::milliseconds(50); }
};

TEST_F(SettleTimeoutTest, TheDaemonHasADeadlineOfItsOwn) {
  control_->Hold(true);
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  EXPECT_EQ(session_->Settle(id).reason(), "SETTLE_TIMEOUT");
  control_->Hold(false);
  while (session_->Settle(id).reason() == "SETTLE_TIMEOUT") {
  }
  EXPECT_EQ(Find(id)->View().extent_count, 3);
  ExpectClean();
}

TEST_F(ExtentsTest, AFailureOfTheCodecIsTheAnswer) {
  control_->Fail(Status(Code::kDataLoss, "KEYS_NOT_FINITE", "a key is NaN"));
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  EXPECT_EQ(session_->Settle(id).reason(), "KEYS_NOT_FINITE");
  ASSERT_TRUE(Append(id, 1).ok());
  EXPECT_EQ(Find(id)->View().extent_count, 0);
}

TEST_F(ExtentsTest, AClientThatGoesTakesItsWorkAlong) {
  Attach(300ms);
  control_->Hold(true);
  const uint64_t id = Open(KeepRaw::kNo);
  ASSERT_TRUE(Append(id, 100).ok());
  EXPECT_EQ(session_->Settle(id).code(), Code::kDeadlineExceeded);  // its answer is still to come
  session_.reset();  // detaches; what runs is cancelled, though it is held
  const auto end = std::chrono::steady_clock::now() + 20s;
  for (uint64_t used = 1; used != 0;) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    (void)store_->eviction().Evict(false);
    store_->references().Reclaim();
    used = 0;
    for (const PoolInfo& pool : store_->inspection().Pools())
      used += pool.used_bytes + pool.retired_bytes;
  }
  ExpectClean();
}

}  // namespace
}  // namespace client
}  // namespace kvstrata
