// SPDX-License-Identifier: Apache-2.0
// A store with its gRPC services on a temporary socket, and a client of them, for tests in one
// process. Every call and wait has a deadline.
#pragma once

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "kvstrata/v1/compute.grpc.pb.h"
#include "kvstrata/v1/control.grpc.pb.h"
#include "proto/status_map.h"
#include "server/rpc/grpc_server.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/unix_listener.h"
#include "server/store/store.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::test {

inline constexpr std::chrono::seconds kDeadline{20};

inline bool Eventually(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

class RpcDaemon {
 public:
  // `more` adds to the options of the server before it starts.
  explicit RpcDaemon(uint64_t pool_bytes = uint64_t{64} << 20,
                     const std::function<void(Store*, GrpcOptions*)>& more = nullptr,
                     std::unique_ptr<MemoryResource> device = NewEmulatedDevice(),
                     std::unique_ptr<MemoryResource> second_device = nullptr,
                     std::shared_ptr<UserLimits> limits = nullptr) {
    StoreOptions options;
    options.device_bytes = pool_bytes;
    options.host_bytes = pool_bytes;
    options.user_limits = std::move(limits);
    options.arena_bytes = uint64_t{1} << 20;  // a session takes at least one of each pool it uses
    options.named_plans = {{"mine", "window{n_recent = 64}"}};
    pools_failed_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    options.on_pool_failure = [this](PoolId, const Status&) {
      (void)eventfd_write(pools_failed_.get(), 1);
    };
    std::vector<StoreDevice> devices;
    devices.push_back({"emulated", std::move(device)});
    if (second_device) devices.push_back({"emulated-1", std::move(second_device)});
    store_ = std::move(Store::Create(options, std::move(devices), NewHostMemory())).value();
    listener_ = std::move(UnixListener::Listen(path(), SOCK_STREAM, -1)).value();
    executor_ = NewThreadPool(2);
    GrpcOptions grpc;
    grpc.listen_fd = listener_->fd();
    grpc.socket_path = path();
    grpc.store = store_.get();
    grpc.pools_fd = pools_failed_.get();
    grpc.backend = FindBackend("ref").value();
    grpc.executor = executor_.get();
    grpc.closer = &closer_;
    grpc.version = "1.2.3";
    grpc.commit = "abc";
    grpc.config = [] {
      return std::vector<ConfigItem>{{"log.level", "info", "default"},
                                     {"plans.mine", "window{n_recent = 64}", "file", "/k:7:1"}};
    };
    if (more) more(store_.get(), &grpc);
    server_ = std::move(GrpcServer::Start(grpc)).value();
  }
  ~RpcDaemon() { server_.reset(); }

  std::string path() const { return folder_ / "k.sock"; }
  const std::string& folder() const { return folder_.path(); }
  Store& store() { return *store_; }
  GrpcServer& server() { return *server_; }

  // A connection of its own each time.
  std::shared_ptr<grpc::Channel> Connect(int max_receive = -1) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(max_receive);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("unix:" + path(), grpc::InsecureChannelCredentials(),
                                     arguments);
  }

  // A connected socket; `uid` other than ours needs root.
  UniqueFd Dial(uid_t uid = geteuid()) const {
    UniqueFd fd;
    // On a thread of its own: the raw system call changes this thread's user alone.
    std::thread([&] {
      if (uid != geteuid() && syscall(SYS_setresuid, -1, uid, -1) != 0) return;
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path, path().data(), path().size());
      UniqueFd s(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (connect(s.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
        fd = std::move(s);
      }
    }).join();
    return fd;
  }

  // Bytes that something other than the prefix index refers to.
  uint64_t UsedBytes() const {
    uint64_t bytes = 0;
    for (const PoolInfo& p : store_->inspection().Pools()) bytes += p.used_bytes - p.cached_bytes;
    return bytes;
  }

 private:
  const ScratchDir folder_;
  UniqueFd pools_failed_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<UnixListener> listener_;
  std::unique_ptr<Executor> executor_;
  DescriptorCloser closer_;
  std::unique_ptr<GrpcServer> server_;
};

// One unary call with a deadline.
template <typename Stub, typename Request, typename Response>
Status Call(Stub& stub,
            grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const Request& request, Response* response, grpc::Status* raw = nullptr) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const grpc::Status status = (stub.*method)(&context, request, response);
  if (raw != nullptr) *raw = status;
  return FromGrpc(status);
}

// A session and the calls that need one.
class RpcClient {
 public:
  explicit RpcClient(std::shared_ptr<grpc::Channel> channel, const std::string& backend = "",
                     const std::string& device = "")
      : control(v1::Control::NewStub(channel)),
        compute(v1::Compute::NewStub(channel)),
        admin(v1::Admin::NewStub(channel)) {
    v1::OpenSessionRequest request;
    request.set_client_name("test");
    request.set_backend(backend);
    request.set_device_uuid(device);
    stream_ = control->OpenSession(&context_, request);
    if (stream_->Read(&opened)) return;
    failure = FromGrpc(stream_->Finish());
    stream_ = nullptr;
  }
  ~RpcClient() { Cancel(); }

  // Ends the stream as a client that dies does.
  void Cancel() {
    if (stream_ == nullptr) return;
    context_.TryCancel();
    (void)stream_->Finish();
    stream_ = nullptr;
  }
  // What the stream ends with when the daemon ends it.
  Status AwaitEnd() {
    v1::OpenSessionResponse more;
    while (stream_->Read(&more)) {
    }
    const grpc::Status status = stream_->Finish();
    stream_ = nullptr;
    return FromGrpc(status);
  }
  uint64_t session() const { return opened.session(); }

  static v1::RegisterModelRequest ModelOf(uint64_t session) {
    v1::RegisterModelRequest r;
    r.set_session(session);
    r.set_name("toy");
    r.set_digest("digest");
    v1::Geometry* g = r.mutable_geometry();
    g->set_layers(2);
    g->set_query_heads(4);
    g->set_kv_heads(2);
    g->set_head_dim(64);
    g->set_page_tokens(16);
    g->set_dtype(v1::DTYPE_F32);
    return r;
  }
  uint64_t RegisterModel() {
    v1::RegisterModelResponse response;
    const Status s =
        Call(*control, &v1::Control::Stub::RegisterModel, ModelOf(session()), &response);
    EXPECT_TRUE(s.ok()) << s.ToString();
    return response.model();
  }
  Result<v1::OpenSequenceResponse> Open(uint64_t model, const std::string& plan,
                                        const std::vector<int32_t>& tokens) {
    v1::OpenSequenceRequest request;
    request.set_session(session());
    request.set_model(model);
    request.set_plan(plan);
    request.mutable_tokens()->Add(tokens.begin(), tokens.end());
    v1::OpenSequenceResponse response;
    KVS_RETURN_IF_ERROR(Call(*control, &v1::Control::Stub::OpenSequence, request, &response));
    return response;
  }
  Result<uint64_t> Begin(uint64_t sequence, const std::vector<int32_t>& tokens) {
    v1::StepBeginRequest request;
    request.set_session(session());
    v1::StepMember* m = request.add_members();
    m->set_sequence(sequence);
    m->mutable_tokens()->Add(tokens.begin(), tokens.end());
    v1::StepBeginResponse response;
    KVS_RETURN_IF_ERROR(Call(*compute, &v1::Compute::Stub::StepBegin, request, &response));
    return response.step();
  }
  Status End(uint64_t step, bool abort = false) {
    v1::StepEndRequest request;
    request.set_session(session());
    request.set_step(step);
    request.set_abort(abort);
    v1::StepEndResponse response;
    return Call(*compute, &v1::Compute::Stub::StepEnd, request, &response);
  }
  Status Append(uint64_t step, int layer, const v1::TensorRef& k, const v1::TensorRef& v) {
    v1::AppendRequest request;
    request.set_session(session());
    request.set_step(step);
    request.set_layer(layer);
    *request.mutable_k() = k;
    *request.mutable_v() = v;
    v1::AppendResponse response;
    return Call(*compute, &v1::Compute::Stub::Append, request, &response);
  }
  v1::AttendRequest AttendOf(uint64_t step, int layer, const v1::TensorRef& q) const {
    v1::AttendRequest request;
    request.set_session(session());
    request.set_step(step);
    request.set_layer(layer);
    *request.mutable_q() = q;
    request.set_want_lse(true);
    request.set_want_selection(true);
    return request;
  }
  // A request that names this session and a sequence.
  template <typename Request>
  Request Of(uint64_t sequence) const {
    Request request;
    request.set_session(session());
    request.set_sequence(sequence);
    return request;
  }
  // Runs `tokens` through both layers with random rows and commits.
  Status Run(uint64_t sequence, const std::vector<int32_t>& tokens, std::mt19937* random);

  std::unique_ptr<v1::Control::Stub> control;
  std::unique_ptr<v1::Compute::Stub> compute;
  std::unique_ptr<v1::Admin::Stub> admin;
  v1::OpenSessionResponse opened;
  Status failure;  // why there is no session

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::OpenSessionResponse>> stream_;
};

// fp32 rows of standard normal numbers.
inline v1::TensorRef RandomTensor(int tokens, int heads, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(tokens) * heads * 64);
  for (float& e : x) e = normal(*random);
  v1::TensorRef t;
  t.set_dtype(v1::DTYPE_F32);
  t.set_tokens(tokens);
  t.set_heads(heads);
  t.set_head_dim(64);
  t.set_inline_(x.data(), x.size() * sizeof(float));
  return t;
}

inline Status RpcClient::Run(uint64_t sequence, const std::vector<int32_t>& tokens,
                             std::mt19937* random) {
  KVS_ASSIGN_OR_RETURN(const uint64_t step, Begin(sequence, tokens));
  const int n = static_cast<int>(tokens.size());
  for (int layer = 0; layer < 2; ++layer) {
    KVS_RETURN_IF_ERROR(
        Append(step, layer, RandomTensor(n, 2, random), RandomTensor(n, 2, random)));
    v1::AttendResponse response;
    KVS_RETURN_IF_ERROR(Call(*compute, &v1::Compute::Stub::Attend,
                             AttendOf(step, layer, RandomTensor(n, 4, random)), &response));
  }
  return End(step);
}

inline std::vector<int32_t> Ids(int n, int32_t first = 1) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = first + i;
  return ids;
}

}  // namespace kvstrata::test
