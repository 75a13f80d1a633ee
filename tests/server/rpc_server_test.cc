// SPDX-License-Identifier: Apache-2.0
// The server around the services: health, reflection, limits, hostile bytes, many clients,
// shutdown.
#include <fcntl.h>
#include <grpcpp/impl/client_unary_call.h>
#include <poll.h>
#include <sys/stat.h>

#include <future>
#include <new>
#include <sstream>

#include "base/sync.h"
#include "server/rpc/calls/service_context.h"
#include "server/telemetry/event_ring.h"
#include "server/telemetry/log.h"
#include "server/telemetry/refusals.h"
#include "tests/fakes/failing_resource.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

// Messages of services that Debian ships no generated code for, as bytes.
Result<std::string> RawCall(const std::shared_ptr<grpc::Channel>& channel, const char* method,
                            const std::string& request) {
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::NORMAL_RPC, channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::Slice slice(request);
  grpc::ByteBuffer in(&slice, 1), out;
  grpc::internal::BlockingUnaryCallImpl<grpc::ByteBuffer, grpc::ByteBuffer> call(
      channel.get(), rpc, &context, in, &out);
  KVS_RETURN_IF_ERROR(FromGrpc(call.status()));
  grpc::Slice flat;
  if (!out.DumpToSingleSlice(&flat).ok()) return Internal("TEST", "no bytes");
  return std::string(reinterpret_cast<const char*>(flat.begin()), flat.size());
}

Result<std::string> Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& name) {
  std::string request;  // HealthCheckRequest {string service = 1}
  if (!name.empty()) request = "\x0a" + std::string(1, static_cast<char>(name.size())) + name;
  return RawCall(channel, "/grpc.health.v1.Health/Check", request);
}

const std::string kServing = {0x08, 0x01};  // HealthCheckResponse {status = SERVING}

TEST(RpcServer, HealthIsServing) {
  RpcDaemon daemon;
  const auto channel = daemon.Connect();
  EXPECT_EQ(Health(channel, "").value(), kServing);
  EXPECT_EQ(Health(channel, "kvstrata.v1.Compute").value(), kServing);
  EXPECT_EQ(Health(channel, "kvstrata.v1.Nothing").status().code(), Code::kNotFound);
}

const std::string kNotServing = {0x08, 0x02};

TEST(RpcServer, APoolWhoseDeviceIsLostIsNotServing) {
  const auto lost = std::make_shared<std::atomic<bool>>(false);
  RpcDaemon daemon(uint64_t{64} << 20, nullptr, NewLosableResource(NewEmulatedDevice(), lost));
  const auto channel = daemon.Connect();
  EXPECT_EQ(Health(channel, "kvstrata.pool.device").value(), kServing);
  *lost = true;
  RpcClient client(channel);
  ASSERT_TRUE(client.Open(client.RegisterModel(), "full", Ids(20)).ok()) << "the host has room";
  EXPECT_TRUE(
      Eventually([&] { return Health(channel, "kvstrata.pool.device").value() == kNotServing; }));
  EXPECT_EQ(Health(channel, "kvstrata.pool.host").value(), kServing);
  EXPECT_EQ(Health(channel, "").value(), kServing);
  v1::GetStatusResponse status;
  ASSERT_TRUE(
      Call(*client.admin, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
  EXPECT_NE(status.pools(0).failure(), "");
  EXPECT_EQ(status.pools(1).failure(), "");
}

TEST(RpcServer, OneOfTwoDevicesIsNotServing) {
  const auto lost = std::make_shared<std::atomic<bool>>(false);
  RpcDaemon daemon(uint64_t{64} << 20, nullptr, NewEmulatedDevice(),
                   NewLosableResource(NewEmulatedDevice(), lost));
  const auto channel = daemon.Connect();
  EXPECT_EQ(Health(channel, "kvstrata.pool.device.emulated-1").value(), kServing);
  *lost = true;
  const std::string second = "emulated-1";
  RpcClient client(channel, "", second);
  ASSERT_TRUE(client.Open(client.RegisterModel(), "full", Ids(20)).ok()) << "the host has room";
  EXPECT_TRUE(Eventually(
      [&] { return Health(channel, "kvstrata.pool.device.emulated-1").value() == kNotServing; }));
  EXPECT_EQ(Health(channel, "kvstrata.pool.device").value(), kNotServing) << "not all of them";
  EXPECT_EQ(Health(channel, "kvstrata.pool.device.emulated").value(), kServing);
  EXPECT_EQ(Health(channel, "kvstrata.pool.host").value(), kServing);
  v1::GetStatusResponse status;
  ASSERT_TRUE(
      Call(*client.admin, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
  ASSERT_EQ(status.pools_size(), 3);
  EXPECT_EQ(status.pools(0).device(), "emulated");
  EXPECT_EQ(status.pools(0).failure(), "");
  EXPECT_EQ(status.pools(1).device(), "emulated-1");
  EXPECT_NE(status.pools(1).failure(), "");
  EXPECT_EQ(status.pools(2).tier(), "host");
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(
      Call(*client.admin, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &sessions)
          .ok());
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).device(), second);
}

TEST(RpcServer, APoolIsResizedByItsDevice) {
  RpcDaemon daemon(uint64_t{64} << 20, nullptr, NewEmulatedDevice(), NewEmulatedDevice());
  RpcClient client(daemon.Connect());
  const auto resize = [&](const char* tier, const char* device) {
    v1::ResizeRequest request;
    request.set_tier(tier);
    request.set_device(device);
    request.set_bytes(32 << 20);
    v1::ResizeResponse response;
    return Call(*client.admin, &v1::Admin::Stub::Resize, request, &response);
  };
  ASSERT_TRUE(resize("device", "emulated-1").ok());
  EXPECT_EQ(daemon.store().inspection().Pools()[0].capacity_bytes, uint64_t{64} << 20);
  EXPECT_EQ(daemon.store().inspection().Pools()[1].capacity_bytes, uint64_t{32} << 20);
  EXPECT_EQ(resize("device", "moon").reason(), "DEVICE_UNKNOWN");
  ASSERT_TRUE(resize("device", "").ok());
  EXPECT_EQ(daemon.store().inspection().Pools()[0].capacity_bytes, uint64_t{32} << 20);
}

TEST(RpcServer, ReflectionListsTheServices) {
  RpcDaemon daemon;
  const auto channel = daemon.Connect();
  // ServerReflectionRequest {string list_services = 7}
  const grpc::internal::RpcMethod rpc(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      grpc::internal::RpcMethod::BIDI_STREAMING, channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel.get(), rpc, &context));
  grpc::Slice slice(std::string("\x3a\x01*", 3));
  ASSERT_TRUE(stream->Write(grpc::ByteBuffer(&slice, 1)));
  stream->WritesDone();
  grpc::ByteBuffer answer;
  ASSERT_TRUE(stream->Read(&answer));
  grpc::Slice flat;
  ASSERT_TRUE(answer.DumpToSingleSlice(&flat).ok());
  const std::string text(reinterpret_cast<const char*>(flat.begin()), flat.size());
  for (const char* name : {"kvstrata.v1.Control", "kvstrata.v1.Compute", "kvstrata.v1.Admin"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  while (stream->Read(&answer)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(RpcServer, AMessageThatIsTooLargeIsRefusedAndTheConnectionGoesOn) {
  RpcDaemon daemon;
  RpcClient client(daemon.Connect());
  v1::AppendRequest request;
  request.set_session(client.session());
  request.mutable_k()->mutable_inline_()->resize(GrpcServer::kMaxMessageBytes + 1);
  v1::AppendResponse response;
  const Status refused = Call(*client.compute, &v1::Compute::Stub::Append, request, &response);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.reason(), "MESSAGE_TOO_LARGE");
  request.mutable_k()->mutable_inline_()->resize(GrpcServer::kMaxMessageBytes - 1024);
  EXPECT_EQ(Call(*client.compute, &v1::Compute::Stub::Append, request, &response).reason(),
            "STEP_UNKNOWN");
}

TEST(RpcServer, AnUnknownMethodIsUnimplemented) {
  RpcDaemon daemon;
  EXPECT_EQ(RawCall(daemon.Connect(), "/kvstrata.v1.Control/Nothing", "").status().code(),
            Code::kUnimplemented);
}

TEST(RpcServer, BytesThatAreNoMessageAreRefused) {
  RpcDaemon daemon;
  const auto channel = daemon.Connect();
  const Status s = RawCall(channel, "/kvstrata.v1.Control/ShowPlan", "\xff\xff\xff\xff").status();
  EXPECT_EQ(s.code(), Code::kInvalidArgument);
  EXPECT_EQ(s.reason(), "REQUEST_MALFORMED");
  EXPECT_EQ(Health(channel, "").value(), kServing);
}

// The daemon's own word and the disk's, to every user; a change without a signal within seconds.
TEST(RpcServer, HealthFollowsTheDaemonAndItsDisk) {
  Mutex mu;
  std::string state = "serving";
  DiskInfo disk;
  RpcDaemon daemon(uint64_t{64} << 20, [&](Store*, GrpcOptions* options) {
    options->health = [&] {
      MutexLock lock(mu);
      return state;
    };
    options->disk = [&] {
      MutexLock lock(mu);
      return disk;
    };
  });
  std::vector<std::shared_ptr<grpc::Channel>> users = {daemon.Connect()};
  if (geteuid() == 0) {
    std::filesystem::permissions(daemon.folder(), std::filesystem::perms(0755));
    std::filesystem::permissions(daemon.path(), std::filesystem::perms(0666));
    UniqueFd other = daemon.Dial(4242);
    ASSERT_TRUE(other);
    users.push_back(grpc::CreateInsecureChannelFromFd("other", other.release()));
  }
  const auto becomes = [&](std::string_view word, bool sick, bool draining,
                           const std::string& whole, const std::string& tier,
                           const std::string& writes) {
    {
      MutexLock lock(mu);
      state = word;
      disk.sick = sick;
      disk.draining = draining;
    }
    for (const auto& user : users) {
      EXPECT_TRUE(Eventually([&] {
        return Health(user, "").value() == whole &&
               Health(user, "kvstrata.v1.Control").value() == whole &&
               Health(user, "kvstrata.disk").value() == tier &&
               Health(user, "kvstrata.disk.writes").value() == writes;
      })) << word;
      EXPECT_EQ(Health(user, "kvstrata.pool.host").value(), kServing);
    }
  };
  becomes("serving", false, false, kServing, kServing, kServing);
  becomes("serving", false, true, kServing, kServing, kNotServing);
  becomes("degraded: the disk", true, false, kServing, kNotServing, kNotServing);
  // An operator is told all of one look.
  v1::GetStatusResponse status;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::Admin::NewStub(users[0])->GetStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.health(), "degraded: the disk");
  std::map<std::string, bool> names;
  for (const v1::HealthName& name : status.health_names()) names[name.name()] = name.serves();
  EXPECT_FALSE(names.at("kvstrata.disk"));
  EXPECT_TRUE(names.at("kvstrata.pool.host"));
  EXPECT_TRUE(names.at(""));
  becomes("the attach loop hangs", true, false, kNotServing, kNotServing, kNotServing);
  becomes("serving", false, false, kServing, kServing, kServing);
}

// --- hostile HTTP/2 ------------------------------------------------------------------------------

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  const size_t n = payload.size();
  std::string f = {static_cast<char>(n >> 16), static_cast<char>(n >> 8), static_cast<char>(n),
                   static_cast<char>(type), static_cast<char>(flags)};
  for (int shift = 24; shift >= 0; shift -= 8) f.push_back(static_cast<char>(stream >> shift));
  return f + payload;
}

// HPACK: literal without indexing, new name, no Huffman.
std::string Literal(const std::string& name, const std::string& value) {
  const auto text = [](const std::string& s) {
    std::string out;
    size_t n = s.size();
    if (n < 127) {
      out.push_back(static_cast<char>(n));
    } else {
      out.push_back(127);
      for (n -= 127; n >= 128; n >>= 7) out.push_back(static_cast<char>(n % 128 + 128));
      out.push_back(static_cast<char>(n));
    }
    return out + s;
  };
  return std::string(1, '\0') + text(name) + text(value);
}

// Sends the preface, settings and `attack`; reads until the daemon hangs up or answers a while.
void Attack(const RpcDaemon& daemon, const std::string& attack) {
  const UniqueFd fd = daemon.Dial();
  ASSERT_TRUE(fd);
  const std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "") + attack;
  ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  shutdown(fd.get(), SHUT_WR);
  char buffer[4096];
  pollfd p{fd.get(), POLLIN, 0};
  while (poll(&p, 1, 20000) == 1 && read(fd.get(), buffer, sizeof(buffer)) > 0) {
  }
}

TEST(RpcServer, HeadersOfMoreThanEightKilobytesDoNotKillIt) {
  RpcDaemon daemon;
  const std::string request = Literal(":method", "POST") + Literal(":scheme", "http") +
                              Literal(":path", "/kvstrata.v1.Control/Ping") +
                              Literal("content-type", "application/grpc");
  const std::string large = Literal("x-large", std::string(9000, 'x'));
  constexpr uint8_t kHeaders = 1, kContinuation = 9, kEndHeaders = 4;
  // CVE-2023-1428: a header that gRPC parses itself with a value it does not know, then one that
  // goes over the limit.
  for (const std::string& poison :
       {Literal("te", "x"), Literal(":scheme", "x"), Literal("grpclb_client_stats", "x"), large}) {
    Attack(daemon, Frame(kHeaders, kEndHeaders, 1, poison + request + large));
    Attack(daemon, Frame(kHeaders, kEndHeaders, 1, request + poison + large));
    Attack(daemon,
           Frame(kHeaders, 0, 1, request + poison) + Frame(kContinuation, kEndHeaders, 1, large));
  }
  std::string flood = Frame(kHeaders, 0, 1, request);
  for (int i = 0; i < 200; ++i) flood += Frame(kContinuation, 0, 1, Literal("a", "b"));
  Attack(daemon, flood);  // never ends its headers
  Attack(daemon, Frame(kHeaders, kEndHeaders, 1, std::string(64, '\xff')));  // no HPACK at all
  Attack(daemon, Frame(kHeaders, kEndHeaders, 1, Literal("x-bin", std::string(9000, '!'))));
  Attack(daemon, std::string(5000, '\0'));
  EXPECT_EQ(Health(daemon.Connect(), "").value(), kServing);
  RpcClient client(daemon.Connect());
  EXPECT_TRUE(client.failure.ok());
}

uint64_t MalformedRequests() {
  for (const auto& [reason, count] : Refusals()) {
    if (reason == "REQUEST_MALFORMED") return count;
  }
  return 0;
}

uint64_t LastEvent() {
  uint64_t last = RecentEvents().Begin(), missed = 0;
  while (const auto event = RecentEvents().Next(last, &missed)) last = event->number;
  return last;
}

// How many events of that name and first field there are since the one of that number.
size_t EventsSince(uint64_t after, std::string_view name, std::string_view first) {
  size_t count = 0;
  uint64_t missed = 0;
  while (const auto event = RecentEvents().Next(after, &missed)) {
    after = event->number;
    count += event->name == name && event->fields[0].value == first;
  }
  return count;
}

// kvstrata top asks it each second.
TEST(RpcServer, WhatOnlyLooksIsNoneOfTheEventsThatAreKept) {
  RpcDaemon daemon;
  RpcClient client(daemon.Connect());
  const auto opened = client.Open(client.RegisterModel(), "quest{min_tokens = 0}", Ids(20));
  ASSERT_TRUE(opened.ok());
  const uint64_t before = LastEvent();
  v1::SampleSelectionsRequest request;
  request.set_sequence(opened.value().sequence());
  v1::SampleSelectionsResponse response;
  ASSERT_TRUE(Call(*client.admin, &v1::Admin::Stub::SampleSelections, request, &response).ok());
  v1::EvictResponse evicted;
  ASSERT_TRUE(Call(*client.admin, &v1::Admin::Stub::Evict, v1::EvictRequest(), &evicted).ok());
  EXPECT_EQ(EventsSince(before, "admin", "Evict"), 1u);
  EXPECT_EQ(EventsSince(before, "admin", "SampleSelections"), 0u);
}

// gRPC may hand a call without its message to the service when its deadline passes meanwhile: some
// of these do, whichever.
TEST(RpcServer, ACallWhoseDeadlinePassesIsNoMalformedOne) {
  const uint64_t refused = MalformedRequests();
  {
    RpcDaemon daemon;
    RpcClient client(daemon.Connect());
    for (int i = 0; i < 500; ++i) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::microseconds(100 + i * 4));
      v1::GetStatusResponse response;
      (void)client.admin->GetStatus(&context, v1::GetStatusRequest(), &response);
    }
    (void)RawCall(daemon.Connect(), "/kvstrata.v1.Control/ShowPlan", "\xff\xff\xff\xff");
    EXPECT_TRUE(Eventually([&] { return MalformedRequests() == refused + 1; }));
  }
  EXPECT_EQ(MalformedRequests(), refused + 1);
}

TEST(RpcServer, ConnectionsThatSayNothingHoldNobodyUp) {
  RpcDaemon daemon;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(daemon.Dial());
  EXPECT_EQ(Health(daemon.Connect(), "").value(), kServing);
}

TEST(RpcServer, ManyClientsComeAndGo) {
  RpcDaemon daemon;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&daemon, &right, i] {
      RpcClient client(daemon.Connect());
      std::mt19937 random(static_cast<unsigned>(i));
      const auto opened = client.Open(client.RegisterModel(), "full", Ids(8, i * 100));
      if (opened.ok() && client.Run(opened.value().sequence(), Ids(8, i * 100), &random).ok()) {
        ++right;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(right, 16);
  EXPECT_TRUE(Eventually([&] { return daemon.store().inspection().Sessions().empty(); }));
  EXPECT_EQ(daemon.UsedBytes(), 0u);
}

TEST(RpcServer, CallsOfASessionRunInOrderWhateverThreadSendsThem) {
  RpcDaemon daemon;
  RpcClient client(daemon.Connect());
  const uint64_t model = client.RegisterModel();
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(static_cast<unsigned>(i));
      const uint64_t sequence = client.Open(model, "full", {}).value().sequence();
      bool ok = true;
      for (int t = 0; t < 20; ++t) ok = ok && client.Run(sequence, {t}, &random).ok();
      right += ok;
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(right, 8);
  const AuditReport audit = daemon.store().inspection().Audit();
  EXPECT_TRUE(audit.findings.empty()) << audit.findings.front();
}

TEST(RpcServer, ShutdownTellsSessionsAndReturnsTheirPages) {
  RpcDaemon daemon;
  RpcClient client(daemon.Connect());
  ASSERT_TRUE(client.Open(client.RegisterModel(), "full", Ids(40)).ok());
  auto ended = std::async(std::launch::async, [&] { return client.AwaitEnd(); });
  daemon.server().Shutdown(std::chrono::seconds(5));
  ASSERT_EQ(ended.wait_for(kDeadline), std::future_status::ready);
  const Status why = ended.get();
  EXPECT_EQ(why.code(), Code::kUnavailable);
  EXPECT_EQ(why.reason(), "DAEMON_STOPPING");
  EXPECT_TRUE(daemon.store().inspection().Sessions().empty());
  EXPECT_EQ(daemon.UsedBytes(), 0u);
  daemon.server().Shutdown(std::chrono::seconds(5));  // again: nothing
}

TEST(RpcServer, ShutdownDoesNotWaitForAStreamThatNobodyReads) {
  RpcDaemon daemon;
  std::vector<std::unique_ptr<RpcClient>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(std::make_unique<RpcClient>(daemon.Connect()));
  auto down = std::async(std::launch::async,
                         [&] { daemon.server().Shutdown(std::chrono::milliseconds(100)); });
  EXPECT_EQ(down.wait_for(kDeadline), std::future_status::ready);
}

// As an idle client, one that is not there any more, and one in the middle of a frame are.
TEST(RpcServer, ShutdownDoesNotWaitForConnectionsThatSayNothing) {
  RpcDaemon daemon;
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "");
  std::vector<UniqueFd> peers;
  for (const size_t bytes : {size_t{0}, size_t{10}, preface.size()}) {
    peers.push_back(daemon.Dial());
    ASSERT_EQ(send(peers.back().get(), preface.data(), bytes, MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes));
  }
  EXPECT_EQ(Health(daemon.Connect(), "").value(), kServing);  // those before it were accepted
  daemon.server().Shutdown(std::chrono::milliseconds(0));
  for (const UniqueFd& peer : peers) {
    pollfd hangup{peer.get(), POLLHUP, 0};
    EXPECT_EQ(poll(&hangup, 1, 0), 1) << "cut when Shutdown returns";
  }
}

TEST(RpcServer, CallsAfterTheEndOfServingSayThatItStops) {
  RpcDaemon daemon;
  const auto channel = daemon.Connect();
  RpcClient client(channel);
  daemon.server().EndServing(std::chrono::milliseconds(0));
  v1::PingRequest request;
  request.set_session(client.session());
  v1::PingResponse response;
  const Status s = Call(*client.control, &v1::Control::Stub::Ping, request, &response);
  EXPECT_EQ(s.reason(), "DAEMON_STOPPING") << s.ToString();
  v1::AuditResponse audit;
  const Status queued = Call(*client.admin, &v1::Admin::Stub::Audit, v1::AuditRequest(), &audit);
  EXPECT_EQ(queued.reason(), "DAEMON_STOPPING") << queued.ToString();
}

// As the daemon's user, and as nobody.
TEST(RpcServer, ReflectionIsNotForOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "dials as another user, which root alone may";
  RpcDaemon daemon;
  ASSERT_EQ(chmod(daemon.folder().c_str(), 0755), 0);
  ASSERT_EQ(chmod(daemon.path().c_str(), 0666), 0);
  UniqueFd fd = daemon.Dial(65534);
  ASSERT_TRUE(fd);
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  const auto channel = grpc::CreateInsecureChannelFromFd("nobody", fd.release());
  EXPECT_EQ(Health(channel, "").value(), kServing);
  const Status s =
      RawCall(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "")
          .status();
  EXPECT_EQ(s.code(), Code::kUnimplemented) << s.ToString();
}

TEST(RpcServer, WhatLibrariesSayIsOneEventALine) {
  InitLog(LogLevel::kDebug, LogFormat::kJson);
  ::testing::internal::CaptureStderr();
  {
    RpcDaemon daemon;
    const auto channel = daemon.Connect();
    for (int i = 0; i < 100; ++i) {  // ShowPlanRequest.plan, no UTF-8
      (void)RawCall(channel, "/kvstrata.v1.Control/ShowPlan", "\x0a\x02\xff\xfe");
    }
  }
  std::istringstream said(::testing::internal::GetCapturedStderr());
  InitLog(LogLevel::kInfo, LogFormat::kText);
  int protobuf = 0, other = 0;
  for (std::string line; std::getline(said, line);) {
    EXPECT_EQ(line.front(), '{') << line;
    ++(line.find("\"event\":\"protobuf\"") != line.npos ? protobuf : other);
  }
  EXPECT_GE(protobuf, 1);
  EXPECT_LT(protobuf, 100) << "they are limited";
}

TEST(RpcServer, WantOfMemoryIsTheCallsAnswer) {
  const grpc::Status status = ServiceContext::Outcome([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(FromGrpc(status).reason(), "MEMORY");
}

}  // namespace
}  // namespace kvstrata::test
