// SPDX-License-Identifier: Apache-2.0
// Status over gRPC, both ways: code for code, the reason in a google.rpc.ErrorInfo of domain
// "kvstrata" in the status details. The daemon, the CLI and libkvstrata_remote.so translate here
// and nowhere else.
//
// Pure functions; any thread.
#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <string_view>

#include "base/status.h"

namespace kvstrata {

inline constexpr std::string_view kErrorDomain = "kvstrata";

// A message that goes into the details beside the ErrorInfo.
struct StatusDetail {
  std::string_view type;  // full name, "kvstrata.v1.StepBeginResponse"; empty: none
  std::string bytes;
};

grpc::Status ToGrpc(const Status& status, const StatusDetail& detail = {});

// An error that kvstrata did not make gets a reason by its code: DAEMON_GONE (UNAVAILABLE),
// DEADLINE (DEADLINE_EXCEEDED), MESSAGE_TOO_LARGE (RESOURCE_EXHAUSTED), RPC_UNIMPLEMENTED, else
// RPC_FAILED; CANCELLED becomes ABORTED RPC_CANCELLED, UNKNOWN becomes INTERNAL.
Status FromGrpc(const grpc::Status& status);

// The bytes of the detail of that type; empty if there is none.
std::string DetailOf(const grpc::Status& status, std::string_view type);

}  // namespace kvstrata
