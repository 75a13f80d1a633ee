// SPDX-License-Identifier: Apache-2.0
#include "server/sockets/packet.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "proto/attach_messages.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxFds = 4;
constexpr size_t kMaxPassed = 253;  // SCM_MAX_FD: the kernel lets nobody pass more at once

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Length of the well-formed UTF-8 character at `at`; 0 if there is none.
size_t CharacterAt(std::string_view text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xC2 && lead < 0xE0   ? 2
                        : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!IsContinuation(text[at + i])) return 0;
  }
  const auto second = static_cast<unsigned char>(text[at + 1]);
  // Overlong forms, surrogates, and what lies beyond U+10FFFF.
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
      (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) {
    return 0;
  }
  return length;
}

}  // namespace

SendOutcome SendPacket(int socket, std::span<const std::byte> packet, std::span<const int> fds) {
  KVS_CHECK(fds.size() <= kMaxFds);
  iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  while (sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // ETOOMANYREFS: too many descriptors of this user are in flight; they drain.
    const bool full = errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS;
    return full ? SendOutcome::kFull : SendOutcome::kGone;
  }
  return SendOutcome::kSent;
}

namespace {

// What recvmsg says of the packet at the front; -1 with errno. Descriptors that find room in
// `control` are duplicates while MSG_PEEK is among `flags`: the packet keeps its own.
ssize_t Look(int socket, std::span<std::byte> packet, std::span<char> control, int flags,
             msghdr* message, iovec* part) {
  *part = {packet.data(), packet.size()};
  *message = {};
  message->msg_iov = part;
  message->msg_iovlen = 1;
  message->msg_control = control.empty() ? nullptr : control.data();
  message->msg_controllen = control.size();
  for (;;) {
    const ssize_t n = recvmsg(socket, message, flags | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n >= 0 || errno != EINTR) return n;
  }
}

void TakeDescriptors(msghdr* message, std::vector<UniqueFd>* fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(message); c != nullptr; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int passed = -1;
      std::memcpy(&passed, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      fds->emplace_back(passed);
    }
  }
}

// Takes the packet off that was looked at. What it passed has other holders, or is nothing.
void Consume(int socket) {
  msghdr message;
  iovec part;
  (void)Look(socket, {}, {}, 0, &message, &part);
}

ReceiveOutcome NoPacket(int socket, ssize_t n) {
  if (n < 0) return errno == EAGAIN ? ReceiveOutcome::kNothing : ReceiveOutcome::kEnd;
  Consume(socket);  // an empty one; or the end, which stays
  return ReceiveOutcome::kEnd;
}

}  // namespace

ReceiveOutcome ReceivePlain(int socket, std::span<std::byte> packet, size_t* bytes) {
  msghdr message;
  iovec part;
  const ssize_t n = Look(socket, packet, {}, MSG_PEEK, &message, &part);
  if (n >= 0 && (message.msg_flags & MSG_CTRUNC) != 0) return ReceiveOutcome::kDescriptors;
  if (n <= 0) return NoPacket(socket, n);
  Consume(socket);
  *bytes = static_cast<size_t>(n);
  return ReceiveOutcome::kPacket;
}

ReceiveOutcome ReceivePassed(int socket, std::span<std::byte> packet, size_t* bytes,
                             std::vector<UniqueFd>* fds) {
  msghdr message;
  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxPassed)];
  const ssize_t n = Look(socket, packet, control, MSG_PEEK, &message, &part);
  if (n < 0) return NoPacket(socket, n);
  TakeDescriptors(&message, fds);
  // Not all of them: this process has no descriptors left.
  if ((message.msg_flags & MSG_CTRUNC) != 0) return ReceiveOutcome::kDescriptors;
  if (n == 0 && fds->empty()) return NoPacket(socket, n);
  Consume(socket);
  *bytes = static_cast<size_t>(n);
  return ReceiveOutcome::kPacket;
}

void SendRefused(int socket, const Status& why) {
  shm::Refused refused{};
  refused.type = shm::kRefused;
  refused.code = static_cast<int32_t>(why.code());
  CopyText(why.reason(), refused.reason);
  CopyText(why.message(), refused.message);
  (void)SendPacket(socket, refused);
}

void CopyText(std::string_view text, std::span<char> out) {
  size_t n = std::min(text.size(), out.size() - 1);
  while (n > 0 && n < text.size() && IsContinuation(text[n])) --n;
  std::memcpy(out.data(), text.data(), n);
  std::memset(out.data() + n, 0, out.size() - n);
}

bool ReadText(std::span<const char> in, std::string* out) {
  const size_t n = strnlen(in.data(), in.size());
  if (n == in.size()) return false;
  out->assign(in.data(), n);
  return true;
}

std::string Printable(std::string text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = CharacterAt(text, at);
    const auto c = static_cast<unsigned char>(text[at]);
    if (length == 0 || c < 0x20 || c == 0x7F) text[at] = '?';
    at += std::max<size_t>(length, 1);
  }
  return text;
}

}  // namespace kvstrata
