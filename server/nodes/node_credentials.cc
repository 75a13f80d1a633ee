// SPDX-License-Identifier: Apache-2.0
#include "server/nodes/node_credentials.h"

#include <grpc/grpc_security_constants.h>

#include <fstream>
#include <iterator>

#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata {
namespace {

Result<std::string> ReadFile(std::string_view key, const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad() || text.empty()) {
    return InvalidArgument("REMOTE_ANNOUNCE",
                           std::string(key) + " = '" + path +
                               "' is empty or cannot be read; nodes need it to ask each other");
  }
  return text;
}

bool IsNumber(const redis::RedisAddress& at) {
  return at.host.find_first_not_of("0123456789.") == std::string::npos ||
         at.host.find(':') != std::string::npos;
}

bool IsLoopback(const redis::RedisAddress& at) {
  return IsNumber(at) && (at.host.starts_with("127.") || at.host == "::1");
}

}  // namespace

Result<NodeCredentials> NodeCredentials::Load(const redis::RedisTlsOptions& files,
                                              const std::string& announce) {
  NodeCredentials credentials;
  credentials.tls_ = !files.certificate_file.empty() || !files.key_file.empty();
  if (!credentials.tls_) {
    const Status reached = announce.empty() ? OkStatus() : credentials.CheckAddress(announce);
    if (!reached.ok()) {
      return InvalidArgument("REMOTE_ANNOUNCE",
                             "remote.announce: " + std::string(reached.message()));
    }
    return credentials;
  }
  if (announce.empty() && files.authorities_file.empty()) return NodeCredentials();
  KVS_ASSIGN_OR_RETURN(credentials.certificate_,
                       ReadFile("remote.tls_cert_file", files.certificate_file));
  KVS_ASSIGN_OR_RETURN(credentials.key_, ReadFile("remote.tls_key_file", files.key_file));
  KVS_ASSIGN_OR_RETURN(credentials.authorities_,
                       ReadFile("remote.tls_ca_file", files.authorities_file));
  return credentials;
}

Status NodeCredentials::CheckAddress(std::string_view address) const {
  if (tls_) return OkStatus();
  constexpr std::string_view kFiles =
      "remote.tls_cert_file, remote.tls_key_file and remote.tls_ca_file";
  const Result<redis::RedisAddress> at = redis::ParseRedisAddress(address);
  if (at.ok() && IsLoopback(*at)) return OkStatus();
  const std::string node =
      "a node at '" + std::string(address) + "' is reached by TLS alone, since ";
  // Where else a name may lead is not known here.
  if (at.ok() && !IsNumber(*at)) {
    return FailedPrecondition("REMOTE_ANNOUNCE",
                              node + "'" + at->host +
                                  "' is a name and no number; for daemons of one "
                                  "machine write 127.0.0.1:" +
                                  std::to_string(at->port) + ", else set " + std::string(kFiles));
  }
  return FailedPrecondition("REMOTE_ANNOUNCE",
                            node + "it is not on loopback; set " + std::string(kFiles));
}

std::shared_ptr<grpc::ServerCredentials> NodeCredentials::server() const {
  if (!tls_) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = authorities_;
  options.pem_key_cert_pairs.push_back({key_, certificate_});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> NodeCredentials::client() const {
  if (!tls_) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({authorities_, key_, certificate_});
}

}  // namespace kvstrata
