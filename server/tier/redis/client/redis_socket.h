// SPDX-License-Identifier: Apache-2.0
// RedisSocket: a stream to a server that never blocks, with TLS or without.
//
// With TLS the server's certificate is checked against the authorities that are named and against
// the server's name, or the address that is called. Thread-safety: RedisTls any thread; a socket
// one at a time. The process ignores SIGPIPE (OpenSSL writes without MSG_NOSIGNAL).
// Errors: INVALID_ARGUMENT REDIS_TLS (files), UNAVAILABLE REDIS_CONNECT, REDIS_TLS (handshake),
// REDIS_CLOSED.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/unique_fd.h"

struct ssl_ctx_st;
struct ssl_st;

namespace kvstrata::redis {

struct RedisTlsOptions {
  bool on = false;
  std::string authorities_file;  // "": those of the system
  std::string certificate_file;  // ours, for servers that ask for one; "": none
  std::string key_file;
  std::string server_name;  // what certificates must be for; "": the host that is called
};

class RedisTls {
 public:
  // Reads the files.
  static Result<std::shared_ptr<RedisTls>> Load(const RedisTlsOptions& options);
  const std::string& server_name() const { return server_name_; }
  ssl_ctx_st* context() const { return context_.get(); }

 private:
  std::string server_name_;
  std::shared_ptr<ssl_ctx_st> context_;
};

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

class RedisSocket {
 public:
  // Begins to connect. `tls` null: without. `host` is what its certificate must be for.
  static Result<RedisSocket> Connect(const SocketAddress& address, const RedisTls* tls,
                                     const std::string& host);

  int fd() const { return fd_.get(); }
  // True once it is connected, and the handshake done.
  Result<bool> Open();
  // Bytes that were moved; 0: none can be now.
  Result<size_t> Write(std::span<const iovec> parts);
  Result<size_t> Read(std::span<std::byte> into);
  // Until it can be written, nothing goes on; as the last call found.
  bool wants_write() const { return wants_write_; }
  // Bytes have come that the descriptor tells no more of.
  bool pending() const;

 private:
  // For a call of OpenSSL that returned `result` <= 0.
  Result<size_t> WhyNot(int result);

  UniqueFd fd_;
  std::shared_ptr<ssl_st> tls_;
  bool connected_ = false, open_ = false, wants_write_ = true;
};

}  // namespace kvstrata::redis
