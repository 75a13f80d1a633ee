// SPDX-License-Identifier: Apache-2.0
// Connection: gRPC to one daemon, for verbs that ask and print.
//
// Dials the Unix socket itself and hands the descriptor to gRPC: a missing, foreign or forbidden
// socket is then an errno with a name, not "failed to connect to all addresses", and nothing
// retries. Threads: one. Cost: a call blocks until its answer or Options::timeout. Errors:
// SOCKET_INVALID, SOCKET_DENIED, DAEMON_UNREACHABLE, DEADLINE, and the daemon's own.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/status.h"
#include "client/cli/invocation.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "kvstrata/v1/control.grpc.pb.h"

namespace kvstrata::cli {

// Every field of a message, set or not, by its name in the proto: numbers as numbers, enums by
// their names without prefix in lower case ("bf16").
Json ToJson(const google::protobuf::Message& message);

class Connection {
 public:
  static Result<std::unique_ptr<Connection>> Dial(const Options& options);

  // One unary call: Call(&v1::Admin::Stub::GetStatus, request).
  template <typename Request, typename Response>
  Result<Response> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                        const Request& request) {
    return CallOn(*admin_, method, request);
  }
  template <typename Request, typename Response>
  Result<Response> Call(grpc::Status (v1::Control::Stub::*method)(grpc::ClientContext*,
                                                                  const Request&, Response*),
                        const Request& request) {
    return CallOn(*control_, method, request);
  }

  // How long a stream may take.
  enum class Lasts : uint8_t {
    kTimeout,  // the call has it in its request: the daemon keeps it
    kWait,     // the daemon knows no end: this program waits for the timeout
    kForever,  // until it is done, or the program ends
  };
  // One call that answers with a stream: each(response) for every message, then how it ended.
  template <typename Request, typename Response, typename Each>
  Status Stream(std::unique_ptr<grpc::ClientReader<Response>> (v1::Admin::Stub::*method)(
                    grpc::ClientContext*, const Request&),
                const Request& request, const Each& each, Lasts lasts = Lasts::kTimeout) {
    constexpr std::chrono::seconds kGrace{5};  // the daemon's answer is better than ours
    grpc::ClientContext context;
    if (lasts != Lasts::kForever) {
      const std::chrono::milliseconds grace(lasts == Lasts::kTimeout ? kGrace
                                                                     : std::chrono::seconds(0));
      context.set_deadline(std::chrono::system_clock::now() + timeout_ + grace);
    }
    const auto reader = (admin_.get()->*method)(&context, request);
    for (Response response; reader->Read(&response);) each(response);
    return Translate(reader->Finish());
  }

  // grpc.health.v1 of a name, "" for the whole daemon: "SERVING", "NOT_SERVING", "UNKNOWN".
  // NOT_FOUND: it has no such name.
  Result<std::string> Health(const std::string& name = "");

 private:
  Connection(std::shared_ptr<grpc::Channel> channel, const Options& options);

  template <typename Stub, typename Request, typename Response>
  Result<Response> CallOn(Stub& stub,
                          grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                       Response*),
                          const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout_);
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (!status.ok()) return Translate(status);
    if constexpr (std::is_same_v<Response, v1::GetStatusResponse>) CheckVersion(response);
    return response;
  }
  Status Translate(const grpc::Status& status);
  // The error where the daemon does not know the call, with both versions.
  Status Unknown();
  // Warns on stderr, once, if it is another than this program's.
  void CheckVersion(const v1::GetStatusResponse& daemon);

  std::shared_ptr<grpc::Channel> channel_;
  std::chrono::milliseconds timeout_;
  std::string verb_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<v1::Control::Stub> control_;
  bool warned_ = false;
};

// Dials, calls, returns the answer as a document: what most verbs are.
template <typename Service, typename Request, typename Response>
Result<Response> Ask(const Options& options,
                     grpc::Status (Service::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
                     const Request& request) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  return connection->Call(method, request);
}

// For Runs and Shows: a verb that asks `method` for everything and prints its answer's list `rows`.
template <typename Service, typename Request, typename Response>
auto Lists(grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Response*),
           std::string_view rows, std::span<const Column> columns) {
  return [=](const Options& options) -> Result<int> {
    KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, method, Request()));
    PrintList(options.style, ToJson(answer), rows, columns, std::cout);
    return kOk;
  };
}

// For an operation that the daemon goes on with when nobody waits any more: DEADLINE becomes
// `reason`, whose next step says how to see it. Others stay.
Status GoesOn(Status ended, std::string_view reason);

// The model that an operator named by its number or its name. MODEL_UNKNOWN lists those there are.
// Blocks for one call.
Result<v1::Model> NamedModel(Connection* connection, const std::string& wanted);

}  // namespace kvstrata::cli
