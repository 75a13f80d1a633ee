// SPDX-License-Identifier: Apache-2.0
// NodeCredentials: how nodes reach each other: by TLS, where both show a certificate of the
// authorities in remote.tls_ca_file; or without, on loopback alone, for daemons of one machine.
// Thread-safety: values.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/tier/redis/client/redis_socket.h"

namespace kvstrata {

class NodeCredentials {
 public:
  // Reads the files: with certificate, key and authorities nodes speak TLS, with none of
  // certificate and key they do not. INVALID_ARGUMENT REMOTE_ANNOUNCE: a file that cannot be read
  // or is not named, or an `announce` ("": none) that would be reached without TLS.
  static Result<NodeCredentials> Load(const redis::RedisTlsOptions& files,
                                      const std::string& announce);

  // OK, or FAILED_PRECONDITION REMOTE_ANNOUNCE: a node there is not to be called without TLS.
  Status CheckAddress(std::string_view address) const;
  std::shared_ptr<grpc::ServerCredentials> server() const;
  std::shared_ptr<grpc::ChannelCredentials> client() const;

 private:
  bool tls_ = false;
  std::string authorities_, certificate_, key_;
};

}  // namespace kvstrata
