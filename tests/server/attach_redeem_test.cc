// SPDX-License-Identifier: Apache-2.0
// A process without the library redeems a token at the attach socket: what it gets, what it is
// refused, and what becomes of a session whose arenas it may write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <string>
#include <vector>

#include "tests/server/attach_fixture.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder

shm::Redeem PacketOf(const AttachToken& token) {
  shm::Redeem redeem{};
  redeem.type = shm::kRedeem;
  redeem.magic = shm::kMagic;
  redeem.version = shm::kVersion;
  std::copy(token.begin(), token.end(), redeem.token);
  return redeem;
}

// Kills and awaits it, however the test ends.
class EndOfChild {
 public:
  explicit EndOfChild(pid_t child) : child_(child) {}
  ~EndOfChild() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  EndOfChild(const EndOfChild&) = delete;
  EndOfChild& operator=(const EndOfChild&) = delete;

 private:
  const pid_t child_;
};

class AttachRedeemTest : public AttachFixture {
 protected:
  void SetUp() override {
    AttachOptions options;
    options.tokens = &tokens_;
    StartServer(options);
    session_ = NewSession({});
  }
  uint64_t NewSession(ArenaSink sink) {
    PeerIdentity self;
    self.uid = geteuid();
    self.tenant = "uid:" + std::to_string(geteuid());
    const uint64_t session =
        store_->sessions().OpenSession(self, Transport::kRemote, "grpc", std::move(sink))->session;
    ModelDesc model;
    model.name = "small";
    model.digest = "digest";
    model.geometry = {1, 1, 1, 64, 16, DType::kBF16};
    model_ = *store_->models().RegisterModel(session, model);
    return session;
  }
  OpenedSequence Open(int tokens, int32_t first = 1) {
    const Result<OpenedSequence> opened =
        store_->openings().OpenSequence(session_, model_, "full", Tokens(tokens, first));
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    return *opened;
  }
  AttachToken Issue(bool writable = false) {
    return *tokens_.Issue(geteuid(), {session_, writable});
  }
  // A connection that has sent the bytes.
  template <typename T>
  UniqueFd Say(const T& packet, size_t bytes = sizeof(T)) {
    UniqueFd fd = Dial(path_);
    EXPECT_EQ(send(fd.get(), &packet, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    return fd;
  }
  std::string RefusalOf(const UniqueFd& fd) {
    const Packet packet = Receive(fd.get());
    EXPECT_EQ(packet.type(), shm::kRefused);
    EXPECT_TRUE(packet.fds.empty());
    EXPECT_TRUE(SawEof(fd.get()));
    return packet.As<shm::Refused>().reason;
  }

  AttachTokens tokens_;
  uint64_t session_ = 0, model_ = 0;
};

TEST_F(AttachRedeemTest, TablesAndArenasNowAndLater) {
  const OpenedSequence first = Open(40);
  const UniqueFd fd = Say(PacketOf(Issue()));
  const Packet packet = Receive(fd.get());
  ASSERT_EQ(packet.type(), shm::kTables);
  ASSERT_EQ(packet.bytes.size(), sizeof(shm::Tables));
  ASSERT_EQ(packet.fds.size(), 1u);
  const auto tables = packet.As<shm::Tables>();
  EXPECT_EQ(tables.session_id, session_);
  EXPECT_EQ(tables.daemon_epoch, store_->daemon_epoch());
  EXPECT_STREQ(tables.device_uuid, "emulated");
  EXPECT_EQ(tables.arenas, 1u);
  void* const base =
      mmap(nullptr, tables.table_bytes, PROT_READ, MAP_SHARED, packet.fds[0].get(), 0);
  ASSERT_NE(base, MAP_FAILED);
  const shm::TableReader reader(nullptr, static_cast<const shm::TableHeader*>(base),
                                tables.table_bytes);
  const shm::TableView view = reader.Read(first.slot, first.sequence);
  ASSERT_NE(view.table, nullptr);
  const Packet arena = Receive(fd.get());
  ASSERT_EQ(arena.type(), shm::kArena);
  EXPECT_EQ(arena.As<shm::Arena>().arena, view.page(0)->arena);
  EXPECT_EQ(arena.As<shm::Arena>().writable, 0);
  ASSERT_EQ(arena.fds.size(), 1u);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fds[0].get(), 0),
            MAP_FAILED);

  const OpenedSequence second = Open(2000);  // pages of 4 KiB in arenas of 256 KiB
  const Packet later = Receive(fd.get());
  ASSERT_EQ(later.type(), shm::kArena);
  EXPECT_NE(later.As<shm::Arena>().arena, view.page(0)->arena);
  EXPECT_NE(reader.Read(second.slot, second.sequence).table, nullptr);
  EXPECT_EQ(server_->counters().passed, 1u);

  // Its end is seen there, whoever ends it.
  store_->sessions().EndSession(session_, SessionEnd::kDied);
  while (!Receive(fd.get()).bytes.empty()) {
  }
  EXPECT_TRUE(SawEof(fd.get()));
  munmap(base, tables.table_bytes);
}

TEST_F(AttachRedeemTest, Refusals) {
  const AttachToken token = Issue();
  AttachToken wrong = token;
  wrong[0] ^= 1;
  EXPECT_EQ(RefusalOf(Say(PacketOf(wrong))), "TOKEN_UNKNOWN");
  const AttachToken others = *tokens_.Issue(geteuid() + 1, {session_, true});
  EXPECT_EQ(RefusalOf(Say(PacketOf(others))), "TOKEN_UNKNOWN");
  shm::Redeem packet = PacketOf(token);
  EXPECT_EQ(RefusalOf(Say(packet, sizeof(packet) - 1)), "REDEEM_MALFORMED");
  packet.magic ^= 1;
  EXPECT_EQ(RefusalOf(Say(packet)), "REDEEM_MALFORMED");
  packet = PacketOf(token);
  packet.version = 77;
  EXPECT_EQ(RefusalOf(Say(packet)), "VERSION_MISMATCH");
  struct {
    shm::Redeem packet;
    char more[200] = {};
  } longer{PacketOf(token)};
  EXPECT_EQ(RefusalOf(Say(longer)), "REDEEM_MALFORMED");
  // None of them cost the token.
  const UniqueFd fd = Say(PacketOf(token));
  EXPECT_EQ(Receive(fd.get()).type(), shm::kTables);
  EXPECT_EQ(RefusalOf(Say(PacketOf(token))), "TOKEN_USED");
  const AttachToken late = Issue();
  store_->sessions().EndSession(session_, SessionEnd::kDied);
  EXPECT_EQ(RefusalOf(Say(PacketOf(late))), "SESSION_UNKNOWN");
}

TEST_F(AttachRedeemTest, WhoSpeaksOnIsDropped) {
  const UniqueFd fd = Say(PacketOf(Issue()));
  ASSERT_EQ(Receive(fd.get()).type(), shm::kTables);
  const uint32_t more = 9;
  ASSERT_EQ(send(fd.get(), &more, sizeof(more), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(more)));
  EXPECT_TRUE(SawEof(fd.get()));
  EXPECT_TRUE(Attach().Call(shm::kPing).ok());
}

TEST_F(AttachRedeemTest, ALaterOneTakesItsPlace) {
  Open(40);
  const UniqueFd first = Say(PacketOf(Issue()));
  ASSERT_EQ(Receive(first.get()).type(), shm::kTables);
  ASSERT_EQ(Receive(first.get()).type(), shm::kArena);
  const UniqueFd second = Say(PacketOf(Issue()));
  ASSERT_EQ(Receive(second.get()).type(), shm::kTables);
  ASSERT_EQ(Receive(second.get()).type(), shm::kArena);
  EXPECT_TRUE(SawEof(first.get()));
  Open(2000);
  EXPECT_EQ(Receive(second.get()).type(), shm::kArena);
}

// Reads nothing: what waits for it is its own trouble.
TEST_F(AttachRedeemTest, WhoDoesNotReadHoldsUpNobody) {
  const UniqueFd silent = Dial(path_);
  const UniqueFd fd = Say(PacketOf(Issue()));
  std::vector<OpenedSequence> open;
  for (int i = 0; i < 20; ++i) open.push_back(Open(1000));
  EXPECT_TRUE(Attach().Call(shm::kPing).ok());
  for (const OpenedSequence& s : open)
    EXPECT_TRUE(store_->sequences().CloseSequence(session_, s.sequence).ok());
}

// While a process may write a session's arenas nobody else gets them, though the session is over.
TEST_F(AttachRedeemTest, TheArenasOfAWriterStayItsOwnUntilItIsDead) {
  EXPECT_EQ(store_->sessions().CheckWriter(session_).reason(), "NOT_WRITABLE");
  const OpenedSequence opened = Open(40);
  const AttachToken token = Issue(true);
  int mapped[2];
  ASSERT_EQ(pipe2(mapped, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    const UniqueFd fd = Say(PacketOf(token));
    const Packet tables = Receive(fd.get()), arena = Receive(fd.get());
    const bool wrote = arena.As<shm::Arena>().writable == 1 && !arena.fds.empty() &&
                       mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fds[0].get(),
                            0) != MAP_FAILED;
    const char said = wrote ? 'y' : 'n';
    (void)!write(mapped[1], &said, 1);
    for (;;) pause();
  }
  const EndOfChild end(child);
  char said = 0;
  ASSERT_EQ(read(mapped[0], &said, 1), 1);
  EXPECT_EQ(said, 'y');
  EXPECT_TRUE(store_->sessions().CheckWriter(session_).ok());
  const std::vector<int32_t> prompt = Tokens(40);
  ASSERT_TRUE(store_->steps().Commit(session_, opened.sequence, 0, prompt, 0).ok());

  const uint32_t own = store_->inspection().Show(opened.sequence)->pages[0].arena;
  store_->sessions().EndSession(session_, SessionEnd::kDied);
  ASSERT_EQ(store_->inspection().Sessions().size(), 1u);
  EXPECT_TRUE(store_->inspection().Sessions()[0].fenced);
  EXPECT_TRUE(store_->inspection().Audit().findings.empty());
  std::vector<uint32_t> anothers;
  session_ = NewSession([&](const ArenaGrant& grant) {
    if (grant.writable) anothers.push_back(grant.arena);
  });
  Open(1000, 5000);  // another prompt: what it shared it would map read-only
  EXPECT_THAT(anothers, testing::Not(testing::Contains(own)));
  ASSERT_EQ(kill(child, SIGKILL), 0);
  EXPECT_TRUE(Eventually([this] { return store_->inspection().Sessions().size() == 1; }));
  anothers.clear();
  for (int i = 0; i < 20 && anothers.empty(); ++i) Open(1000, 5000);
  EXPECT_THAT(anothers, testing::Contains(own)) << "whose writer is dead";
  EXPECT_TRUE(store_->inspection().Audit().findings.empty());
  close(mapped[0]);
  close(mapped[1]);
}

TEST_F(AttachRedeemTest, ASessionHasSoManyWriters) {
  std::vector<UniqueFd> writers;
  for (uint32_t i = 0; i < Sessions::kMaxWriters; ++i) {
    writers.push_back(Say(PacketOf(Issue(true))));
    ASSERT_EQ(Receive(writers.back().get()).type(), shm::kTables);
  }
  EXPECT_EQ(RefusalOf(Say(PacketOf(Issue(true)))), "WRITER_LIMIT");
  EXPECT_EQ(Receive(Say(PacketOf(Issue())).get()).type(), shm::kTables);
}

}  // namespace
}  // namespace kvstrata
