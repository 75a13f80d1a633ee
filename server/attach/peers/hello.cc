// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/hello.h"

#include <string>

#include "server/sockets/packet.h"

namespace kvstrata {
namespace {

Status CheckVersion(uint32_t version) {
  if (version == shm::kVersion) return OkStatus();
  return FailedPrecondition("VERSION_MISMATCH", "the client speaks shared-memory version " +
                                                    std::to_string(version) + ", this daemon " +
                                                    std::to_string(shm::kVersion) +
                                                    "; use libkvstrata of its release");
}

}  // namespace

Status CheckRedeem(const shm::Redeem& redeem, size_t bytes) {
  if (bytes == sizeof(redeem) && redeem.magic == shm::kMagic) return CheckVersion(redeem.version);
  return InvalidArgument("REDEEM_MALFORMED",
                         "the packet that redeems a token has " + std::to_string(bytes) +
                             " bytes, or another magic; needed: " + std::to_string(sizeof(redeem)) +
                             " bytes as docs/shm_layout.md has them");
}

Status CheckHello(const shm::Hello& hello, size_t bytes) {
  if (bytes != sizeof(hello) || hello.type != shm::kHello || hello.magic != shm::kMagic) {
    return InvalidArgument("HELLO_MALFORMED", "the first packet is no Hello of kvstrata (" +
                                                  std::to_string(bytes) +
                                                  " bytes); is this program a kvstrata client?");
  }
  KVS_RETURN_IF_ERROR(CheckVersion(hello.version));
  std::string device, name;
  if (!ReadText(hello.device_uuid, &device) || !ReadText(hello.client_name, &name)) {
    return InvalidArgument("HELLO_MALFORMED",
                           "device_uuid or client_name has no NUL in its 64 bytes");
  }
  return OkStatus();
}

}  // namespace kvstrata
