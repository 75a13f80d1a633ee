// SPDX-License-Identifier: Apache-2.0
// What `kvstrata events` tells of incidents: what happened, to whom or by whom, and why. Each is
// made for real against a real daemon.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "base/unique_fd.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "proto/status_map.h"
#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr std::chrono::seconds kDeadline{20};

struct Told {
  uint64_t number = 0;
  std::string name, level;
  std::map<std::string, std::string> fields;
};
using Fields = std::map<std::string, std::string>;

Told ToldOf(const v1::Event& event) {
  Told told{event.number(), event.name(), event.level(), {}};
  for (const auto& field : event.fields()) told.fields[field.key()] = field.value();
  return told;
}

bool Matches(const Told& told, const std::string& name, const Fields& fields) {
  if (told.name != name) return false;
  return std::ranges::all_of(fields, [&told](const auto& wanted) {
    const auto found = told.fields.find(wanted.first);
    return found != told.fields.end() && found->second == wanted.second;
  });
}

// An operator who asks over one channel of his own.
class Watcher {
 public:
  explicit Watcher(const std::string& socket) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::Admin::NewStub(
        grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), own));
  }

  std::vector<Told> All() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    std::vector<Told> all;
    const auto reader = stub_->Watch(&context, v1::WatchRequest());
    for (v1::WatchResponse batch; reader->Read(&batch);) {
      for (const v1::Event& event : batch.events()) all.push_back(ToldOf(event));
    }
    EXPECT_TRUE(reader->Finish().ok());
    return all;
  }
  // Waits for such an event.
  ::testing::AssertionResult Tells(const std::string& name, const Fields& fields,
                                   Told* found = nullptr) {
    const bool told = Eventually(
        [&] {
          for (const Told& event : All()) {
            if (!Matches(event, name, fields)) continue;
            if (found != nullptr) *found = event;
            return true;
          }
          return false;
        },
        20000);
    if (told) return ::testing::AssertionSuccess();
    auto failure = ::testing::AssertionFailure() << "no event " << name << "; there are:";
    for (const Told& event : All()) {
      failure << "\n" << event.name;
      for (const auto& [key, value] : event.fields) failure << " " << key << "=" << value;
    }
    return failure;
  }

  template <typename Request, typename Response>
  kvstrata::Status Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                        const Request& request, Response* response) {
    return CallAdmin(stub_.get(), method, request, response);
  }
  // How often the daemon refused with that reason; nullopt: it does not count such.
  std::optional<uint64_t> Refusals(const std::string& reason) {
    v1::GetStatusResponse status;
    EXPECT_TRUE(Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
    for (const auto& refusal : status.refusals()) {
      if (refusal.reason() == reason) return refusal.count();
    }
    return std::nullopt;
  }
  v1::Admin::Stub* stub() { return stub_.get(); }

 private:
  std::unique_ptr<v1::Admin::Stub> stub_;
};

std::string Me() { return std::to_string(geteuid()); }
std::string MyPid() { return std::to_string(getpid()); }

int Attach(const std::string& socket, int) {
  Engine engine(Linked(), socket);
  if (engine.code() != KVS_OK) return 1;
  Say('a');
  pause();
  return 0;
}
const bool kAttach = RegisterRole("attach", Attach);

class EventsTest : public ::testing::Test {
 protected:
  EventsTest() {
    daemon_ = std::make_unique<DaemonProcess>(std::vector<std::string>{
        "--set", "pool.device_bytes=2MiB", "--set", "pool.host_bytes=2MiB", "--set",
        "pool.arena_bytes=256KiB", "--set", "disk.path=" + folder_ / "tier", "--set",
        "disk.budget_bytes=16MiB", "--set", "disk.segment_bytes=1MiB", "--set",
        "disk.load_timeout=60s"});
    watcher_ = std::make_unique<Watcher>(daemon_->socket());
  }
  ~EventsTest() override { daemon_.reset(); }
  Watcher& watcher() { return *watcher_; }

  const ScratchDir folder_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Watcher> watcher_;
};

TEST_F(EventsTest, SessionsComeGoAndDie) {
  ClientProcess client("attach", daemon_->socket());
  ASSERT_TRUE(client.Says('a'));
  const std::string pid = std::to_string(client.pid());
  EXPECT_TRUE(watcher().Tells("attached", {{"pid", pid}, {"uid", Me()}, {"client", "e2e"}}));
  client.Kill();
  EXPECT_TRUE(watcher().Tells(
      "died",
      {{"pid", pid}, {"uid", Me()}, {"client", "e2e"}, {"sequences", "0"}, {"freed_bytes", "0"}}));
  {
    Engine engine(Linked(), daemon_->socket());
    ASSERT_NE(engine.Prefill("full", Prompt(4 * kPage, 1)), 0u);
  }
  Told told;
  EXPECT_TRUE(watcher().Tells("detached", {{"client", "e2e"}, {"sequences", "1"}}, &told));
  EXPECT_GT(std::stoull(told.fields["freed_bytes"]), 0u);
}

TEST_F(EventsTest, RefusalsOfAnEngineHaveReasonAndProcess) {
  Engine engine(Linked(), daemon_->socket());
  ASSERT_EQ(engine.code(), KVS_OK);
  EXPECT_EQ(engine.Open("ful", Prompt(kPage, 1)), 0u);
  Told told;
  ASSERT_TRUE(watcher().Tells("refused", {{"reason", "PLAN_UNKNOWN"}, {"pid", MyPid()}}, &told));
  EXPECT_EQ(told.fields["call"], "ring");
  EXPECT_EQ(told.fields["uid"], Me());
  EXPECT_NE(told.fields["session"], "0");
  EXPECT_EQ(told.level, "info");  // what a caller got wrong
  // Open sequences keep their pages, until nothing is left.
  std::string reason;
  for (int i = 0; i < 4000 && reason.empty(); ++i) {
    if (engine.Prefill("full", Prompt(40 * kPage, 100 + i)) == 0) {
      reason = Linked().kvs_error_reason();
    }
  }
  ASSERT_EQ(reason, "POOL_EXHAUSTED");
  ASSERT_TRUE(watcher().Tells("refused", {{"reason", "POOL_EXHAUSTED"}}, &told));
  EXPECT_EQ(told.level, "warning");
  EXPECT_EQ(told.fields["pid"], MyPid());
  EXPECT_NE(told.fields["why"].find("pool"), std::string::npos);
}

TEST_F(EventsTest, WhoCannotAttachIsNamed) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (daemon_->socket() + ".attach").c_str(),
               sizeof(address.sun_path) - 1);
  ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(send(fd.get(), "hello", 5, 0), 5);
  EXPECT_TRUE(watcher().Tells("attach_refused",
                              {{"reason", "HELLO_MALFORMED"}, {"pid", MyPid()}, {"uid", Me()}}));
  EXPECT_EQ(watcher().Refusals("HELLO_MALFORMED"), 1u);
}

TEST_F(EventsTest, OperatorsVerbsHaveWhoAndWhat) {
  const Fields me = {{"uid", Me()}, {"pid", MyPid()}};
  const auto by_me = [&me](Fields fields) {
    fields.insert(me.begin(), me.end());
    return fields;
  };
  v1::EvictResponse evicted;
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Evict, v1::EvictRequest(), &evicted).ok());
  EXPECT_TRUE(watcher().Tells("admin", by_me({{"verb", "Evict"}, {"request", ""}})));

  v1::UnpinRequest unpin;
  unpin.set_pin(99);
  v1::UnpinResponse unpinned;
  ASSERT_FALSE(watcher().Call(&v1::Admin::Stub::Unpin, unpin, &unpinned).ok());
  EXPECT_TRUE(watcher().Tells(
      "refused",
      by_me({{"reason", "PIN_UNKNOWN"}, {"call", "Admin/Unpin"}, {"request", "pin=99"}})));

  v1::SetQuotaRequest quota;
  quota.set_user("uid:4242");
  quota.set_limit("sessions");
  quota.set_value(3);
  v1::SetQuotaResponse set;
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::SetQuota, quota, &set).ok());
  EXPECT_TRUE(watcher().Tells("quota_set", {{"user", "uid:4242"}, {"by", "uid:" + Me()}}));
  EXPECT_TRUE(watcher().Tells("admin", by_me({{"verb", "SetQuota"}})));

  v1::ResizeRequest resize;
  resize.set_tier("host");
  resize.set_bytes(3 << 20);
  v1::ResizeResponse resized;
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Resize, resize, &resized).ok());
  EXPECT_TRUE(watcher().Tells("resized", {{"tier", "host"}, {"by", "uid:" + Me()}}));
  EXPECT_TRUE(watcher().Tells("admin",
                              by_me({{"verb", "Resize"}, {"request", "tier=host bytes=3145728"}})));

  v1::DrainResponse drained;
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Drain, v1::DrainRequest(), &drained).ok());
  EXPECT_TRUE(watcher().Tells("admin", by_me({{"verb", "Drain"}})));
  // An operator's program asks until it is done, and is told once.
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Drain, v1::DrainRequest(), &drained).ok());
  const std::vector<Told> all = watcher().All();
  EXPECT_EQ(std::ranges::count_if(all,
                                  [](const Told& told) {
                                    return Matches(told, "admin", {{"verb", "Drain"}});
                                  }),
            1);
  EXPECT_TRUE(watcher().Tells("state_changed",
                              {{"from", "serving"}, {"to", "serving, draining the disk"}}));
}

// What a prompt says stays with its user.
TEST_F(EventsTest, TokensAreToldNowhere) {
  Engine engine(Linked(), daemon_->socket());
  ASSERT_NE(engine.Prefill("full", Prompt(4 * kPage, 7)), 0u);
  v1::PinRequest pin;
  pin.set_model(engine.handle());
  for (const int32_t id : Prompt(4 * kPage, 7)) pin.add_tokens(id);
  pin.set_ttl_us(60'000'000);
  v1::PinResponse pinned;
  ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Pin, pin, &pinned).ok());
  Told told;
  ASSERT_TRUE(watcher().Tells("admin", {{"verb", "Pin"}}, &told));
  EXPECT_NE(told.fields["request"].find("tokens[64]"), std::string::npos) << told.fields["request"];
  for (const Told& event : watcher().All()) {
    for (const auto& [key, value] : event.fields) {
      EXPECT_EQ(value.find(std::to_string(Prompt(4 * kPage, 7)[1])), std::string::npos)
          << event.name << " " << key << "=" << value;
    }
  }
}

TEST_F(EventsTest, ManyEvictionsAreOneEvent) {
  {
    Engine engine(Linked(), daemon_->socket());
    for (int i = 0; i < 60; ++i) {
      const kvs_sequence s = engine.Prefill("full", Prompt(40 * kPage, 100 + i));
      ASSERT_NE(s, 0u) << engine.error();
      Linked().kvs_sequence_close(engine.session(), s);
    }
  }
  Told told;
  ASSERT_TRUE(watcher().Tells("evicted", {}, &told));
  EXPECT_GT(std::stoi(told.fields["pages"]), 40);
  EXPECT_GT(std::stoi(told.fields["fullest_pool_percent"]), 0);
}

TEST_F(EventsTest, DamageIsToldWithKeyAndSegment) {
  Engine engine(Linked(), daemon_->socket());
  ASSERT_NE(engine.Prefill("full", Prompt(8 * kPage, 3)), 0u);
  v1::DrainResponse drained;
  ASSERT_TRUE(Eventually([&] {
    return watcher().Call(&v1::Admin::Stub::Drain, v1::DrainRequest(), &drained).ok() &&
           drained.drained();
  }));
  const std::vector<DiskSlot> slots = DiskSlots(folder_ / "tier");
  ASSERT_FALSE(slots.empty());
  FlipByte(slots.front());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const auto reader = watcher().stub()->Scrub(&context, v1::ScrubRequest());
  v1::ScrubResponse last;
  while (reader->Read(&last)) {
  }
  ASSERT_TRUE(reader->Finish().ok());
  ASSERT_EQ(last.corrupt(), 1u);
  Told told;
  ASSERT_TRUE(watcher().Tells("value_lost", {{"reason", "DISK_CORRUPT"}}, &told));
  EXPECT_EQ(told.level, "error");
  EXPECT_EQ(told.fields["key"].size(), 64u);
  const std::string file = std::filesystem::path(slots.front().file).filename().string();
  EXPECT_EQ("segment." + told.fields["segment"], file);
  EXPECT_TRUE(watcher().Tells("admin", {{"verb", "Scrub"}, {"uid", Me()}}));
}

TEST_F(EventsTest, SignalsAreTold) {
  ASSERT_EQ(kill(daemon_->pid(), SIGUSR1), 0);
  EXPECT_TRUE(watcher().Tells("signal_ignored", {}));
  ASSERT_EQ(kill(daemon_->pid(), SIGHUP), 0);
  EXPECT_TRUE(watcher().Tells("reloaded", {{"by", "SIGHUP"}, {"applied", "0"}}));
}

// Every reason is there at zero; what was refused moves its own.
TEST_F(EventsTest, CountersMove) {
  for (const char* reason : {"POOL_EXHAUSTED", "PIN_UNKNOWN", "DISK_CORRUPT", "ATTACH_RATE"}) {
    EXPECT_EQ(watcher().Refusals(reason), 0u) << reason;
  }
  v1::UnpinRequest unpin;
  unpin.set_pin(99);
  v1::UnpinResponse unpinned;
  (void)watcher().Call(&v1::Admin::Stub::Unpin, unpin, &unpinned);
  EXPECT_EQ(watcher().Refusals("PIN_UNKNOWN"), 1u);

  {
    Engine engine(Linked(), daemon_->socket());
    const std::vector<int32_t> prompt = Prompt(8 * kPage, 3);
    ASSERT_NE(engine.Prefill("full", prompt), 0u);
    kvs_lookup_result held{sizeof(held)};
    ASSERT_EQ(engine.abi().kvs_lookup(engine.session(), engine.handle(), nullptr, prompt.data(),
                                      prompt.size(), &held),
              KVS_OK);
  }
  v1::GetStatusResponse status;
  const auto moved = [&](const std::string& what) {
    EXPECT_TRUE(watcher().Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
    for (const auto& latency : status.latencies()) {
      if (latency.what() == what) return latency.count() > 0 && latency.counts_size() == 13;
    }
    for (const auto& traffic : status.traffic()) {
      if (traffic.path() == what) return traffic.bytes() > 0;
    }
    return false;
  };
  EXPECT_TRUE(moved("open"));
  EXPECT_TRUE(moved("lookup"));
  EXPECT_TRUE(moved("rpc"));
  EXPECT_FALSE(moved("publish"));
  EXPECT_TRUE(Eventually([&] { return moved("memory_to_disk"); }));
}

// Who follows hears of what comes, and of the end, also when he reads nothing meanwhile.
TEST_F(EventsTest, FollowersHearToTheEndAndHoldUpNobody) {
  grpc::ClientContext context, idle_context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::WatchRequest follow;
  follow.set_follow(true);
  const auto reader = watcher().stub()->Watch(&context, follow);
  const auto idle = watcher().stub()->Watch(&idle_context, follow);  // never read
  uint64_t last = 0, evictions = 0;
  bool stopping = false;
  std::thread following([&] {
    for (v1::WatchResponse batch; reader->Read(&batch);) {
      last += batch.missed();
      for (const v1::Event& event : batch.events()) {
        EXPECT_EQ(event.number(), ++last);
        const Told told = ToldOf(event);
        evictions += Matches(told, "admin", {{"verb", "Evict"}});
        stopping |= Matches(told, "stopping", {{"signal", "Terminated"}});
      }
    }
  });
  for (int i = 0; i < 300; ++i) {
    v1::EvictResponse evicted;
    ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Evict, v1::EvictRequest(), &evicted).ok());
  }
  EXPECT_EQ(daemon_->Stop(SIGTERM), 0);
  following.join();
  EXPECT_EQ(evictions, 300u);
  EXPECT_TRUE(stopping);
  EXPECT_EQ(FromGrpc(reader->Finish()).reason(), "DAEMON_STOPPING");
  idle_context.TryCancel();
}

// Whoever read less than the ring has was told how much is missing.
TEST_F(EventsTest, ALateReaderIsToldWhatItMissed) {
  const uint64_t first = watcher().All().back().number;
  for (int i = 0; i < 1100; ++i) {
    v1::EvictResponse evicted;
    ASSERT_TRUE(watcher().Call(&v1::Admin::Stub::Evict, v1::EvictRequest(), &evicted).ok());
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::WatchRequest request;
  request.set_after(first);
  const auto reader = watcher().stub()->Watch(&context, request);
  uint64_t missed = 0, told = 0;
  for (v1::WatchResponse batch; reader->Read(&batch);) {
    missed += batch.missed();
    told += static_cast<uint64_t>(batch.events_size());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GE(missed, 100u);
  EXPECT_GE(told, 1000u);
}

// The deadline of a follower ends his call, as every call's does.
TEST_F(EventsTest, AFollowersDeadlineEndsIt) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::WatchRequest follow;
  follow.set_follow(true);
  const auto reader = watcher().stub()->Watch(&context, follow);
  v1::WatchResponse batch;
  while (reader->Read(&batch)) {
  }
  EXPECT_EQ(FromGrpc(reader->Finish()).reason(), "DEADLINE");
  EXPECT_FALSE(watcher().All().empty());
}

TEST(EventsOfDebugTest, SequencesOpenAndClose) {
  DaemonProcess daemon({"--set", "log.level=debug"});
  Watcher watcher(daemon.socket());
  Engine engine(Linked(), daemon.socket());
  const kvs_sequence s = engine.Prefill("quest", Prompt(2 * kPage, 1));
  ASSERT_NE(s, 0u);
  Told opened;
  ASSERT_TRUE(watcher.Tells("sequence_opened", {{"plan", "quest"}}, &opened));
  Linked().kvs_sequence_close(engine.session(), s);
  EXPECT_TRUE(watcher.Tells("sequence_closed", {{"sequence", opened.fields["sequence"]},
                                                {"session", opened.fields["session"]}}));
}

}  // namespace
}  // namespace kvstrata::testing
