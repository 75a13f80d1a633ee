// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/call_records.h"

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "proto/status_map.h"
#include "server/telemetry/log.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kPackage = "/kvstrata.v1.";
constexpr std::string_view kAdmin = "Admin/";
constexpr size_t kMostText = 128;  // characters of a field

// Verbs of Admin that only look; what is not here changes something, or reads users' caches.
constexpr auto kLooks = std::to_array<std::string_view>(
    {"Audit", "GetConfig", "GetMetrics", "GetStatus", "ListEngineRecalls", "ListPins", "ListPools",
     "ListQuotas", "ListSequences", "ListSessions", "ListValues", "ListWork", "LookupPrefix",
     "SampleSelections", "ShowSequence", "Watch"});

// Asked again and again until it is done: a process's first call is told.
constexpr std::string_view kAskedAgain = "Drain";

// Which process asked that last, of one user; 0: not known.
using LastAsker = std::shared_ptr<std::atomic<uint32_t>>;

// Whether gRPC is to have interceptors of ours for the call, which it takes. A call of no service
// is served by gRPC as a stream both ways, of which we have none, and stays unimplemented.
bool IsOurs(const ServerRpcInfo& call) {
  return std::string_view(call.method()).starts_with(kPackage) &&
         call.type() != ServerRpcInfo::Type::BIDI_STREAMING;
}

std::string FieldText(const google::protobuf::Message& m,
                      const google::protobuf::FieldDescriptor& field) {
  const auto& r = *m.GetReflection();
  using F = google::protobuf::FieldDescriptor;
  switch (field.cpp_type()) {
    case F::CPPTYPE_BOOL:
      return r.GetBool(m, &field) ? "true" : "false";
    case F::CPPTYPE_INT32:
      return std::to_string(r.GetInt32(m, &field));
    case F::CPPTYPE_INT64:
      return std::to_string(r.GetInt64(m, &field));
    case F::CPPTYPE_UINT32:
      return std::to_string(r.GetUInt32(m, &field));
    case F::CPPTYPE_UINT64:
      return std::to_string(r.GetUInt64(m, &field));
    case F::CPPTYPE_STRING:
      if (field.type() == F::TYPE_BYTES) return "...";
      return r.GetString(m, &field).substr(0, kMostText);
    default:
      return "...";
  }
}

// "tier=host bytes=1048576 tokens[7]": fields that are set, by their names; of lists their lengths.
std::string Outline(const google::protobuf::Message& request) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  request.GetReflection()->ListFields(request, &set);
  std::string out;
  for (const auto* field : set) {
    out += (out.empty() ? "" : " ") + field->name();
    if (field->is_repeated()) {
      const int n = request.GetReflection()->FieldSize(request, field);
      out += "[" + std::to_string(n) + "]";
    } else {
      out += "=" + FieldText(request, *field);
    }
  }
  return out;
}

class CallRecord final : public grpc::experimental::Interceptor {
 public:
  CallRecord(ServerRpcInfo* info, uint32_t uid, uint32_t pid, LastAsker last_asker)
      : info_(info),
        call_(std::string_view(info->method()).substr(kPackage.size())),
        one_answer_(info->type() == ServerRpcInfo::Type::UNARY),
        uid_(uid),
        pid_(pid),
        last_asker_(std::move(last_asker)) {}

  void Intercept(InterceptorBatchMethods* call) override {
    // A request of our services is a message of protobuf, which is its first and only base.
    if (OfOperator() &&
        call->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        call->GetRecvMessage() != nullptr) {
      request_ = Outline(*static_cast<const google::protobuf::Message*>(call->GetRecvMessage()));
    }
    if (call->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      Ended(call->GetSendStatus());
    }
    if (call->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_CLOSE)) MaybeMalformed();
    call->Proceed();
  }

 private:
  bool OfOperator() const { return call_.starts_with(kAdmin); }
  bool OnlyLooks() const {
    const std::string_view verb = call_.substr(kAdmin.size());
    if (verb == kAskedAgain) return last_asker_->exchange(pid_) == pid_ && pid_ != 0;
    return std::ranges::find(kLooks, verb) != kLooks.end();
  }

  void Ended(const grpc::Status& status) {
    const auto took = Clock::now() - begun_;
    if (one_answer_) NoteTime(Timed::kRpc, took);
    if (status.ok() && call_ == "Control/OpenSequence") NoteTime(Timed::kOpen, took);
    if (status.ok() && call_ == "Control/Lookup") NoteTime(Timed::kLookup, took);
    if (status.error_code() == grpc::StatusCode::CANCELLED) return;  // nobody hears it
    if (!status.ok()) {
      const Status why = FromGrpc(status);
      // A stream that the daemon's end ends was not refused.
      if (!one_answer_ && why.reason() == "DAEMON_STOPPING") return;
      if (why.reason() == "REQUEST_MALFORMED") {
        malformed_ = why;
        return MaybeMalformed();
      }
      return NoteRefusal(why, {call_, uid_, pid_, 0, request_});
    }
    if (!OfOperator()) return;
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
    LogEvent(OnlyLooks() ? LogLevel::kDebug : LogLevel::kInfo, "admin",
             {{"verb", call_.substr(kAdmin.size())},
              {"uid", uid_},
              {"pid", pid_},
              {"request", request_},
              {"took_us", us}});
  }

  // gRPC has no message for us either where the call was cancelled, or its deadline passed, before
  // one came. Only the call's end tells which, and comes before or after the answer, perhaps in
  // another thread: told by the later of the two.
  void MaybeMalformed() {
    if (--awaited_ != 0) return;
    const Refused who{call_, uid_, pid_, 0, request_};
    if (!info_->server_context()->IsCancelled()) return NoteRefusal(*malformed_, who);
    LogEvent(LogLevel::kDebug, "cancelled", {{"call", call_}, {"uid", uid_}, {"pid", pid_}});
  }

  ServerRpcInfo* const info_;    // gRPC's, for as long as this object
  const std::string_view call_;  // "Admin/Evict"; gRPC's, for as long as the service lives
  const bool one_answer_;
  const uint32_t uid_, pid_;
  const LastAsker last_asker_;
  const Clock::time_point begun_ = Clock::now();
  std::string request_;
  std::optional<Status> malformed_;
  std::atomic<int> awaited_{2};  // an answer that says malformed, and the call's end
};

class RecordFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  RecordFactory(uint32_t uid, UserProcess process) : uid_(uid), process_(std::move(process)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    return IsOurs(*info) ? new CallRecord(info, uid_, *process_, last_asker_) : nullptr;
  }

 private:
  const uint32_t uid_;
  const UserProcess process_;
  const LastAsker last_asker_ = std::make_shared<std::atomic<uint32_t>>(0);
};

class MalformedRequest final : public grpc::experimental::Interceptor {
 public:
  void Intercept(InterceptorBatchMethods* call) override {
    if (call->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
        NeverAsked(call->GetSendStatus())) {
      call->ModifySendStatus(
          ToGrpc(InvalidArgument("REQUEST_MALFORMED",
                                 "the request is no message of this call: its bytes cannot be "
                                 "parsed, or there was no memory for it")));
    }
    call->Proceed();
  }

 private:
  // No service of ours refuses without a message.
  static bool NeverAsked(const grpc::Status& status) {
    return status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty();
  }
};

class RefusalFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    return IsOurs(*info) ? new MalformedRequest : nullptr;
  }
};

}  // namespace

std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
CallInterceptors(uint32_t uid, UserProcess process) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<RefusalFactory>());
  factories.push_back(std::make_unique<RecordFactory>(uid, std::move(process)));
  return factories;
}

}  // namespace kvstrata
