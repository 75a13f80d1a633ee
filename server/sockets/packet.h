// SPDX-License-Identifier: Apache-2.0
// Packets of the sockets that pass descriptors (proto/attach_messages.h, proto/chunk_messages.h):
// one message each, with descriptors beside it.
//
// Nothing here blocks: a peer that does not read makes Send answer kFull, never wait; a peer's
// descriptors are not closed here (ReceiveOutcome).
// Thread-safety: any thread. Cost: one system call.
#pragma once

#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "proto/shm_layout.h"

namespace kvstrata {

enum class SendOutcome { kSent, kFull, kGone };

SendOutcome SendPacket(int socket, std::span<const std::byte> packet, std::span<const int> fds);

template <typename T>
requires std::is_trivially_copyable_v<T> SendOutcome SendPacket(int socket, const T& packet,
                                                                std::span<const int> fds = {}) {
  return SendPacket(socket, std::as_bytes(std::span(&packet, 1)), fds);
}

// What peers pass is never closed by who receives it here: closing may block, and the kernel closes
// what finds no room in the receiver's thread. So a packet is looked at first, and taken when
// nothing of it can be lost.
enum class ReceiveOutcome {
  kPacket,
  kNothing,      // none is there now
  kEnd,          // the peer has closed its end, or a packet is empty
  kDescriptors,  // it passes descriptors, or more than can be taken: they are still in the socket,
                 // which only a DescriptorCloser may close
};

// A packet that passes nothing; `*bytes` of it were copied to `packet`.
ReceiveOutcome ReceivePlain(int socket, std::span<std::byte> packet, size_t* bytes);
// A packet with what it passes.
ReceiveOutcome ReceivePassed(int socket, std::span<std::byte> packet, size_t* bytes,
                             std::vector<UniqueFd>* fds);

// Tells the peer why it is refused, as well as the socket takes it.
void SendRefused(int socket, const Status& why);

// Copies `text` into a NUL-terminated array, cut between UTF-8 characters if it is too long.
void CopyText(std::string_view text, std::span<char> out);

// The text of such an array; false when it has no NUL.
bool ReadText(std::span<const char> in, std::string* out);

// Makes a peer's text fit for logs and protobuf: control characters and broken UTF-8 become '?'.
std::string Printable(std::string text);

}  // namespace kvstrata
