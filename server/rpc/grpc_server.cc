// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/grpc_server.h"

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
#include <optional>
#include <thread>

#include "base/descriptors.h"
#include "base/unique_fd.h"
#include "server/attach/peers/peer.h"
#include "server/rpc/admin/admin_messages.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/call_records.h"
#include "server/rpc/calls/grpc_connections.h"
#include "server/rpc/calls/grpc_library.h"
#include "server/rpc/calls/refused_connections.h"
#include "server/rpc/cluster_service.h"
#include "server/rpc/engine/compute_service.h"
#include "server/rpc/engine/control_service.h"
#include "server/store/options/user_name.h"
#include "server/telemetry/log.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr int kMaxConcurrentCalls = 128;  // calls of one connection
constexpr size_t kMessageMemory = size_t{1}
                                  << 30;  // for all messages that are being read or written
constexpr int kOutOfDescriptorsPauseMs = 100;
constexpr int kTickMs = 1000;             // what nobody tells at once is seen then
constexpr uint32_t kNobody = 0xFFFFFFFF;  // who connected, when the kernel does not say
constexpr uint64_t kDescriptorsOfConnection = 2;
constexpr int kMaxAcceptsPerIteration = 16;
constexpr size_t kMostClosing = 16;
constexpr std::chrono::milliseconds kClosingPause{50};
constexpr uint32_t kRefusalLogBurst = 5;  // refusals a second that are worth a line each
// How long a thread of gRPC's may sleep when gRPC forgets to wake it, which it does while it ends.
constexpr int kMostSleepMs = 500;

using Clock = std::chrono::steady_clock;

// One user's gRPC server. Services first: they outlive the server.
class UserServer {
 public:
  UserServer(const GrpcOptions& options, const PeerIdentity& user, bool admin, WorkQueue* queue,
             CallsUnderWay* all_calls, UserProcess process)
      : process_(std::move(process)),
        calls_(all_calls),
        context_(options, user, admin, queue, &calls_),
        control_(&context_),
        compute_(&context_),
        admin_(&context_),
        cluster_(&context_) {}

  Status Start(const grpc::ResourceQuota& quota) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&control_);
    builder.RegisterService(&compute_);
    builder.RegisterService(&admin_);
    builder.RegisterService(&cluster_);
    builder.SetMaxReceiveMessageSize(GrpcServer::kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentCalls);
    builder.SetResourceQuota(quota);
    builder.experimental().SetInterceptorCreators(CallInterceptors(context_.user().uid, process_));
    if (!context_.CheckAdmin().ok()) builder.SetOption(std::make_unique<WithoutThreads>());
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
    builder.SetSyncServerOption(grpc::ServerBuilder::CQ_TIMEOUT_MSEC, kMostSleepMs);
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return Internal("GRPC_START", "gRPC did not start; see its log");
    TellHealth(LookAtHealth(context_.options()).names);
    return OkStatus();
  }

  // Answers whoever asks grpc.health.v1. Who watches hears of changes only.
  void TellHealth(const std::map<std::string, bool>& names) {
    auto* health = server_->GetHealthCheckService();
    for (const auto& [name, serves] : names) health->SetServingStatus(name, serves);
  }

  void Take(UniqueFd connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = connection.release();
    acceptor_->HandleNewConnection(&parameters);
  }

  void EndServing() {
    server_->GetHealthCheckService()->SetServingStatus(false);
    context_.EndServing();
    control_.streams().EndAll(ServiceContext::Stopping());
  }
  // No call, no session: nothing of it is used but by a connection.
  bool HasNothingToDo() const { return calls_.calls() == 0 && !context_.HasSessions(); }
  bool IsOfOperator() const { return context_.CheckAdmin().ok(); }
  // Cancels what is left, and returns when no call is.
  void Shutdown() {
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }

 private:
  const UserProcess process_;
  CallsUnderWay calls_;
  ServiceContext context_;
  ControlService control_;
  ComputeService compute_;
  AdminService admin_;
  ClusterService cluster_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
};

bool IsOperator(uint32_t uid) { return uid == 0 || uid == geteuid(); }

}  // namespace

class GrpcServer::Impl {
 public:
  explicit Impl(const GrpcOptions& options)
      : options_(options),
        connections_(options.closer),
        refused_(options.takes_descriptors ? options.closer : nullptr),
        queue_(std::make_unique<WorkQueue>(options.workers)) {
    quota_.Resize(kMessageMemory);
  }
  ~Impl() { Shutdown(std::chrono::milliseconds(0)); }

  Status Start();
  void EndServing(std::chrono::milliseconds grace);
  void Shutdown(std::chrono::milliseconds grace);

 private:
  void AcceptLoop();
  // False: it is to stop.
  bool AwaitIteration();
  void TellHealth();
  void Tick();
  // False: nobody waits, or nothing can be accepted now.
  bool AcceptOne();
  void Serve(UniqueFd connection);
  // OK: its user's server has it.
  Status Admit(const PeerIdentity& peer, UniqueFd* connection);
  Status StartServerOf(uint32_t uid, uint32_t gid);
  Result<UserServer*> ServerOf(const PeerIdentity& user);
  Status MakeRoomForUser();
  void Refuse(const Status& why, const PeerIdentity& peer = {});

  const GrpcOptions options_;
  grpc::ResourceQuota quota_{"kvstrata"};
  CallsUnderWay calls_;  // calls of all users
  // The accepting thread's, and the caller's before and after it runs.
  GrpcConnections connections_;
  RefusedConnections refused_;
  std::map<uint32_t, std::unique_ptr<UserServer>> users_;
  Heartbeat beat_{"kvs-grpc-accept"};
  LogLimiter refusals_{kRefusalLogBurst};
  Clock::time_point next_tick_;
  // Goes before the services that its tasks use.
  std::unique_ptr<WorkQueue> queue_;
  UniqueFd stop_;
  std::thread accepting_;
};

Status GrpcServer::Impl::Start() {
  KVS_CHECK(options_.store != nullptr && options_.backend != nullptr &&
            options_.executor != nullptr && options_.closer != nullptr && options_.listen_fd >= 0);
  TakeOverLibraryLogs();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  KVS_RETURN_IF_ERROR(connections_.Open());
  KVS_RETURN_IF_ERROR(refused_.Open());
  stop_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_) return Internal("GRPC_START", std::string("eventfd: ") + std::strerror(errno));
  // Our own user's and root's first: an operator's first command does not wait for a server, and
  // none that is made later needs a thread.
  KVS_RETURN_IF_ERROR(StartServerOf(geteuid(), getegid()));
  if (geteuid() != 0) KVS_RETURN_IF_ERROR(StartServerOf(0, 0));
  accepting_ = StartThread("kvs-grpc-accept", [this] { AcceptLoop(); });
  return OkStatus();
}

Status GrpcServer::Impl::StartServerOf(uint32_t uid, uint32_t gid) {
  PeerIdentity user;
  user.uid = uid;
  user.gid = gid;
  user.tenant = UserName(uid);
  return ServerOf(user).status();
}

Result<UserServer*> GrpcServer::Impl::ServerOf(const PeerIdentity& user) {
  const auto found = users_.find(user.uid);
  if (found != users_.end()) return found->second.get();
  KVS_RETURN_IF_ERROR(MakeRoomForUser());
  PeerIdentity identity = user;
  identity.pid = 0;  // the server serves all processes of the user
  auto server = std::make_unique<UserServer>(options_, identity, IsOperator(user.uid), queue_.get(),
                                             &calls_, connections_.ProcessOf(user.uid));
  KVS_RETURN_IF_ERROR(server->Start(quota_));
  return users_.emplace(user.uid, std::move(server)).first->second.get();
}

// A server without connections makes room for another user: whose has been idle longest goes.
Status GrpcServer::Impl::MakeRoomForUser() {
  if (users_.size() < kMaxUsers) return OkStatus();
  auto oldest = users_.end();
  Clock::time_point since;
  for (auto it = users_.begin(); it != users_.end(); ++it) {
    const std::optional<Clock::time_point> idle = connections_.IdleSince(it->first);
    if (!idle || it->second->IsOfOperator() || !it->second->HasNothingToDo()) continue;
    if (oldest != users_.end() && *idle >= since) continue;
    oldest = it;
    since = *idle;
  }
  if (oldest == users_.end()) {
    return ResourceExhausted("USERS", std::to_string(kMaxUsers) +
                                          " users are connected, and no more can be; connect "
                                          "again when one of them has gone");
  }
  oldest->second->Shutdown();
  connections_.Forget(oldest->first);
  users_.erase(oldest);
  return OkStatus();
}

void GrpcServer::Impl::AcceptLoop() {
  for (bool goes_on = true; goes_on;) {
    Survive("kvs-grpc-accept", [&] { goes_on = AwaitIteration(); });
  }
}

bool GrpcServer::Impl::AwaitIteration() {
  pollfd waits[5] = {{stop_.get(), POLLIN, 0},
                     {options_.listen_fd, POLLIN, 0},
                     {options_.pools_fd, POLLIN, 0},
                     {connections_.fd(), POLLIN, 0},
                     {refused_.fd(), POLLIN, 0}};
  if (poll(waits, 5, kTickMs) < 0) return errno == EINTR;
  if (waits[0].revents != 0) return false;
  const LoopIteration iteration(&beat_);
  eventfd_t told = 0;
  if (waits[2].revents != 0) (void)eventfd_read(options_.pools_fd, &told);
  if (told != 0) TellHealth();
  if (Clock::now() >= next_tick_) Tick();
  if (waits[3].revents != 0) connections_.Collect();
  if (waits[4].revents != 0) refused_.Serve();
  if (waits[1].revents == 0) return true;
  // What is refused faster than it is closed would take the operators' descriptors.
  if (options_.closer->counters().pending > kMostClosing) {
    options_.closer->Await(Clock::now() + kClosingPause);
  }
  for (int i = 0; i < kMaxAcceptsPerIteration && AcceptOne(); ++i) {
  }
  return true;
}

void GrpcServer::Impl::TellHealth() {
  const std::map<std::string, bool> names = LookAtHealth(options_).names;
  for (const auto& [uid, user] : users_) user->TellHealth(names);
}

void GrpcServer::Impl::Tick() {
  TellHealth();
  refused_.Expire(Clock::now());
  options_.closer->Tick();
  next_tick_ = Clock::now() + std::chrono::milliseconds(kTickMs);
}

bool GrpcServer::Impl::AcceptOne() {
  UniqueFd connection(accept4(options_.listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (connection) {
    Serve(std::move(connection));
    return true;
  }
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    Refuse(ResourceExhausted("DESCRIPTORS", std::string("accept: ") + std::strerror(errno)));
    pollfd stop{stop_.get(), POLLIN, 0};
    poll(&stop, 1, kOutOfDescriptorsPauseMs);  // until somebody closes one, or we stop
  }
  return false;
}

void GrpcServer::Impl::Serve(UniqueFd connection) {
  const Result<PeerIdentity> peer = IdentityOf(connection.get());
  if (!peer.ok()) {
    if (options_.takes_descriptors) options_.closer->Put(std::move(connection), kNobody);
    return Refuse(peer.status());
  }
  const Status admitted = Admit(*peer, &connection);
  if (admitted.ok()) return;
  Refuse(admitted, *peer);
  refused_.Add(std::move(connection), peer->uid, admitted);
}

Status GrpcServer::Impl::Admit(const PeerIdentity& peer, UniqueFd* connection) {
  const std::shared_ptr<UserLimits>& limits = options_.store->user_limits();
  if (!IsOperator(peer.uid) && !options_.closer->MayTake(peer.uid)) {
    return ResourceExhausted("DESCRIPTORS_STUCK",
                             "descriptors that clients of user " + std::to_string(peer.uid) +
                                 " passed do not close; end who keeps them open");
  }
  if (!IsOperator(peer.uid)) KVS_RETURN_IF_ERROR(CheckDescriptors(kDescriptorsOfConnection));
  KVS_ASSIGN_OR_RETURN(UserPlace place, UserPlace::Take(limits, peer.tenant, Limit::kConnections));
  KVS_ASSIGN_OR_RETURN(UserServer* const server, ServerOf(peer));
  KVS_RETURN_IF_ERROR(connections_.Add(peer, std::move(place), connection->get()));
  server->Take(std::move(*connection));
  return OkStatus();
}

void GrpcServer::Impl::Refuse(const Status& why, const PeerIdentity& peer) {
  CountRefusal(why.reason());
  uint64_t suppressed = 0;
  if (!refusals_.Allow(&suppressed)) return;
  LogEvent(LogLevel::kWarn, "connection_refused",
           {{"reason", why.reason()},
            {"uid", peer.uid},
            {"pid", peer.pid},
            {"why", why.message()},
            {"suppressed", suppressed}});
}

void GrpcServer::Impl::EndServing(std::chrono::milliseconds grace) {
  if (accepting_.joinable()) {
    KVS_CHECK(eventfd_write(stop_.get(), 1) == 0);
    accepting_.join();
    for (const auto& [uid, user] : users_) user->EndServing();
  }
  calls_.AwaitNone(Clock::now() + grace);
}

void GrpcServer::Impl::Shutdown(std::chrono::milliseconds grace) {
  if (queue_ == nullptr) return;
  EndServing(grace);
  // A server that ends waits for peers that neither read nor answer, unless they are cut off.
  connections_.CutAll();
  for (const auto& [uid, user] : users_) user->Shutdown();
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

void GrpcServer::EndServing(std::chrono::milliseconds grace) { impl_->EndServing(grace); }
void GrpcServer::Shutdown(std::chrono::milliseconds grace) { impl_->Shutdown(grace); }

}  // namespace kvstrata
