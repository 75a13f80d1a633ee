// SPDX-License-Identifier: Apache-2.0
#include "server/doctor/doctor_checks.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>

namespace kvstrata::doctor {
namespace {

constexpr std::chrono::seconds kDaemonTime{5};

// One call of Admin at the socket. False: no answer.
template <typename Request, typename Response>
bool Ask(const std::string& socket,
         grpc::Status (v1::Admin::Stub::*call)(grpc::ClientContext*, const Request&, Response*),
         Response* response, bool* denied) {
  *denied = false;
  if (access(socket.c_str(), F_OK) != 0) return false;
  const auto admin =
      v1::Admin::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDaemonTime);
  const grpc::Status asked = ((*admin).*call)(&context, Request(), response);
  *denied = asked.error_code() == grpc::StatusCode::PERMISSION_DENIED;
  return asked.ok();
}

}  // namespace

std::optional<v1::GetStatusResponse> DaemonsStatus(const std::string& socket, bool* denied) {
  v1::GetStatusResponse told;
  if (!Ask(socket, &v1::Admin::Stub::GetStatus, &told, denied)) return std::nullopt;
  return told;
}

std::optional<std::string> DaemonsKey(const std::string& socket, std::string_view key,
                                      bool* denied) {
  v1::GetConfigResponse told;
  if (!Ask(socket, &v1::Admin::Stub::GetConfig, &told, denied)) return std::nullopt;
  for (const v1::ConfigEntry& entry : told.entries()) {
    if (entry.key() == key) return entry.value();
  }
  return std::nullopt;
}

}  // namespace kvstrata::doctor
