// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/cluster_view.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "proto/status_map.h"
#include "server/rpc/calls/prefix_messages.h"
#include "server/telemetry/thread_top.h"
#include "server/tier/remote/stripe_cipher.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kNodesThread = "kvs-nodes";
constexpr int kNonceBytes = 16;
// A node that comes back is found again so soon.
constexpr int kMostBackoffMs = 1000;
// gRPC may forget to wake a thread, which it does while it ends.
constexpr std::chrono::milliseconds kMostSleep{500};

using remote::NodeAnnouncement;

constexpr std::chrono::microseconds kUsual{1'000'000}, kLongest{10'000'000};
// What servers have begun to answer is waited for when the daemon stops.
constexpr std::chrono::microseconds kServersLongest{2'000'000};

std::string_view NameOf(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

Result<PrefixHit> OwnHit(Lookups& lookups, const std::string& tenant,
                         const v1::LookupClusterRequest& request) {
  KVS_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ReadPageKeys(request));
  if (!keys.empty()) return lookups.LookupFor(tenant, request.model(), keys);
  const std::span<const int32_t> tokens(request.tokens().data(),
                                        static_cast<size_t>(request.tokens_size()));
  return lookups.LookupFor(tenant, request.model(), tokens);
}

std::chrono::microseconds TimeOf(const v1::LookupClusterRequest& request) {
  if (request.timeout_us() == 0) return kUsual;
  const auto most = static_cast<uint64_t>(kLongest.count());
  return std::chrono::microseconds(std::min(request.timeout_us(), most));
}

// By the clocks of both nodes: one that is behind is no age.
uint64_t AgeOf(const NodeAnnouncement& node) {
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  return std::max<int64_t>(now - static_cast<int64_t>(node.written), 0) * 1'000'000;
}

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
    : credentials_(std::move(credentials)),
      keys_(keys),
      thread_(StartThread(kNodesThread, [this] { Serve(); })) {}

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
  Heartbeat beat(kNodesThread);
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
    Survive(kNodesThread, [&] { call->done(AnswerOf(*call)); });
  }
}

// One look-up on its way. Whoever holds it may still add to the answer, each to a part of its own;
// when nobody does any more it is written.
class ClusterView::Question {
 public:
  Question(PrefixHit own, v1::LookupClusterResponse* response, Done done)
      : own_(std::move(own)), response_(*response), done_(std::move(done)) {
    for (size_t i = 0; i < own_.keys.size(); ++i) {
      probes_.push_back({NameOf(own_.keys[i]), {}, NameOf(own_.keys[GroupBegin(i)])});
    }
  }
  Question(const Question&) = delete;
  Question& operator=(const Question&) = delete;
  ~Question() {
    const bool whole = Survive("cluster-lookup", [&] { Write(); });
    const Status memory =
        whole ? OkStatus() : ResourceExhausted("MEMORY", "the daemon has no memory to answer with");
    Survive("cluster-lookup", [&] { done_(memory); });
  }

  std::span<TierProbe> probes() { return probes_; }
  void SetRemoteError(std::string why) { remote_error_ = std::move(why); }
  void SetListError(const Status& why) { nodes_error_ = why.reason() + ": " + why.message(); }
  // Before any of them has answered.
  void SetNodes(const ListedNodes& list, const std::string& own_address) {
    refused_ = list.refused;
    for (const NodeAnnouncement& node : list.nodes) {
      if (node.address != own_address) others_.push_back({node, {}, Unasked()});
    }
    own_address_ = own_address;
  }
  size_t others() const { return others_.size(); }
  const std::string& address(size_t i) const { return others_[i].node.address; }
  void Came(size_t i, const Result<v1::LookupPagesResponse>& answer) {
    others_[i].status = answer.status();
    if (answer.ok()) others_[i].pages = *answer;
  }

 private:
  struct Other {
    NodeAnnouncement node;
    v1::LookupPagesResponse pages;
    Status status;
  };
  static Status Unasked() {
    return ResourceExhausted("MEMORY", "the daemon has no memory to ask it");
  }

  // Pages that are there when what the remote tier has is read behind `held`.
  size_t WithRemote(size_t held) const {
    while (held < probes_.size() && !probes_[held].sizes.empty()) ++held;
    return held;
  }
  void WriteHeld(const v1::LookupPagesResponse& pages, v1::ClusterNode* out) const {
    const size_t most = own_.keys.size();
    const uint32_t tokens = own_.page_tokens;
    const size_t held = std::min<size_t>(
        size_t{pages.device_pages()} + pages.host_pages() + pages.disk_pages(), most);
    out->set_held_tokens(static_cast<uint32_t>(held) * tokens);
    out->set_device_tokens(pages.device_pages() * tokens);
    out->set_host_tokens(pages.host_pages() * tokens);
    out->set_disk_tokens(pages.disk_pages() * tokens);
    out->set_with_remote_tokens(static_cast<uint32_t>(WithRemote(held)) * tokens);
  }
  void Write() {
    response_.set_page_tokens(own_.page_tokens);
    response_.set_tokens(static_cast<uint32_t>(own_.keys.size()) * own_.page_tokens);
    response_.set_remote_tokens(static_cast<uint32_t>(WithRemote(0)) * own_.page_tokens);
    response_.set_remote_error(remote_error_);
    response_.set_nodes_error(nodes_error_);
    response_.set_refused_announcements(refused_);
    v1::ClusterNode* self = response_.add_nodes();
    self->set_address(own_address_);
    self->set_self(true);
    v1::LookupPagesResponse pages;
    const auto pages_in = [&](Tier tier) {
      return static_cast<uint32_t>(std::ranges::count(own_.pages, tier));
    };
    pages.set_device_pages(pages_in(Tier::kDevice));
    pages.set_host_pages(pages_in(Tier::kHost));
    pages.set_disk_pages(pages_in(Tier::kDisk));
    WriteHeld(pages, self);
    for (const Other& other : others_) {
      v1::ClusterNode* out = response_.add_nodes();
      out->set_address(other.node.address);
      out->set_release(other.node.release);
      out->set_age_us(AgeOf(other.node));
      if (other.status.ok()) {
        WriteHeld(other.pages, out);
      } else {
        out->set_unreachable(other.status.reason());
        out->set_why(other.status.message());
      }
    }
  }

  const PrefixHit own_;
  std::vector<TierProbe> probes_;
  v1::LookupClusterResponse& response_;
  Done done_;
  std::string remote_error_, nodes_error_, own_address_;
  uint32_t refused_ = 0;
  std::vector<Other> others_;
};

Result<std::unique_ptr<ClusterView>> ClusterView::Make(const ClusterViewOptions& options,
                                                       const remote::RemoteSecret& secret,
                                                       Store* store, ValueTier* remote,
                                                       std::shared_ptr<RedisThreads> threads) {
  KVS_ASSIGN_OR_RETURN(NodeCredentials credentials,
                       NodeCredentials::Load(options.tls, options.announce));
  return std::unique_ptr<ClusterView>(new ClusterView(options, std::move(credentials),
                                                      remote::NodeKeys(secret, options.seal), store,
                                                      remote, std::move(threads)));
}

ClusterView::ClusterView(ClusterViewOptions options, NodeCredentials credentials,
                         const remote::NodeKeys& keys, Store* store, ValueTier* remote,
                         std::shared_ptr<RedisThreads> threads)
    : options_(std::move(options)),
      credentials_(std::move(credentials)),
      keys_(keys),
      store_(*store),
      remote_(*remote),
      list_({options_.announce, options_.release}, keys_, std::move(threads)),
      calls_(credentials_, keys_) {}

ClusterView::~ClusterView() { Stop(); }

Status ClusterView::Serve() {
  if (options_.announce.empty()) return OkStatus();
  KVS_ASSIGN_OR_RETURN(server_, NodeServer::Start(options_.announce, credentials_, keys_, &store_));
  list_.Start();
  return OkStatus();
}

void ClusterView::Stop() {
  stop_.request_stop();
  list_.Stop();
  calls_.Stop();
  server_.reset();
}

void ClusterView::Lookup(const std::string& tenant, const v1::LookupClusterRequest& request,
                         v1::LookupClusterResponse* response, Done done) {
  const Clock::time_point asked = Clock::now();
  const std::chrono::microseconds time = TimeOf(request);
  const Result<PrefixHit> own = OwnHit(store_.lookups(), tenant, request);
  if (!own.ok()) return done(own.status());
  const auto question = std::make_shared<Question>(*own, response, std::move(done));
  if (!question->probes().empty()) {
    const Clock::time_point end = asked + std::min(time, kServersLongest);
    const auto probed = [this, question, end] {
      const std::string illness = remote_.Stats().illness;
      if (!illness.empty()) return question->SetRemoteError(illness);
      if (Clock::now() >= end) question->SetRemoteError("it did not answer in time");
    };
    remote_.Probe(question->probes(), {end, stop_.get_token(), probed});
  }
  v1::LookupPagesRequest pages;
  pages.set_tenant(store_.cluster_tenants().NameOf(tenant));
  pages.set_page_tokens(own->page_tokens);
  for (const PageKey& key : own->keys) pages.mutable_page_keys()->append(NameOf(key));
  list_.Find(asked + time / 2,
             [this, question, pages, end = asked + time](const Result<ListedNodes>& list) {
               question->SetNodes(list.ok() ? *list : ListedNodes(), options_.announce);
               if (!list.ok()) return question->SetListError(list.status());
               std::set<std::string> addresses;
               for (size_t i = 0; i < question->others(); ++i) {
                 addresses.insert(question->address(i));
               }
               calls_.KeepOnly(addresses);
               for (size_t i = 0; i < question->others(); ++i) {
                 calls_.Ask(question->address(i), pages, end,
                            [question, i](const auto& answer) { question->Came(i, answer); });
               }
             });
}

}  // namespace kvstrata
