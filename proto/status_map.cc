// SPDX-License-Identifier: Apache-2.0
#include "proto/status_map.h"

#include "kvstrata/wire/error_info.pb.h"
#include "kvstrata/wire/status.pb.h"

namespace kvstrata {
namespace {

constexpr std::string_view kTypePrefix = "type.googleapis.com/";
constexpr std::string_view kErrorInfo = "google.rpc.ErrorInfo";
// Trailers have 8 KiB by default, and the message goes in twice.
constexpr size_t kMaxMessage = 2000;

void AddDetail(std::string_view type, std::string bytes, wire::Status* to) {
  wire::Any* any = to->add_details();
  any->set_type_url(std::string(kTypePrefix) + std::string(type));
  any->set_value(std::move(bytes));
}

Code CodeOf(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::CANCELLED:
      return Code::kAborted;
    case grpc::StatusCode::UNKNOWN:
      return Code::kInternal;
    default:
      break;
  }
  const Code same = static_cast<Code>(code);
  return CodeName(same) == "UNKNOWN" ? Code::kInternal : same;
}

std::string_view ReasonOf(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::UNAVAILABLE:
      return "DAEMON_GONE";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return "DEADLINE";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "MESSAGE_TOO_LARGE";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "RPC_UNIMPLEMENTED";
    case grpc::StatusCode::CANCELLED:
      return "RPC_CANCELLED";
    default:
      return "RPC_FAILED";
  }
}

// Cut at a character's boundary.
std::string Shortened(const std::string& message) {
  if (message.size() <= kMaxMessage) return message;
  size_t end = kMaxMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return message.substr(0, end) + " ...";
}

}  // namespace

grpc::Status ToGrpc(const Status& status, const StatusDetail& detail) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Shortened(status.message());
  wire::ErrorInfo info;
  info.set_reason(status.reason());
  info.set_domain(std::string(kErrorDomain));
  wire::Status rich;
  rich.set_code(static_cast<int32_t>(status.code()));
  rich.set_message(message);
  AddDetail(kErrorInfo, info.SerializeAsString(), &rich);
  if (!detail.type.empty()) AddDetail(detail.type, detail.bytes, &rich);
  return {static_cast<grpc::StatusCode>(status.code()), message, rich.SerializeAsString()};
}

std::string DetailOf(const grpc::Status& status, std::string_view type) {
  wire::Status rich;
  if (status.error_details().empty() || !rich.ParseFromString(status.error_details())) return {};
  for (const wire::Any& any : rich.details()) {
    if (any.type_url() == std::string(kTypePrefix) + std::string(type)) return any.value();
  }
  return {};
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  wire::ErrorInfo info;
  const std::string bytes = DetailOf(status, kErrorInfo);
  const bool ours = !bytes.empty() && info.ParseFromString(bytes) && info.domain() == kErrorDomain;
  return {CodeOf(status.error_code()),
          ours ? std::string_view(info.reason()) : ReasonOf(status.error_code()),
          status.error_message()};
}

}  // namespace kvstrata
