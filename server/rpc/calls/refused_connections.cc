// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/refused_connections.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/status_map.h"

namespace kvstrata {
namespace {

constexpr int kMostReadable = 64;  // at a time
constexpr size_t kReadBytes = 16 << 10;
constexpr size_t kMostAnswers = 128;  // answers on one connection
constexpr size_t kPreface = 24;       // "PRI * HTTP/2.0 ..."

// HTTP/2: RFC 9113, 6.
constexpr uint8_t kHeaders = 1, kSettings = 4, kContinuation = 9;
constexpr uint8_t kAck = 0x1, kEndStream = 0x1, kEndHeaders = 0x4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame += payload;
}

// A length of HPACK (RFC 7541, 5.1, a prefix of 7 bits), and the text as it is.
void AppendText(std::string_view text, std::string* block) {
  constexpr size_t kPrefix = 127;
  if (text.size() < kPrefix) {
    *block += static_cast<char>(text.size());
  } else {
    *block += static_cast<char>(kPrefix);
    size_t rest = text.size() - kPrefix;
    for (; rest >= 128; rest /= 128) *block += static_cast<char>(rest % 128 + 128);
    *block += static_cast<char>(rest);
  }
  *block += text;
}

void AppendHeader(std::string_view name, std::string_view value, std::string* block) {
  *block += '\0';  // literal, never indexed, with its name
  AppendText(name, block);
  AppendText(value, block);
}

std::string Percented(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= 0x20 && byte < 0x7F && c != '%') {
      out += c;
    } else {
      out += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

std::string Base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int held = 0;
  for (const char c : bytes) {
    bits = bits << 8 | static_cast<uint8_t>(c);
    for (held += 8; held >= 6; held -= 6) out += kDigits[bits >> (held - 6) & 63];
  }
  if (held > 0) out += kDigits[bits << (6 - held) & 63];
  return out;
}

// What gRPC calls "trailers only".
std::string AnswerOf(const Status& why) {
  constexpr char kStatus200 = static_cast<char>(0x88);  // index in HPACK's table
  const grpc::Status status = ToGrpc(why);
  std::string block(1, kStatus200);
  AppendHeader("content-type", "application/grpc", &block);
  AppendHeader("grpc-status", std::to_string(status.error_code()), &block);
  AppendHeader("grpc-message", Percented(status.error_message()), &block);
  AppendHeader("grpc-status-details-bin", Base64(status.error_details()), &block);
  return block;
}

bool Send(int socket, const std::string& bytes) {
  return send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

Status RefusedConnections::Open() {
  readable_.Reset(epoll_create1(EPOLL_CLOEXEC));
  if (readable_) return OkStatus();
  return Internal("GRPC_START", std::string("epoll: ") + std::strerror(errno));
}

void RefusedConnections::Add(UniqueFd socket, uint32_t uid, const Status& why) {
  const auto same = [uid](const auto& entry) { return entry.second.uid == uid; };
  if (connections_.size() >= kMost ||
      std::ranges::count_if(connections_, same) >= static_cast<ptrdiff_t>(kMostOfUser)) {
    return Close(std::move(socket), uid);
  }
  const int number = socket.get();
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.fd = number;
  if (!Send(number, Frame(kSettings, 0, 0, "")) ||
      epoll_ctl(readable_.get(), EPOLL_CTL_ADD, number, &event) != 0) {
    return Close(std::move(socket), uid);
  }
  Connection& c = connections_[number];
  c.socket = std::move(socket);
  c.uid = uid;
  c.until = std::chrono::steady_clock::now() + kPatience;
  c.answer = AnswerOf(why);
  c.skip = kPreface;
}

void RefusedConnections::Serve() {
  epoll_event events[kMostReadable];
  const int n = epoll_wait(readable_.get(), events, kMostReadable, 0);
  for (int i = 0; i < n; ++i) {
    const auto found = connections_.find(events[i].data.fd);
    if (found != connections_.end() && !Read(&found->second)) Drop(found->first);
  }
}

void RefusedConnections::Expire(std::chrono::steady_clock::time_point now) {
  std::vector<int> over;
  for (const auto& [number, connection] : connections_) {
    if (connection.until <= now) over.push_back(number);
  }
  for (const int number : over) Drop(number);
}

bool RefusedConnections::Read(Connection* c) {
  std::array<uint8_t, kReadBytes> bytes;
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Looked at first: without room for them, taking it would close what it passes, here.
  const ssize_t n = recvmsg(c->socket.get(), &message, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0 || (message.msg_flags & MSG_CTRUNC) != 0) return false;
  const auto length = static_cast<size_t>(n);
  if (recv(c->socket.get(), bytes.data(), length, MSG_DONTWAIT) != n) return false;
  return Take(c, {bytes.data(), length});
}

bool RefusedConnections::Take(Connection* c, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    if (c->skip != 0) {
      const size_t skipped = std::min<uint64_t>(c->skip, bytes.size());
      c->skip -= skipped;
      bytes = bytes.subspan(skipped);
      continue;
    }
    c->header[c->filled++] = bytes.front();
    bytes = bytes.subspan(1);
    if (c->filled < c->header.size()) continue;
    c->filled = 0;
    c->skip = uint64_t{c->header[0]} << 16 | uint64_t{c->header[1]} << 8 | c->header[2];
    if (!OnFrame(c)) return false;
  }
  return true;
}

bool RefusedConnections::OnFrame(Connection* c) {
  const uint8_t type = c->header[3], flags = c->header[4];
  if (type == kSettings && (flags & kAck) == 0) {
    return ++c->answers <= kMostAnswers && Send(c->socket.get(), Frame(kSettings, kAck, 0, ""));
  }
  if ((type != kHeaders && type != kContinuation) || (flags & kEndHeaders) == 0) return true;
  const uint32_t stream = uint32_t{c->header[5] & 0x7Fu} << 24 | uint32_t{c->header[6]} << 16 |
                          uint32_t{c->header[7]} << 8 | c->header[8];
  return ++c->answers <= kMostAnswers &&
         Send(c->socket.get(), Frame(kHeaders, kEndStream | kEndHeaders, stream, c->answer));
}

void RefusedConnections::Drop(int socket) {
  epoll_ctl(readable_.get(), EPOLL_CTL_DEL, socket, nullptr);
  const auto found = connections_.find(socket);
  Close(std::move(found->second.socket), found->second.uid);
  connections_.erase(found);
}

void RefusedConnections::Close(UniqueFd socket, uint32_t uid) {
  shutdown(socket.get(), SHUT_RDWR);  // the peer sees it, whenever it is closed
  if (closer_ != nullptr) closer_->Put(std::move(socket), uid);
}

RefusedConnections::~RefusedConnections() {
  for (auto& [number, connection] : connections_) {
    Close(std::move(connection.socket), connection.uid);
  }
}

}  // namespace kvstrata
