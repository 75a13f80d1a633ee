#include "server/rpc/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <thread>

#include "base/unique_fd.h"
#include "server/attach/peer.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/compute_service.h"
#include "server/rpc/control_service.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

constexpr int kMaxConcurrentCalls = 128;  // of one connection
constexpr size_t kMessageMemory = size_t{1}
                                  << 30;  // of all messages that are being read or written
constexpr int kOutOfDescriptorsPauseMs = 100;
constexpr uint32_t kLogBurst = 5;  // refusals a second that are worth a line each

using Deadline = std::chrono::system_clock::time_point;

// One user's gRPC server. Services first: they outlive the server.
class UserServer {
 public:
  UserServer(const GrpcOptions& options, const PeerIdentity& user, bool admin, WorkQueue* queue)
      : context_(options, user, admin, queue),
        control_(&context_),
        compute_(&context_),
        admin_(&context_) {}

  Status Start(const grpc::ResourceQuota& quota) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&control_);
    builder.RegisterService(&compute_);
    builder.RegisterService(&admin_);
    builder.SetMaxReceiveMessageSize(GrpcServer::kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentCalls);
    builder.SetResourceQuota(quota);
    // Reflection is the one service that is not of the callback kind: few threads serve it.
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return Internal("GRPC_START", "gRPC did not start; see its log");
    auto* health = server_->GetHealthCheckService();
    for (const char* name : {"kvstrata.v1.Control", "kvstrata.v1.Compute", "kvstrata.v1.Admin"}) {
      health->SetServingStatus(name, true);
    }
    TellPools();
    return OkStatus();
  }

  // Their state to who asks grpc.health.v1.
  void TellPools() {
    auto* health = server_->GetHealthCheckService();
    bool devices = true;
    for (const PoolInfo& pool : context_.store().Pools()) {
      const std::string name = "kvstrata.pool." + std::string(NameOf(pool.tier));
      const bool serves = pool.failure.empty();
      if (pool.tier == Tier::kHost) {
        health->SetServingStatus(name, serves);
      } else {
        health->SetServingStatus(name + "." + pool.device, serves);
        devices = devices && serves;
      }
    }
    health->SetServingStatus("kvstrata.pool.device", devices);
  }

  void Take(UniqueFd connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = connection.release();
    acceptor_->HandleNewConnection(&parameters);
  }

  void EndSessions() {
    server_->GetHealthCheckService()->SetServingStatus(false);
    control_.streams().EndAll(Unavailable("DAEMON_STOPPING", "the daemon is stopping"));
  }
  // Returns when no call is left.
  void Shutdown(Deadline deadline) {
    server_->Shutdown(deadline);
    server_.reset();
  }

 private:
  ServiceContext context_;
  ControlService control_;
  ComputeService compute_;
  AdminService admin_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
};

int64_t NowSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// gRPC's own lines, in the daemon's format and not more of them than a hostile peer deserves.
void LogFromGrpc(gpr_log_func_args* line) {
  static Mutex mu;
  static LogLimiter limiter(kLogBurst);
  uint64_t suppressed = 0;
  {
    MutexLock lock(mu);
    if (!limiter.Allow(NowSeconds(), &suppressed)) return;
  }
  LogEvent(line->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarn : LogLevel::kDebug, "grpc",
           {{"why", line->message}, {"suppressed", suppressed}});
}

}  // namespace

class GrpcServer::Impl {
 public:
  explicit Impl(const GrpcOptions& options)
      : options_(options), queue_(std::make_unique<WorkQueue>(options.workers)) {
    quota_.Resize(kMessageMemory);
  }
  ~Impl() { Shutdown(std::chrono::milliseconds(0)); }

  Status Start();
  void Shutdown(std::chrono::milliseconds deadline);

 private:
  void AcceptLoop();
  void Accept(UniqueFd connection);
  Result<UserServer*> ServerOf(const PeerIdentity& user);
  void Refuse(const Status& why);

  const GrpcOptions options_;
  grpc::ResourceQuota quota_{"kvstrata"};
  // The accepting thread's, and the caller's before and after it runs.
  std::map<uint32_t, std::unique_ptr<UserServer>> users_;
  LogLimiter refusals_{kLogBurst};
  // Goes before the services that its tasks use.
  std::unique_ptr<WorkQueue> queue_;
  UniqueFd stop_;
  std::thread accepting_;
};

Status GrpcServer::Impl::Start() {
  KVS_CHECK(options_.store != nullptr && options_.backend != nullptr &&
            options_.executor != nullptr && options_.listen_fd >= 0);
  gpr_set_log_function(&LogFromGrpc);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  stop_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_) return Internal("GRPC_START", std::string("eventfd: ") + std::strerror(errno));
  // Our own user's first, so that the first command of an operator does not wait for it.
  PeerIdentity own;
  own.uid = geteuid();
  own.gid = getegid();
  own.tenant = "uid:" + std::to_string(own.uid);
  KVS_RETURN_IF_ERROR(ServerOf(own).status());
  accepting_ = std::thread([this] { AcceptLoop(); });
  return OkStatus();
}

Result<UserServer*> GrpcServer::Impl::ServerOf(const PeerIdentity& user) {
  const auto found = users_.find(user.uid);
  if (found != users_.end()) return found->second.get();
  if (users_.size() >= kMaxUsers) {
    return ResourceExhausted(
        "USERS", std::to_string(kMaxUsers) + " users have connected already; restart the daemon");
  }
  PeerIdentity identity = user;
  identity.pid = 0;  // the server serves all processes of the user
  const bool admin = user.uid == 0 || user.uid == geteuid();
  auto server = std::make_unique<UserServer>(options_, identity, admin, queue_.get());
  KVS_RETURN_IF_ERROR(server->Start(quota_));
  return users_.emplace(user.uid, std::move(server)).first->second.get();
}

void GrpcServer::Impl::AcceptLoop() {
  pollfd waits[3] = {
      {stop_.get(), POLLIN, 0}, {options_.listen_fd, POLLIN, 0}, {options_.pools_fd, POLLIN, 0}};
  for (;;) {
    if (poll(waits, 3, -1) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    if (eventfd_t told = 0; waits[2].revents != 0 && eventfd_read(options_.pools_fd, &told) == 0) {
      for (const auto& [uid, user] : users_) user->TellPools();
    }
    if (waits[1].revents == 0) continue;
    UniqueFd connection(
        accept4(options_.listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection) {
      Accept(std::move(connection));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      Refuse(ResourceExhausted("DESCRIPTORS", std::string("accept: ") + std::strerror(errno)));
      poll(waits, 1, kOutOfDescriptorsPauseMs);  // until somebody closes one, or we stop
    }
  }
}

void GrpcServer::Impl::Accept(UniqueFd connection) {
  const Result<PeerIdentity> peer = IdentityOf(connection.get());
  if (!peer.ok()) return Refuse(peer.status());
  const Result<UserServer*> server = ServerOf(*peer);
  if (!server.ok()) return Refuse(server.status());
  (*server)->Take(std::move(connection));
}

void GrpcServer::Impl::Refuse(const Status& why) {
  uint64_t suppressed = 0;
  if (!refusals_.Allow(NowSeconds(), &suppressed)) return;
  LogEvent(LogLevel::kWarn, "connection_refused",
           {{"reason", why.reason()}, {"why", why.message()}, {"suppressed", suppressed}});
}

void GrpcServer::Impl::Shutdown(std::chrono::milliseconds deadline) {
  if (queue_ == nullptr) return;
  const Deadline end = std::chrono::system_clock::now() + deadline;
  if (accepting_.joinable()) {
    KVS_CHECK(eventfd_write(stop_.get(), 1) == 0);
    accepting_.join();
  }
  for (const auto& [uid, user] : users_) user->EndSessions();
  for (const auto& [uid, user] : users_) user->Shutdown(end);
  queue_.reset();  // ends the sessions in the store
  users_.clear();
}

Result<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  KVS_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() = default;

void GrpcServer::Shutdown(std::chrono::milliseconds deadline) { impl_->Shutdown(deadline); }

}  // namespace kvstrata
