// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/node_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "kvstrata/v1/nodes.grpc.pb.h"
#include "server/rpc/calls/grpc_library.h"
#include "server/rpc/calls/service_context.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata {
namespace {

constexpr size_t kMessageMemory = size_t{64} << 20;
constexpr int kHandshakeMs = 2000;
constexpr int kIdleMs = 300'000;
constexpr size_t kMaxTenantBytes = 256;

Status CheckTime(int64_t time_us) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto then = std::chrono::microseconds(time_us);
  if (then >= now - remote::kMaxNodeSkew && then <= now + remote::kMaxNodeSkew) return OkStatus();
  return {Code::kUnauthenticated, "NODE_TIME",
          "the caller's clock is more than 10 minutes away from this node's; set both by NTP"};
}

Status NoMac() {
  return {Code::kUnauthenticated, "NODE_MAC",
          "the call has no MAC of this cluster's; nodes need the same remote.secret_file and "
          "remote.seal"};
}

std::vector<PageKey> KeysOf(std::string_view bytes) {
  std::vector<PageKey> keys(bytes.size() / sizeof(PageKey));
  for (size_t i = 0; i < keys.size(); ++i) {
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(i * sizeof(PageKey)), sizeof(PageKey),
                keys[i].begin());
  }
  return keys;
}

}  // namespace

class NodeServer::Service final : public v1::Nodes::CallbackService {
 public:
  Service(std::string address, const remote::NodeKeys& keys, Store* store)
      : address_(std::move(address)), keys_(keys), store_(*store) {}

  grpc::ServerUnaryReactor* LookupPages(grpc::CallbackServerContext* call,
                                        const v1::NodeCall* request,
                                        v1::NodeAnswer* response) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(ServiceContext::Outcome([&] { return Answer(*request, response); }));
    return reactor;
  }

 private:
  Status Answer(const v1::NodeCall& call, v1::NodeAnswer* answer) {
    const HmacKey::Digest mac = keys_.OfCall(call.body());
    if (!remote::NodeKeys::Equal(mac, call.mac())) return NoMac();
    v1::LookupPagesRequest request;
    const bool sound = request.ParseFromString(call.body()) && request.to() == address_ &&
                       request.page_tokens() != 0 && request.tenant().size() <= kMaxTenantBytes &&
                       request.page_keys().size() % sizeof(PageKey) == 0;
    if (!sound) {
      return InvalidArgument("NODE_CALL", "the call is not for this node, '" + address_ +
                                              "', or not of this release's form; "
                                              "give each node an address of its own");
    }
    KVS_RETURN_IF_ERROR(CheckTime(request.time_us()));
    PageOwner owner;
    owner.tenant = store_.cluster_tenants().UserOf(request.tenant());
    owner.page_tokens = request.page_tokens();
    const PrefixHit hit = store_.lookups().LookupOf(owner, KeysOf(request.page_keys()));
    const auto pages_in = [&](Tier tier) {
      return static_cast<uint32_t>(std::ranges::count(hit.pages, tier));
    };
    v1::LookupPagesResponse response;
    response.set_device_pages(pages_in(Tier::kDevice));
    response.set_host_pages(pages_in(Tier::kHost));
    response.set_disk_pages(pages_in(Tier::kDisk));
    answer->set_body(response.SerializeAsString());
    const HmacKey::Digest own = keys_.OfAnswer(mac, answer->body());
    answer->set_mac(own.data(), own.size());
    return OkStatus();
  }

  const std::string address_;
  const remote::NodeKeys keys_;
  Store& store_;
};

// The service outlives the server.
struct NodeServer::Parts {
  Parts(const std::string& address, const remote::NodeKeys& keys, Store* store)
      : service(address, keys, store) {}

  Service service;
  grpc::ResourceQuota quota{"kvstrata-nodes"};
  std::unique_ptr<grpc::Server> server;
};

Result<std::unique_ptr<NodeServer>> NodeServer::Start(const std::string& address,
                                                      const NodeCredentials& credentials,
                                                      const remote::NodeKeys& keys, Store* store) {
  KVS_RETURN_IF_ERROR(CheckCanListen(address));
  auto parts = std::make_unique<Parts>(address, keys, store);
  parts->quota.Resize(kMessageMemory);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, credentials.server(), &port);
  builder.RegisterService(&parts->service);
  builder.SetMaxReceiveMessageSize(kMaxCallBytes);
  builder.SetResourceQuota(parts->quota);
  builder.SetOption(std::make_unique<WithoutThreads>());
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostCalls);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  parts->server = builder.BuildAndStart();
  if (parts->server == nullptr || port == 0) {
    return Unavailable("REMOTE_ANNOUNCE",
                       "remote.announce = '" + address +
                           "': the address is free, and a server with remote.tls_cert_file, "
                           "remote.tls_key_file and remote.tls_ca_file does not start; look at "
                           "them: openssl x509 -noout -text -in FILE");
  }
  return std::unique_ptr<NodeServer>(new NodeServer(std::move(parts)));
}

NodeServer::NodeServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

NodeServer::~NodeServer() { parts_->server->Shutdown(std::chrono::system_clock::now()); }

namespace {

std::string Named(const std::string& address) { return "remote.announce = '" + address + "': "; }

Status CannotListen(const std::string& address, int error) {
  const std::string text = Named(address) + std::strerror(error);
  if (error == EADDRINUSE) {
    return {Code::kAlreadyExists, "REMOTE_ANNOUNCE_IN_USE",
            text + "; choose another port, or stop who listens there (ss -ltnp)"};
  }
  if (error == EACCES || error == EPERM) {
    return {Code::kPermissionDenied, "REMOTE_ANNOUNCE", text + "; choose a port above 1023"};
  }
  return InvalidArgument("REMOTE_ANNOUNCE",
                         text + "; name an address of this machine (ip -brief address)");
}

}  // namespace

Status CheckCanListen(const std::string& address) {
  KVS_ASSIGN_OR_RETURN(const redis::RedisAddress at, redis::ParseRedisAddress(address));
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int unknown =
      getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &wanted, &found);
  if (unknown != 0) {
    return InvalidArgument("REMOTE_ANNOUNCE", Named(address) + gai_strerror(unknown) +
                                                  "; name an address of this machine (ip -brief "
                                                  "address)");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const UniqueFd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // Connections that the last daemon closed keep its port for a minute else.
    const int on = 1;
    if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd.get(), each->ai_addr, each->ai_addrlen) != 0 || listen(fd.get(), 1) != 0) {
      return CannotListen(address, errno);
    }
  }
  return OkStatus();
}

}  // namespace kvstrata
