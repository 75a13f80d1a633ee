// Packets of the attach socket (proto/ring_messages.h): one struct each, with descriptors beside
// it.
//
// Nothing here blocks: a peer that does not read makes Send answer kFull, never wait.
// Thread-safety: any thread. Cost: one system call.
#ifndef KVSTRATA_SERVER_ATTACH_PACKET_H_
#define KVSTRATA_SERVER_ATTACH_PACKET_H_

#include <span>
#include <string>

#include "base/status.h"
#include "proto/ring_messages.h"
#include "proto/shm_layout.h"

namespace kvstrata {

enum class SendOutcome { kSent, kFull, kGone };

SendOutcome SendPacket(int socket, std::span<const std::byte> packet, std::span<const int> fds);

template <typename T>
SendOutcome SendPacket(int socket, const T& packet, std::span<const int> fds = {}) {
  return SendPacket(socket, std::as_bytes(std::span(&packet, 1)), fds);
}

// Tells the peer why it is refused, as well as the socket takes it.
void SendRefused(int socket, const Status& why);

// Copies `text` into a NUL-terminated array, cut between UTF-8 characters if it is too long.
void CopyText(std::string_view text, std::span<char> out);

// The text of such an array; false when it has no NUL.
bool ReadText(std::span<const char> in, std::string* out);

// Makes a peer's text fit for logs and protobuf: control characters and broken UTF-8 become '?'.
std::string Printable(std::string text);

// OK, or the Status that refuses a client: size, type, magic, version, texts. `bytes` is what recv
// returned.
Status CheckHello(const shm::Hello& hello, size_t bytes);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_PACKET_H_
