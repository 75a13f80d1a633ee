// SPDX-License-Identifier: Apache-2.0
// The attach server: admission, descriptors, rings, ends of sessions. Clients that must die are
// this program again, as a child process (--client).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <random>

#include "server/attach/attach_server.h"
#include "server/attach/peers/peer.h"
#include "server/sockets/packet.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/attach_client.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;
using namespace test;  // NOLINT: the client of this folder

constexpr int kOpenTokens = 256;

// A client in a process of its own. It tells by one byte that it has done what `scenario` says.
class Child {
 public:
  Child(const std::string& scenario, const std::string& path) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
    std::string self = "/proc/self/exe", flag = "--client", s = scenario, p = path;
    char* argv[] = {self.data(), flag.data(), s.data(), p.data(), nullptr};
    EXPECT_EQ(posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    theirs.Reset();  // a child that fails is an EOF, not a wait
    pollfd readable{ours.get(), POLLIN, 0};
    char byte = 0;
    ready_ = poll(&readable, 1, kDeadlineMs) == 1 && read(ours.get(), &byte, 1) == 1;
  }
  ~Child() { Kill(); }
  bool ready() const { return ready_; }
  void Stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  bool ready_ = false;
};

int RunClient(const std::string& scenario, const std::string& path) {
  std::optional<Client> client = Client::Attach(path, "child");
  if (!client) return 1;
  const uint64_t model = client->Register();
  const Reply open = client->Open(model, "full", Tokens(kOpenTokens));
  if (!open.ok()) return 2;
  const uint64_t sequence = open.As<shm::SequenceReply>().sequence;
  if (scenario == "writing") {
    // Half of the tokens are committed, the others would be; the reader is inside a step.
    client->tables().Enter();
    if (!client->Commit(sequence, 0, Tokens(100)) || !client->Settle(sequence).ok()) return 3;
  }
  if (scenario == "hang_up") client->HangUp();
  const char byte = 1;
  if (write(STDOUT_FILENO, &byte, 1) != 1) return 4;
  for (;;) pause();
}

class AttachTest : public testing::Test {
 protected:
  void SetUp() override { StartServer({}); }
  void TearDown() override {
    server_.reset();
    store_.reset();
  }
  void StartServer(AttachOptions options) {
    server_.reset();
    store_.reset();
    StoreOptions small;
    small.device_bytes = small.host_bytes = uint64_t{8} << 20;
    small.arena_bytes = 256 << 10;
    auto store = Store::Create(small);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(store).value();
    path_ = directory_ / "k.sock.attach";
    auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    options.backend = "ref";
    auto server = AttachServer::Start(options, std::move(listener).value(), store_.get());
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(server).value();
  }
  Client Attach(const char* name = "test") {
    std::optional<Client> client = Client::Attach(path_, name);
    EXPECT_TRUE(client.has_value());
    if (!client) std::abort();
    return std::move(*client);
  }
  // Bytes that something other than the prefix cache holds, or that are on their way back.
  uint64_t Held() const {
    uint64_t bytes = 0;
    for (const PoolInfo& p : store_->inspection().Pools()) {
      bytes += p.used_bytes - p.cached_bytes + p.retired_bytes;
    }
    return bytes;
  }
  uint32_t Arenas() const {
    uint32_t arenas = 0;
    for (const PoolInfo& p : store_->inspection().Pools()) arenas += p.arenas;
    return arenas;
  }
  bool NothingHeld() const {
    return Eventually([this] { return Held() == 0; });
  }
  void ExpectCleanAudit() const {
    EXPECT_THAT(store_->inspection().Audit().findings, testing::IsEmpty());
  }

  const ScratchDir directory_;
  std::string path_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<AttachServer> server_;
};

// --- admission -----------------------------------------------------------------------------------

TEST_F(AttachTest, WelcomeSaysWhatIsMapped) {
  Client client = Attach("engine");
  EXPECT_EQ(client.welcome().version, shm::kVersion);
  EXPECT_STREQ(client.welcome().backend, "ref");
  EXPECT_EQ(client.welcome().daemon_epoch, store_->daemon_epoch());
  EXPECT_EQ(client.header()->magic, shm::kMagic);
  EXPECT_EQ(client.header()->session_id, client.welcome().session_id);
  ASSERT_EQ(store_->inspection().Sessions().size(), 1u);
  const SessionInfo session = store_->inspection().Sessions()[0];
  EXPECT_EQ(session.client_name, "engine");
  EXPECT_EQ(session.peer.pid, static_cast<uint32_t>(getpid()));
  EXPECT_EQ(session.peer.tenant, "uid:" + std::to_string(geteuid()));
  EXPECT_EQ(session.transport, Transport::kLinked);
  EXPECT_TRUE(client.Call(shm::kPing).ok());
}

TEST_F(AttachTest, SegmentsCannotBeHarmed) {
  Client client = Attach();
  EXPECT_NE(ftruncate(client.session_fd(), 0), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, client.table_fd(), 0),
            MAP_FAILED);
}

TEST_F(AttachTest, RefusesWhatIsNoHello) {
  const auto refusal = [this](const void* data, size_t bytes) {
    const UniqueFd fd = Dial(path_);
    EXPECT_EQ(send(fd.get(), data, bytes, 0), static_cast<ssize_t>(bytes));
    const Packet packet = Receive(fd.get());
    EXPECT_EQ(packet.type(), shm::kRefused);
    EXPECT_TRUE(SawEof(fd.get()));
    return packet.As<shm::Refused>();
  };
  shm::Hello hello = GoodHello();
  EXPECT_STREQ(refusal(&hello, sizeof(hello) - 1).reason, "HELLO_MALFORMED");
  const std::vector<std::byte> longer(sizeof(hello) + 64);
  EXPECT_STREQ(refusal(longer.data(), longer.size()).reason, "HELLO_MALFORMED");
  hello.type = 9;
  EXPECT_STREQ(refusal(&hello, sizeof(hello)).reason, "HELLO_MALFORMED");
  hello = GoodHello();
  hello.magic ^= 1;
  EXPECT_STREQ(refusal(&hello, sizeof(hello)).reason, "HELLO_MALFORMED");
  hello = GoodHello();
  hello.version = 77;
  shm::Refused refused = refusal(&hello, sizeof(hello));
  EXPECT_STREQ(refused.reason, "VERSION_MISMATCH");
  EXPECT_EQ(refused.code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_THAT(refused.message, HasSubstr("77"));
  hello = GoodHello();
  std::strcpy(hello.device_uuid, "GPU-1");
  refused = refusal(&hello, sizeof(hello));
  EXPECT_STREQ(refused.reason, "DEVICE_UNKNOWN");
  EXPECT_THAT(refused.message, HasSubstr("'GPU-1'; there are 'emulated'"));
  hello = GoodHello();
  std::memset(hello.client_name, 'x', sizeof(hello.client_name));
  EXPECT_STREQ(refusal(&hello, sizeof(hello)).reason, "HELLO_MALFORMED");
  EXPECT_EQ(server_->counters().refused, 7u);
  EXPECT_TRUE(store_->inspection().Sessions().empty());
  Attach();
}

TEST_F(AttachTest, NamesAreMadePrintable) {
  Attach("a\x1b[31mb\xff c\xc3\xa9");
  ASSERT_TRUE(Eventually([this] { return server_->counters().attached == 1; }));
  EXPECT_EQ(Printable("a\x1b[31mb\xff c\xc3\xa9"), "a?[31mb? c\xc3\xa9");
  EXPECT_EQ(Printable("\xc0\xaf\xed\xa0\x80\xf5"), "??????");
}

// A silent client is refused in time, and nobody waits for it meanwhile.
TEST_F(AttachTest, SilentClientTimesOutAlone) {
  AttachOptions options;
  options.hello_timeout = std::chrono::milliseconds(300);
  StartServer(options);
  const UniqueFd silent = Dial(path_);
  Client other = Attach();
  EXPECT_TRUE(other.Call(shm::kPing).ok());
  EXPECT_EQ(server_->counters().timed_out, 0u);
  EXPECT_STREQ(Receive(silent.get()).As<shm::Refused>().reason, "HELLO_TIMEOUT");
  EXPECT_TRUE(SawEof(silent.get()));
  EXPECT_TRUE(other.Call(shm::kPing).ok());
}

TEST_F(AttachTest, OneUserCannotHoldAllHandshakes) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 64; ++i) silent.push_back(Dial(path_));
  const UniqueFd one_more = Dial(path_);
  EXPECT_STREQ(Receive(one_more.get()).As<shm::Refused>().reason, "TOO_MANY_HANDSHAKES");
  silent.clear();
  ASSERT_TRUE(Eventually([this] { return Client::Attach(path_).has_value(); }));
}

TEST_F(AttachTest, StopEndsConnectionsAndUnlinks) {
  Client client = Attach();
  server_->Stop();
  EXPECT_TRUE(SawEof(client.socket()));
  EXPECT_FALSE(std::filesystem::exists(path_));
}

// --- the ring ------------------------------------------------------------------------------------

TEST_F(AttachTest, LifeOfASequence) {
  Client client = Attach();
  const uint64_t model = client.Register();
  ASSERT_NE(model, 0u);
  EXPECT_EQ(client.Register(), model) << "the same description is the same model";
  const std::vector<int32_t> prompt = Tokens(100);
  const Reply open = client.Open(model, "full", prompt);
  ASSERT_TRUE(open.ok()) << open.error.message;
  const auto sequence = open.As<shm::SequenceReply>();
  EXPECT_EQ(sequence.held_tokens, 0u);
  const std::string plan(reinterpret_cast<const char*>(open.payload.data()) + sizeof(sequence),
                         sequence.plan_bytes);
  EXPECT_TRUE(ParsePlan(plan).ok()) << plan;

  // Its table is published and names an arena that came by the socket, writable.
  const int slot = client.tables().Enter();
  ASSERT_GE(slot, 0);
  const shm::TableView table = client.tables().Read(sequence.slot, sequence.sequence);
  ASSERT_NE(table.table, nullptr);
  EXPECT_GE(table.pages, 7u);
  const Packet arena = Receive(client.socket());
  ASSERT_EQ(arena.type(), shm::kArena);
  ASSERT_EQ(arena.fds.size(), 1u);
  EXPECT_EQ(arena.As<shm::Arena>().arena, table.page(0)->arena);
  EXPECT_EQ(arena.As<shm::Arena>().writable, 1u);
  struct stat st {};
  ASSERT_EQ(fstat(arena.fds[0].get(), &st), 0);
  EXPECT_EQ(static_cast<uint64_t>(st.st_size), arena.As<shm::Arena>().bytes);
  client.tables().Leave(slot);

  ASSERT_TRUE(client.Commit(sequence.sequence, 0, prompt));
  Bytes report = PodBytes(shm::Report{sequence.sequence, 0, 2, shm::Report::kEntropy, 0});
  Put(&report, 0.5f);
  Put(&report, 1.5f);
  ASSERT_TRUE(client.Send(shm::kReport, 0, report));
  ASSERT_TRUE(client.Send(shm::kPrefillDone, 0, PodBytes(shm::SequenceRef{sequence.sequence})));
  const Reply settled = client.Settle(sequence.sequence);
  EXPECT_TRUE(settled.ok()) << settled.error.message;
  EXPECT_EQ(store_->inspection().Sequences(0).at(0).tokens, 100u);

  EXPECT_TRUE(client.Call(shm::kGrow, PodBytes(shm::Grow{sequence.sequence, 400, 100, 0, 0})).ok());
  Bytes lookup = PodBytes(shm::Lookup{model, 0, 100, "", 0, 0});
  PutTokens(&lookup, prompt);
  EXPECT_EQ(client.Call(shm::kLookup, lookup).As<shm::LookupReply>().held_tokens, 96u);
  // A plan that watches the prompt's last 32 queries opens on less than raw pages.
  lookup = PodBytes(shm::Lookup{model, 12, 100, "", 0, 0});
  for (const char c : std::string_view("sentencekv\0", 12)) Put(&lookup, c);
  PutTokens(&lookup, prompt);
  const Reply planned = client.Call(shm::kLookup, lookup);
  ASSERT_TRUE(planned.ok()) << planned.error.message;
  const auto answer = planned.As<shm::LookupReply>();
  const Reply opened = client.Open(model, "sentencekv", prompt);
  EXPECT_EQ(answer.held_tokens, opened.As<shm::SequenceReply>().held_tokens);
  EXPECT_LT(answer.held_tokens, 96u);
  EXPECT_EQ(answer.device_tokens + answer.host_tokens + answer.disk_tokens, answer.held_tokens);
  EXPECT_GT(answer.plan_bytes, 12u);
  const Reply fork = client.Call(shm::kForkSequence, PodBytes(shm::SequenceRef{sequence.sequence}));
  ASSERT_TRUE(fork.ok()) << fork.error.message;
  EXPECT_NE(fork.As<shm::SequenceReply>().sequence, sequence.sequence);
  EXPECT_EQ(fork.As<shm::SequenceReply>().held_tokens, 100u);
  EXPECT_TRUE(client.Call(shm::kCloseSequence, PodBytes(shm::SequenceRef{sequence.sequence})).ok());
  EXPECT_STREQ(client.Settle(sequence.sequence).error.reason, "SEQUENCE_UNKNOWN");

  EXPECT_TRUE(client.Call(shm::kDetach).ok());
  EXPECT_TRUE(store_->inspection().Sequences(0).empty()) << "closed before the reply";
  client.HangUp();
  EXPECT_TRUE(Eventually([this] { return store_->inspection().Sessions().empty(); }));
  EXPECT_TRUE(NothingHeld());
  ExpectCleanAudit();
}

// Another session of the tenant finds the prefix and may only read it.
TEST_F(AttachTest, ALeaseEndsByItsTime) {
  Client client = Attach();
  const uint64_t model = client.Register();
  const auto prompt = Tokens(100);
  const auto opened = client.Open(model, "full", prompt).As<shm::SequenceReply>();
  ASSERT_TRUE(client.Commit(opened.sequence, 0, prompt));
  const Bytes ref = PodBytes(shm::SequenceRef{opened.sequence});
  ASSERT_TRUE(client.Call(shm::kCloseSequence, ref).ok());
  for (const uint32_t lease_ms : {60000u, 1u}) {
    Client scheduler = Attach("scheduler");
    Bytes lookup = PodBytes(shm::Lookup{scheduler.Register(), 8, 100, "", lease_ms, 0});
    for (const char c : std::string_view("full\0\0\0\0", 8)) Put(&lookup, c);
    PutTokens(&lookup, prompt);
    EXPECT_EQ(scheduler.Call(shm::kLookup, lookup).As<shm::LookupReply>().held_tokens, 96u);
    const size_t left = lease_ms == 1 ? 0 : 1;
    EXPECT_TRUE(Eventually([&] { return store_->inspection().Sequences(0).size() == left; }))
        << lease_ms;
  }
}

TEST_F(AttachTest, SharedPrefixIsReadOnly) {
  Client writer = Attach("writer"), reader = Attach("reader");
  const uint64_t sequence =
      writer.Open(writer.Register(), "full", Tokens(64)).As<shm::SequenceReply>().sequence;
  ASSERT_TRUE(writer.Commit(sequence, 0, Tokens(64)));
  ASSERT_TRUE(writer.Settle(sequence).ok());
  const Reply open = reader.Open(reader.Register(), "full", Tokens(64));
  ASSERT_TRUE(open.ok());
  const auto opened = open.As<shm::SequenceReply>();
  EXPECT_GT(opened.held_tokens, 0u);
  const shm::TableView table = reader.tables().Read(opened.slot, opened.sequence);
  ASSERT_NE(table.table, nullptr);
  EXPECT_TRUE(table.page(0)->flags & shm::kPageShared);
  for (;;) {
    const Packet packet = Receive(reader.socket());
    ASSERT_EQ(packet.type(), shm::kArena);
    if (packet.As<shm::Arena>().arena != table.page(0)->arena) continue;
    EXPECT_EQ(packet.As<shm::Arena>().writable, 0u);
    EXPECT_EQ(fcntl(packet.fds.at(0).get(), F_GETFL) & O_ACCMODE, O_RDONLY);
    EXPECT_EQ(mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, packet.fds[0].get(), 0), MAP_FAILED);
    break;
  }
}

TEST_F(AttachTest, ImpossibleRequestsAreAnswered) {
  Client client = Attach(), other = Attach();
  const uint64_t model = client.Register();
  const uint64_t foreign =
      other.Open(other.Register(), "full", Tokens(4)).As<shm::SequenceReply>().sequence;
  const auto reason = [](const Reply& reply) {
    EXPECT_TRUE(reply.received);
    EXPECT_NE(reply.error.message[0], '\0');
    return std::string(reply.error.reason);
  };
  shm::RegisterModel bad = SmallModel();
  bad.dtype = 9;
  EXPECT_EQ(reason(client.Call(shm::kRegisterModel, PodBytes(bad))), "MODEL_DTYPE");
  bad = SmallModel();
  bad.keys_pre_rope = 2;
  EXPECT_EQ(reason(client.Call(shm::kRegisterModel, PodBytes(bad))), "MODEL_KEYS");
  bad.keys_pre_rope = 1;  // and no theta
  EXPECT_EQ(reason(client.Call(shm::kRegisterModel, PodBytes(bad))), "MODEL_ROPE");
  bad = SmallModel();
  std::memset(bad.digest, 'x', sizeof(bad.digest));
  EXPECT_EQ(reason(client.Call(shm::kRegisterModel, PodBytes(bad))), "MODEL_TEXT");
  bad = SmallModel();
  bad.head_dim = 63;
  const Reply head_dim = client.Call(shm::kRegisterModel, PodBytes(bad));
  EXPECT_THAT(head_dim.error.message, HasSubstr("63"));
  EXPECT_EQ(reason(client.Open(model + 1000, "full", Tokens(4))), "MODEL_UNKNOWN");
  EXPECT_EQ(reason(client.Open(model, "ches", Tokens(4))), "PLAN_UNKNOWN");
  for (const uint64_t sequence : {foreign, uint64_t{0}, ~uint64_t{0}}) {
    const Bytes ref = PodBytes(shm::SequenceRef{sequence});
    EXPECT_EQ(reason(client.Call(shm::kForkSequence, ref)), "SEQUENCE_UNKNOWN");
    EXPECT_EQ(reason(client.Call(shm::kCloseSequence, ref)), "SEQUENCE_UNKNOWN");
    EXPECT_EQ(reason(client.Call(shm::kSettle, ref)), "SEQUENCE_UNKNOWN");
    EXPECT_EQ(reason(client.Call(shm::kGrow, PodBytes(shm::Grow{sequence, 9, 0, 0, 0}))),
              "SEQUENCE_UNKNOWN");
  }
  EXPECT_EQ(reason(client.Open(model, "full", Tokens(1 << 20))), "POOL_EXHAUSTED");
  EXPECT_TRUE(client.Call(shm::kPing).ok());
  EXPECT_TRUE(other.Settle(foreign).ok()) << "the other session noticed nothing";
  EXPECT_EQ(server_->counters().malformed, 0u);
}

// What an engine hides from its open on, from a commit on, or after a comparison.
TEST_F(AttachTest, WhatIsPrivateIsNotFound) {
  Client client = Attach();
  const uint64_t model = client.Register();
  const auto held = [&](const std::vector<int32_t>& prompt) {
    Bytes lookup = PodBytes(shm::Lookup{model, 0, static_cast<uint32_t>(prompt.size()), "", 0, 0});
    PutTokens(&lookup, prompt);
    return client.Call(shm::kLookup, lookup).As<shm::LookupReply>().held_tokens;
  };
  const auto open = [&](const std::vector<int32_t>& prompt, uint32_t flags = 0) {
    return client.Open(model, "full", prompt, flags).As<shm::SequenceReply>().sequence;
  };
  const std::vector<int32_t> hidden = Tokens(97), halved = Tokens(97, 1000);
  ASSERT_TRUE(client.Commit(open(hidden, shm::OpenSequence::kPrivate), 0, hidden));
  EXPECT_EQ(held(hidden), 0u);

  const uint64_t sequence = open(halved);
  ASSERT_TRUE(client.Commit(sequence, 0, Tokens(48, 1000)));
  ASSERT_TRUE(client.Commit(sequence, 48, Tokens(32, 1048), 0, shm::Commit::kPrivate));
  ASSERT_TRUE(client.Commit(sequence, 80, Tokens(17, 1080)));
  EXPECT_TRUE(client.Settle(sequence).ok());
  EXPECT_EQ(held(halved), 48u);

  const uint64_t next = open(halved);
  ASSERT_TRUE(client.Send(shm::kVerified, 0, PodBytes(shm::Verified{next, 0, 16, 0, 0})));
  ASSERT_TRUE(client.Commit(next, 48, Tokens(49, 1048)));
  EXPECT_TRUE(client.Settle(next).ok());
  EXPECT_EQ(held(halved), 48u);
  for (const SequenceInfo& s : store_->inspection().Sequences(0)) EXPECT_TRUE(s.private_pages);
}

// An event has no answer; its error is the answer to the next question about the sequence.
TEST_F(AttachTest, EventErrorsAreToldOnce) {
  Client client = Attach();
  const uint64_t sequence =
      client.Open(client.Register(), "full", Tokens(32)).As<shm::SequenceReply>().sequence;
  ASSERT_TRUE(client.Commit(sequence, 5, Tokens(3)));
  EXPECT_STREQ(client.Settle(sequence).error.reason, "COMMIT_OUT_OF_ORDER");
  EXPECT_TRUE(client.Settle(sequence).ok());
  ASSERT_TRUE(client.Commit(sequence, 5, Tokens(3)));
  EXPECT_STREQ(client.Call(shm::kGrow, PodBytes(shm::Grow{sequence, 64, 0, 0, 0})).error.reason,
               "COMMIT_OUT_OF_ORDER");
  ASSERT_TRUE(client.Commit(sequence, 0, Tokens(3)));
  EXPECT_TRUE(client.Settle(sequence).ok());
}

TEST_F(AttachTest, MalformedFramesEndThatSessionOnly) {
  Client other = Attach("other");
  const struct {
    const char* what;
    uint32_t type;
    uint64_t id;
    size_t bytes;
  } cases[] = {
      {"unknown type", 33333, 1, 0},
      {"a reply", shm::kReply, 1, 512},
      {"request without an id", shm::kPing, 0, 0},
      {"ping with a payload", shm::kPing, 1, 8},
      {"short model", shm::kRegisterModel, 1, sizeof(shm::RegisterModel) - 1},
      {"long model", shm::kRegisterModel, 1, sizeof(shm::RegisterModel) + 4},
      {"short open", shm::kOpenSequence, 1, sizeof(shm::OpenSequence) - 1},
      {"long open", shm::kOpenSequence, 1, sizeof(shm::OpenSequence) + 4},
      {"short plan text", shm::kPlanText, 1, sizeof(shm::PlanText) - 1},
      {"long plan text", shm::kPlanText, 1, sizeof(shm::PlanText) + 4},
      {"short reference", shm::kSettle, 1, 7},
      {"long reference", shm::kForkSequence, 1, 9},
      {"empty close", shm::kCloseSequence, 1, 0},
      {"short grow", shm::kGrow, 1, 8},
      {"short lookup", shm::kLookup, 1, 8},
      {"short capacity", shm::kCapacity, 1, 8},
      {"short commit", shm::kCommit, 0, 23},
      {"long commit", shm::kCommit, 0, 28},
      {"short report", shm::kReport, 0, 23},
      {"long report", shm::kReport, 0, 32},
      {"empty prefill", shm::kPrefillDone, 0, 0},
      {"short verified", shm::kVerified, 0, 23},
      {"long verified", shm::kVerified, 0, 28},
      {"short recall", shm::kRecall, 0, sizeof(shm::Recall) - 1},
      {"long recall", shm::kRecall, 0, sizeof(shm::Recall) + 4},
      {"detach with a payload", shm::kDetach, 1, 1},
  };
  uint64_t ended = 0;
  for (const auto& c : cases) {
    Client client = Attach();
    ASSERT_TRUE(client.Send(c.type, c.id, Bytes(c.bytes)));
    EXPECT_TRUE(SawEof(client.socket())) << c.what;
    EXPECT_EQ(server_->counters().malformed, ++ended) << c.what;
    EXPECT_TRUE(other.Call(shm::kPing).ok()) << c.what;
  }
}

// Counts that promise more than the frame holds, up to 2^32 - 1.
TEST_F(AttachTest, LyingCountsAreMalformed) {
  const auto ends = [this](uint32_t type, const Bytes& payload) {
    Client client = Attach();
    return client.Send(type,
                       type == shm::kOpenSequence || type == shm::kLookup ||
                           type == shm::kRegisterModel || type == shm::kPlanText ||
                           type == shm::kCapacity,
                       payload) &&
           SawEof(client.socket());
  };
  for (const uint32_t n : {1u, 0x3FFFFFFFu, 0x40000000u, 0x80000000u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(ends(shm::kOpenSequence, PodBytes(shm::OpenSequence{1, 0, n}))) << n;
    EXPECT_TRUE(ends(shm::kOpenSequence, PodBytes(shm::OpenSequence{1, n, 0}))) << n;
    EXPECT_TRUE(ends(shm::kPlanText, PodBytes(shm::PlanText{n, 0}))) << n;
    EXPECT_TRUE(ends(shm::kCapacity, PodBytes(shm::Capacity{1, n, 0}))) << n;
    EXPECT_TRUE(ends(shm::kLookup, PodBytes(shm::Lookup{1, 0, n, "", 0, 0}))) << n;
    EXPECT_TRUE(ends(shm::kCommit, PodBytes(shm::Commit{1, 0, n, 0, 0}))) << n;
    EXPECT_TRUE(ends(shm::kReport, PodBytes(shm::Report{1, 0, n, 7, 0}))) << n;
    EXPECT_TRUE(ends(shm::kRecall, PodBytes(shm::Recall{1, 1, 0, n, 1, 0, 0}))) << n;
    EXPECT_TRUE(ends(shm::kRecall, PodBytes(shm::Recall{1, 1, 0, n, n, 0, 0}))) << n;
    shm::RegisterModel model = SmallModel();
    model.boundary_count = static_cast<int32_t>(n);
    EXPECT_TRUE(ends(shm::kRegisterModel, PodBytes(model))) << n;
  }
}

TEST_F(AttachTest, RandomRingBytesEndThatSessionOnly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Client other = Attach("other");
  for (int round = 0; round < 30; ++round) {
    Client client = Attach();
    auto* words = reinterpret_cast<uint32_t*>(client.base() + client.header()->request_ring_offset);
    for (int i = 0; i < 4096; ++i) words[i] = static_cast<uint32_t>(random() % 80);
    client.header()->request.head.store(random());
    client.header()->request.tail.store(random() % 2 == 0 ? 8 + random() % 16384 : random());
    client.header()->request_ring_offset = random();
    client.Ring();
    EXPECT_TRUE(SawEof(client.socket()));
    EXPECT_TRUE(other.Call(shm::kPing).ok());
  }
}

// Replies that nobody reads wait; requests behind them wait too; nothing is lost.
TEST_F(AttachTest, RepliesWaitForTheirReader) {
  AttachOptions options;
  options.reply_backlog_bytes = 8 << 10;
  StartServer(options);
  Client client = Attach(), other = Attach();
  constexpr uint64_t kPings = 10'000;  // five times what the reply ring holds
  for (uint64_t i = 1; i <= kPings; ++i) ASSERT_TRUE(client.Send(shm::kPing, i, {}));
  // Each ping of the other is at least one iteration of the loop, which would take 64 frames more.
  constexpr uint64_t kIterations = 2 * kPings / 64;
  for (uint64_t i = 0; i < kIterations; ++i) ASSERT_TRUE(other.Call(shm::kPing).ok());
  EXPECT_LT(server_->counters().frames, kIterations + 2200) << "what waits has a bound";
  for (uint64_t i = 1; i <= kPings; ++i) {
    const Reply reply = client.Read();
    ASSERT_TRUE(reply.ok()) << i;
    ASSERT_EQ(reply.header.id, i);
  }
  EXPECT_TRUE(client.Call(shm::kPing).ok());
}

// The server sleeps between the frames (poll 0), so each needs its doorbell.
TEST_F(AttachTest, NoDoorbellIsLost) {
  AttachOptions options;
  options.poll = std::chrono::microseconds(0);
  StartServer(options);
  Client client = Attach();
  for (int i = 0; i < 5'000; ++i) ASSERT_TRUE(client.Call(shm::kPing).ok()) << i;
}

TEST_F(AttachTest, ManyClientsAtOnce) {
  constexpr int kThreads = 8, kRounds = 10;
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        std::optional<Client> client = Client::Attach(path_);
        if (!client) {
          ++failures;
          continue;
        }
        const uint64_t model = client->Register();
        const std::vector<int32_t> tokens = Tokens(50 + round, 1000 * t);
        const Reply open = client->Open(model, "full", tokens);
        const auto sequence = open.As<shm::SequenceReply>();
        const std::vector<int32_t> rest(tokens.begin() + sequence.held_tokens, tokens.end());
        failures += !open.ok() || !client->Commit(sequence.sequence, sequence.held_tokens, rest) ||
                    !client->Settle(sequence.sequence).ok() ||
                    (round % 2 == 0 && !client->Call(shm::kDetach).ok());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures.load(), 0);
  ExpectCleanAudit();
}

// --- ends ----------------------------------------------------------------------------------------

TEST_F(AttachTest, KilledClientGivesItsPagesBack) {
  ASSERT_EQ(Held(), 0u);
  for (const char* scenario : {"opened", "writing"}) {
    Child child(scenario, path_);
    ASSERT_TRUE(child.ready());
    EXPECT_GE(Held(), 16 * 4096u) << scenario;
    child.Kill();
    EXPECT_TRUE(NothingHeld()) << scenario;
    EXPECT_TRUE(Eventually([this] { return store_->inspection().Sessions().empty(); }));
    ExpectCleanAudit();
  }
  // Counted after its pages are back.
  EXPECT_TRUE(Eventually([this] { return server_->counters().died == 2; }));
}

TEST_F(AttachTest, StoppedClientKeepsItsPages) {
  Child child("opened", path_);
  ASSERT_TRUE(child.ready());
  child.Stop();
  const uint64_t held = Held();
  // Housekeeping passes and other clients come and go meanwhile.
  for (int i = 0; i < 50; ++i) {
    Client other = Attach();
    ASSERT_TRUE(other.Open(other.Register(), "full", Tokens(16, 50'000)).ok());
    ASSERT_TRUE(other.Call(shm::kDetach).ok());
    store_->references().Reclaim();
  }
  EXPECT_GE(Held(), held);
  EXPECT_EQ(server_->counters().died + server_->counters().hung_up, 0u);
  child.Kill();
  EXPECT_TRUE(NothingHeld());
}

// The socket is closed, the process lives and may still write: its arenas are nobody else's.
TEST_F(AttachTest, HungUpClientIsFencedUntilItDies) {
  Child child("hang_up", path_);
  ASSERT_TRUE(child.ready());
  ASSERT_TRUE(Eventually([this] { return server_->counters().hung_up == 1; }));
  EXPECT_EQ(server_->counters().died, 0u);
  EXPECT_TRUE(store_->inspection().Sequences(0).empty()) << "its sequences are closed";
  store_->references().Reclaim();
  EXPECT_EQ(Arenas(), 1u) << "the process has it mapped still";
  child.Kill();
  EXPECT_TRUE(Eventually([this] { return server_->counters().died == 1; }));
  EXPECT_EQ(Arenas(), 0u);
  EXPECT_TRUE(NothingHeld());
  ExpectCleanAudit();
}

// A client that detaches and keeps its socket does not keep its session.
TEST_F(AttachTest, DetachEndsWithoutAHangUp) {
  AttachOptions options;
  options.hello_timeout = std::chrono::milliseconds(50);
  StartServer(options);
  Client client = Attach();
  ASSERT_TRUE(client.Open(client.Register(), "full", Tokens(64)).ok());
  ASSERT_TRUE(client.Call(shm::kDetach).ok());
  EXPECT_TRUE(SawEof(client.socket()));
  EXPECT_EQ(Arenas(), 0u);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(server_->counters().hung_up, 0u);
}

TEST_F(AttachTest, PacketsAfterHelloEndTheSession) {
  Client client = Attach();
  const shm::Hello again = GoodHello();
  ASSERT_GT(send(client.socket(), &again, sizeof(again), MSG_NOSIGNAL), 0);
  EXPECT_TRUE(SawEof(client.socket()));
  EXPECT_TRUE(Eventually([this] { return store_->inspection().Sequences(0).empty(); }));
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--client") == 0) {
    return kvstrata::RunClient(argv[2], argv[3]);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
