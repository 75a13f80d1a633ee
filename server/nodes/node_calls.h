// SPDX-License-Identifier: Apache-2.0
// NodeCalls: asks other nodes where they have pages of a prompt (NodeServer), many at a time, none
// of which can hold up another.
//
// Connections are kept for who asks next. Threads: one ("kvs-nodes") hands out answers.
// Thread-safety: all methods, from any thread. Cost: a few microseconds a call and its bytes.
// Errors of a call: DEADLINE_EXCEEDED DEADLINE, UNAVAILABLE DAEMON_GONE, DATA_LOSS NODE_MAC (the
// answer is none of this cluster's), REMOTE_ANNOUNCE (NodeCredentials), and those of the node.
#ifndef KVSTRATA_SERVER_NODES_NODE_CALLS_H_
#define KVSTRATA_SERVER_NODES_NODE_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "base/sync.h"
#include "kvstrata/v1/nodes.grpc.pb.h"
#include "server/nodes/node_credentials.h"
#include "server/tier/remote/node_announcement.h"

namespace kvstrata {

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_NODES_NODE_CALLS_H_
