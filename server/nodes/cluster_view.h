// SPDX-License-Identifier: Apache-2.0
// ClusterView: what a cluster's nodes have of a prompt, and what their remote tier has: the answer
// of Cluster.LookupCluster; and this node's part in the answers of others.
//
// Each node answers for itself, at its time: the view is what was heard within the time limit, and
// nobody's agreement. A node that does not answer is told of with the reason. Servers get half of
// the time to say which nodes there are.
//
// Ownership: borrows the store and the tier, which outlive Stop. Threads: those of its parts.
// Thread-safety: Lookup from any thread; Serve and Stop one thread. Cost of Lookup: that of
// Lookups, a pipeline to the servers, 32 bytes a page to each node.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <thread>

#include "base/status.h"
#include "base/sync.h"
#include "kvstrata/v1/nodes.grpc.pb.h"
#include "kvstrata/v1/nodes.pb.h"
#include "server/nodes/node_credentials.h"
#include "server/nodes/node_list.h"
#include "server/nodes/node_server.h"
#include "server/store/store.h"
#include "server/tier/redis/redis_threads.h"
#include "server/tier/remote/node_announcement.h"
#include "server/tier/remote/remote_secret.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// NodeCalls: asks other nodes where they have pages of a prompt (NodeServer), many at a time; no
// call can hold up another.
//
// Connections are kept for who asks next. Threads: one ("kvs-nodes") hands out answers.
// Thread-safety: all methods, from any thread. Cost: a few microseconds a call and its bytes.
// Errors of a call: DEADLINE_EXCEEDED DEADLINE, UNAVAILABLE DAEMON_GONE, DATA_LOSS NODE_MAC (the
// answer is none of this cluster's), REMOTE_ANNOUNCE (NodeCredentials), and those of the node.
class NodeCalls {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  using Done = std::function<void(const Result<v1::LookupPagesResponse>&)>;

  NodeCalls(NodeCredentials credentials, const remote::NodeKeys& keys);
  // Stop.
  ~NodeCalls();
  // Calls under way end. Idempotent; one thread.
  void Stop() KVS_EXCLUDES(mu_);

  // `request`: all but `to`, time and nonce. Calls `done` once, soon after `deadline` at the
  // latest, at once or in the thread, where it must not block.
  void Ask(const std::string& address, v1::LookupPagesRequest request, Deadline deadline, Done done)
      KVS_EXCLUDES(mu_);
  // Connections to all others are closed.
  void KeepOnly(const std::set<std::string>& addresses) KVS_EXCLUDES(mu_);

 private:
  struct Call;
  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) KVS_REQUIRES(mu_);
  Result<v1::LookupPagesResponse> AnswerOf(const Call& call) const;
  void Serve() KVS_EXCLUDES(mu_);

  const NodeCredentials credentials_;
  const remote::NodeKeys keys_;
  grpc::CompletionQueue events_;
  Mutex mu_;
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_ KVS_GUARDED_BY(mu_);
  std::set<Call*> under_way_ KVS_GUARDED_BY(mu_);
  std::thread thread_;
};

struct ClusterViewOptions {
  std::string announce;  // HOST:PORT; "": this node is none of the listed
  std::string release;
  redis::RedisTlsOptions tls;  // files only
  remote::Seal seal = remote::Seal::kNone;
};

class ClusterView {
 public:
  using Done = std::function<void(const Status&)>;

  // INVALID_ARGUMENT REMOTE_ANNOUNCE. Neither listens nor announces yet.
  static Result<std::unique_ptr<ClusterView>> Make(const ClusterViewOptions& options,
                                                   const remote::RemoteSecret& secret, Store* store,
                                                   ValueTier* remote,
                                                   std::shared_ptr<RedisThreads> threads);
  ~ClusterView();  // Stop

  // Answers others from now on, and tells them where. Errors: NodeServer::Start's.
  Status Serve();
  // Takes the announcement back, ends what waits. Idempotent.
  void Stop();

  // `tenant`: the request's, or the caller's. Calls `done` once, soon after the request's time
  // limit at the latest, when `response` is written; both stay until then. Errors: those of
  // Lookups::LookupFor, PAGE_KEY, LOOKUP_WHAT, DAEMON_STOPPING.
  void Lookup(const std::string& tenant, const v1::LookupClusterRequest& request,
              v1::LookupClusterResponse* response, Done done);

 private:
  class Question;
  ClusterView(ClusterViewOptions options, NodeCredentials credentials, const remote::NodeKeys& keys,
              Store* store, ValueTier* remote, std::shared_ptr<RedisThreads> threads);

  const ClusterViewOptions options_;
  const NodeCredentials credentials_;
  const remote::NodeKeys keys_;
  Store& store_;
  ValueTier& remote_;
  std::stop_source stop_;
  NodeList list_;
  NodeCalls calls_;
  std::unique_ptr<NodeServer> server_;
};

}  // namespace kvstrata
