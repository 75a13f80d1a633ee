// SPDX-License-Identifier: Apache-2.0
#include "client/cli/connection.h"

#include <fcntl.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "kvstrata/kvstrata.h"
#include "proto/status_map.h"

namespace kvstrata::cli {
namespace {

Status Refused(const std::string& path, int error) {
  const std::string at = "socket '" + path + "': " + std::strerror(error);
  if (error == EACCES || error == EPERM) {
    return {Code::kPermissionDenied, "SOCKET_DENIED",
            at + "; the daemon admits its own user, its group and root (mode 0660)"};
  }
  if (error == EAGAIN || error == ETIMEDOUT) {
    return {Code::kDeadlineExceeded, "DEADLINE", at + "; the daemon does not accept connections"};
  }
  if (error == ECONNREFUSED) {
    return Unavailable("DAEMON_UNREACHABLE", at + "; a daemon that is gone left it behind");
  }
  return Unavailable("DAEMON_UNREACHABLE", at + "; no daemon listens there");
}

Status CheckPath(const std::string& path) {
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return InvalidArgument("SOCKET_INVALID", "socket '" + path + "' has " +
                                                 std::to_string(path.size()) +
                                                 " bytes; 1 .. 100 are allowed");
  }
  struct stat st {};
  if (stat(path.c_str(), &st) == 0 && !S_ISSOCK(st.st_mode)) {
    return InvalidArgument(
        "SOCKET_INVALID",
        "socket '" + path + "' is " + (S_ISDIR(st.st_mode) ? "a directory" : "not a socket"));
  }
  return OkStatus();
}

Result<UniqueFd> Connect(const Options& options) {
  KVS_RETURN_IF_ERROR(CheckPath(options.socket));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return Refused(options.socket, errno);
  const auto ms = options.timeout.count();  // a full backlog makes connect wait
  const timeval wait{static_cast<time_t>(ms / 1000), static_cast<suseconds_t>(ms % 1000 * 1000)};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, options.socket.data(), options.socket.size());
  int rc;
  do {
    rc = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) return Refused(options.socket, errno);
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) | O_NONBLOCK);  // as gRPC wants it
  return fd;
}

// DTYPE_BF16 of enum DType: "bf16".
std::string EnumText(const google::protobuf::EnumValueDescriptor& value) {
  std::string name = value.name();
  std::string prefix = value.type()->name();
  std::transform(prefix.begin(), prefix.end(), prefix.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  if (name.starts_with(prefix + "_")) name = name.substr(prefix.size() + 1);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return name;
}

// A field that uses all 64 bits is text: most readers of JSON take numbers for doubles. All others
// count bytes, events or microseconds, which stay below 2^53.
bool UsesAllBits(const google::protobuf::FieldDescriptor& field) {
  return field.full_name() == "kvstrata.v1.GetStatusResponse.daemon_epoch";
}

// Field `field` of `m`; `index` is -1 for a field that is not repeated.
Json FieldValue(const google::protobuf::Message& m, const google::protobuf::FieldDescriptor& field,
                int index) {
  const auto& r = *m.GetReflection();
  using F = google::protobuf::FieldDescriptor;
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case F::CPPTYPE_INT32:
      return one ? r.GetInt32(m, &field) : r.GetRepeatedInt32(m, &field, index);
    case F::CPPTYPE_INT64:
      return one ? r.GetInt64(m, &field) : r.GetRepeatedInt64(m, &field, index);
    case F::CPPTYPE_UINT32:
      return one ? r.GetUInt32(m, &field) : r.GetRepeatedUInt32(m, &field, index);
    case F::CPPTYPE_UINT64:
      if (UsesAllBits(field)) return std::to_string(r.GetUInt64(m, &field));
      return one ? r.GetUInt64(m, &field) : r.GetRepeatedUInt64(m, &field, index);
    case F::CPPTYPE_DOUBLE:
      return one ? r.GetDouble(m, &field) : r.GetRepeatedDouble(m, &field, index);
    case F::CPPTYPE_FLOAT:
      return one ? r.GetFloat(m, &field) : r.GetRepeatedFloat(m, &field, index);
    case F::CPPTYPE_BOOL:
      return one ? r.GetBool(m, &field) : r.GetRepeatedBool(m, &field, index);
    case F::CPPTYPE_ENUM:
      return EnumText(one ? *r.GetEnum(m, &field) : *r.GetRepeatedEnum(m, &field, index));
    case F::CPPTYPE_STRING:
      return one ? r.GetString(m, &field) : r.GetRepeatedString(m, &field, index);
    case F::CPPTYPE_MESSAGE:
      return ToJson(one ? r.GetMessage(m, &field) : r.GetRepeatedMessage(m, &field, index));
  }
  return {};
}

}  // namespace

Status GoesOn(Status ended, std::string_view reason) {
  if (ended.reason() != "DEADLINE") return ended;
  return {Code::kDeadlineExceeded, std::string(reason),
          std::string(ended.message()) + "; it goes on with what it was asked for"};
}

Json ToJson(const google::protobuf::Message& message) {
  Json out = Json::object();
  const auto& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const auto& field = *type.field(i);
    if (!field.is_repeated()) {
      out[field.name()] = FieldValue(message, field, -1);
      continue;
    }
    Json& list = out[field.name()] = Json::array();
    const int n = message.GetReflection()->FieldSize(message, &field);
    for (int j = 0; j < n; ++j) list.push_back(FieldValue(message, field, j));
  }
  return out;
}

Connection::Connection(std::shared_ptr<grpc::Channel> channel, const Options& options)
    : channel_(std::move(channel)),
      timeout_(options.timeout),
      verb_(options.verb),
      admin_(v1::Admin::NewStub(channel_)),
      control_(v1::Control::NewStub(channel_)) {}

Result<std::unique_ptr<Connection>> Connection::Dial(const Options& options) {
  KVS_ASSIGN_OR_RETURN(UniqueFd fd, Connect(options));
  auto channel = grpc::CreateInsecureChannelFromFd("kvstrata", fd.release());  // closes it
  return std::unique_ptr<Connection>(new Connection(std::move(channel), options));
}

Status Connection::Translate(const grpc::Status& status) {
  Status translated = FromGrpc(status);
  if (translated.reason() == "RPC_UNIMPLEMENTED") return Unknown();
  if (translated.reason() != "DEADLINE") return translated;  // the daemon's own says more
  return {Code::kDeadlineExceeded, "DEADLINE",
          "no answer from the daemon in " + std::to_string(timeout_.count()) + " ms"};
}

// Only the daemon's own user and root hear which version it is.
Status Connection::Unknown() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout_);
  v1::GetStatusResponse daemon;
  const bool told = admin_->GetStatus(&context, v1::GetStatusRequest(), &daemon).ok();
  const std::string asked = told ? "kvstratad " + daemon.version() + " (" + daemon.commit() + ")"
                                 : std::string("a kvstratad of another version");
  return Unimplemented("RPC_UNIMPLEMENTED", "kvstrata " + std::string(kvs_version()) + " asked " +
                                                asked + ", which has no '" + verb_ +
                                                "': upgrade the daemon");
}

void Connection::CheckVersion(const v1::GetStatusResponse& daemon) {
  if (daemon.version() == kvs_version() || std::exchange(warned_, true)) return;
  std::cerr << "kvstrata: warning: the daemon is " << daemon.version() << ", this program is "
            << kvs_version()
            << "; what only one of them knows reads as nothing or 0: restart the daemon with this "
               "program's release\n";
}

Result<std::string> Connection::Health(const std::string& name) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout_);
  grpc::GenericStub stub(channel_);
  // HealthCheckRequest: field 1, a string; of "" no bytes.
  grpc::Slice bytes;
  if (!name.empty())
    bytes = grpc::Slice("\x0a" + std::string(1, static_cast<char>(name.size())) + name);
  grpc::ByteBuffer request(&bytes, 1), response;
  // Not the callback API: its threads may sleep for ten seconds when the channel goes.
  grpc::CompletionQueue events;
  grpc::Status status;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &events);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  events.Next(&tag, &ok);
  if (!status.ok()) return Translate(status);
  grpc::Slice slice;
  response.DumpToSingleSlice(&slice);
  // HealthCheckResponse: field 1, a varint; absent: 0.
  static constexpr const char* kNames[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};
  const size_t value = slice.size() == 2 && slice.begin()[0] == 8 ? slice.begin()[1] : 0;
  return std::string(kNames[value < 4 ? value : 0]);
}

Result<v1::Model> NamedModel(Connection* connection, const std::string& wanted) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       connection->Call(&v1::Control::Stub::ListModels, v1::ListModelsRequest()));
  std::string known;
  for (const v1::Model& model : answer.models()) {
    if (std::to_string(model.model()) == wanted || model.name() == wanted) return model;
    known +=
        (known.empty() ? "" : ", ") + std::to_string(model.model()) + " (" + model.name() + ")";
  }
  return NotFound("MODEL_UNKNOWN",
                  "model '" + wanted + "' is neither the number nor the name of one; " +
                      (known.empty() ? "no engine has registered any" : "there are " + known));
}

}  // namespace kvstrata::cli
