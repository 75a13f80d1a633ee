// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/redis_socket.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <cstring>

namespace kvstrata::redis {
namespace {

Status NoConnection(int error) {
  return Unavailable("REDIS_CONNECT", std::string("cannot connect: ") + std::strerror(error));
}
Status Closed(const std::string& why) { return Unavailable("REDIS_CLOSED", why); }

std::string TlsError() {
  const unsigned long code = ERR_get_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return reason == nullptr ? "unknown" : reason;
}

Status BadFile(const char* field, const std::string& file) {
  return InvalidArgument("REDIS_TLS", std::string(field) + " = '" + file + "' cannot be used: " +
                                          TlsError() + "; name a PEM file that this user may read");
}

bool IsAddress(const std::string& host) {
  in6_addr bytes;
  return inet_pton(AF_INET, host.c_str(), &bytes) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &bytes) == 1;
}

}  // namespace

Result<std::shared_ptr<RedisTls>> RedisTls::Load(const RedisTlsOptions& options) {
  auto tls = std::make_shared<RedisTls>();
  tls->server_name_ = options.server_name;
  tls->context_.reset(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  SSL_CTX* context = tls->context_.get();
  if (context == nullptr) return Unavailable("REDIS_TLS", "no TLS: " + TlsError());
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  const std::string& file = options.authorities_file;
  if (file.empty()) {
    SSL_CTX_set_default_verify_paths(context);
  } else if (SSL_CTX_load_verify_file(context, file.c_str()) != 1) {
    return BadFile("remote.tls_ca_file", file);
  }
  if (options.certificate_file.empty()) return tls;
  if (SSL_CTX_use_certificate_chain_file(context, options.certificate_file.c_str()) != 1) {
    return BadFile("remote.tls_cert_file", options.certificate_file);
  }
  if (SSL_CTX_use_PrivateKey_file(context, options.key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    return BadFile("remote.tls_key_file", options.key_file);
  }
  return tls;
}

Result<RedisSocket> RedisSocket::Connect(const SocketAddress& address, const RedisTls* tls,
                                         const std::string& host) {
  RedisSocket made;
  const int family = address.bytes.ss_family;
  made.fd_.Reset(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.fd_) return NoConnection(errno);
  const int on = 1;
  (void)setsockopt(made.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  (void)setsockopt(made.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  if (::connect(made.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.size) != 0 &&
      errno != EINPROGRESS) {
    return NoConnection(errno);
  }
  if (tls == nullptr) return made;
  made.tls_.reset(SSL_new(tls->context()), SSL_free);
  SSL* ssl = made.tls_.get();
  const std::string& name = tls->server_name().empty() ? host : tls->server_name();
  bool sound = ssl != nullptr && SSL_set_fd(ssl, made.fd()) == 1;
  if (sound && IsAddress(name)) {
    sound = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name.c_str()) == 1;
  } else if (sound) {
    sound = SSL_set1_host(ssl, name.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, name.c_str());
  }
  if (!sound) return Unavailable("REDIS_TLS", "no TLS: " + TlsError());
  SSL_set_connect_state(ssl);
  return made;
}

Result<bool> RedisSocket::Open() {
  if (open_) return true;
  if (!connected_) {
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return NoConnection(error);
    sockaddr_storage peer;
    socklen_t peer_size = sizeof(peer);
    if (getpeername(fd(), reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) {
      wants_write_ = true;
      return false;
    }
    connected_ = true;
    wants_write_ = false;
  }
  if (tls_ != nullptr) {
    ERR_clear_error();
    const int result = SSL_do_handshake(tls_.get());
    if (result != 1) {
      KVS_ASSIGN_OR_RETURN(const size_t none, WhyNot(result));
      return none != 0;
    }
    wants_write_ = false;
  }
  return open_ = true;
}

Result<size_t> RedisSocket::WhyNot(int result) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      wants_write_ = false;
      return size_t{0};
    case SSL_ERROR_WANT_WRITE:
      wants_write_ = true;
      return size_t{0};
    case SSL_ERROR_ZERO_RETURN:
      return Closed("the server closed the connection");
    default:
      break;
  }
  const long verified = SSL_get_verify_result(tls_.get());
  if (verified != X509_V_OK) {
    ERR_clear_error();
    return Unavailable("REDIS_TLS", std::string("the server's certificate is refused: ") +
                                        X509_verify_cert_error_string(verified));
  }
  if (open_) return Closed("the server closed the connection: " + TlsError());
  return Unavailable("REDIS_TLS", "no handshake: " + TlsError());
}

Result<size_t> RedisSocket::Write(std::span<const iovec> parts) {
  if (tls_ == nullptr) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    wants_write_ = sent < 0;
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return Closed(std::strerror(errno));
  }
  size_t sum = 0;
  for (const iovec& part : parts) {
    size_t sent = 0;
    ERR_clear_error();
    const int result = SSL_write_ex(tls_.get(), part.iov_base, part.iov_len, &sent);
    if (result != 1) {
      KVS_ASSIGN_OR_RETURN(const size_t none, WhyNot(0));
      return sum + none;
    }
    wants_write_ = false;
    sum += sent;
    if (sent < part.iov_len) break;
  }
  return sum;
}

Result<size_t> RedisSocket::Read(std::span<std::byte> into) {
  if (tls_ == nullptr) {
    const ssize_t came = ::recv(fd(), into.data(), into.size(), 0);
    if (came > 0) return static_cast<size_t>(came);
    if (came == 0) return Closed("the server closed the connection");
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return Closed(std::strerror(errno));
  }
  size_t came = 0;
  ERR_clear_error();
  if (SSL_read_ex(tls_.get(), into.data(), into.size(), &came) == 1) return came;
  return WhyNot(0);
}

bool RedisSocket::pending() const { return tls_ != nullptr && SSL_pending(tls_.get()) > 0; }

}  // namespace kvstrata::redis
