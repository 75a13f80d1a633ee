// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/node_calls.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "proto/status_map.h"
#include "server/nodes/node_server.h"
#include "server/telemetry/thread_top.h"
#include "server/tier/remote/stripe_cipher.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kThread = "kvs-nodes";
constexpr int kNonceBytes = 16;
// A node that comes back is found again so soon.
constexpr int kMostBackoffMs = 1000;
// gRPC may forget to wake a thread, which it does while it ends.
constexpr std::chrono::milliseconds kMostSleep{500};

}  // namespace

struct NodeCalls::Call {
  v1::NodeCall request;
  v1::NodeAnswer answer;
  HmacKey::Digest mac{};
  Done done;
  grpc::ClientContext context;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::NodeAnswer>> reader;
};

NodeCalls::NodeCalls(NodeCredentials credentials, const remote::NodeKeys& keys)
    : credentials_(std::move(credentials)), keys_(keys), thread_([this] { Serve(); }) {
  pthread_setname_np(thread_.native_handle(), kThread);
}

NodeCalls::~NodeCalls() { Stop(); }

void NodeCalls::Stop() {
  {
    MutexLock lock(mu_);
    if (std::exchange(stopped_, true)) return;
    for (Call* call : under_way_) call->context.TryCancel();
  }
  events_.Shutdown();
  thread_.join();
}

std::shared_ptr<grpc::Channel> NodeCalls::ChannelTo(const std::string& address) {
  std::shared_ptr<grpc::Channel>& channel = channels_[address];
  if (channel == nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kMostBackoffMs / 10);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kMostBackoffMs);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMostBackoffMs);
    channel = grpc::CreateCustomChannel("dns:///" + address, credentials_.client(), arguments);
  }
  return channel;
}

void NodeCalls::KeepOnly(const std::set<std::string>& addresses) {
  MutexLock lock(mu_);
  std::erase_if(channels_, [&](const auto& entry) { return !addresses.contains(entry.first); });
}

void NodeCalls::Ask(const std::string& address, v1::LookupPagesRequest request, Deadline deadline,
                    Done done) {
  if (const Status status = credentials_.CheckAddress(address); !status.ok()) return done(status);
  const auto now = std::chrono::system_clock::now();
  request.set_to(address);
  request.set_time_us(
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count());
  request.set_nonce(remote::RandomSalt().data(), kNonceBytes);
  auto call = std::make_unique<Call>();
  call->request.set_body(request.SerializeAsString());
  call->mac = keys_.OfCall(call->request.body());
  call->request.set_mac(call->mac.data(), call->mac.size());
  call->done = std::move(done);
  call->context.set_deadline(now + (deadline - Clock::now()));
  if (call->request.ByteSizeLong() > static_cast<size_t>(NodeServer::kMaxCallBytes)) {
    return call->done(ResourceExhausted(
        "MESSAGE_TOO_LARGE", "a prompt of more than 262,000 pages is not asked for; send fewer"));
  }
  {
    MutexLock lock(mu_);
    if (!stopped_) {
      call->reader = v1::Nodes::NewStub(ChannelTo(address))
                         ->PrepareAsyncLookupPages(&call->context, call->request, &events_);
      under_way_.insert(call.get());
      Call* const begun = call.release();
      begun->reader->StartCall();
      begun->reader->Finish(&begun->answer, &begun->status, begun);
      return;
    }
  }
  call->done(Unavailable("DAEMON_STOPPING", "the daemon is stopping"));
}

Result<v1::LookupPagesResponse> NodeCalls::AnswerOf(const Call& call) const {
  if (!call.status.ok()) return FromGrpc(call.status);
  v1::LookupPagesResponse answer;
  const HmacKey::Digest mac = keys_.OfAnswer(call.mac, call.answer.body());
  if (!remote::NodeKeys::Equal(mac, call.answer.mac()) ||
      !answer.ParseFromString(call.answer.body())) {
    return Status(
        Code::kDataLoss, "NODE_MAC",
        "the answer has no MAC of this cluster's; who listens there is none of its nodes");
  }
  return answer;
}

void NodeCalls::Serve() {
  WarmUpAllocator();
  Heartbeat beat(kThread);
  for (;;) {
    void* tag = nullptr;
    bool ok = false;
    const auto next = events_.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kMostSleep);
    if (next == grpc::CompletionQueue::SHUTDOWN) return;
    if (next != grpc::CompletionQueue::GOT_EVENT) continue;
    const LoopIteration iteration(&beat);
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    {
      MutexLock lock(mu_);
      under_way_.erase(call.get());
    }
    Survive(kThread, [&] { call->done(AnswerOf(*call)); });
  }
}

}  // namespace kvstrata
