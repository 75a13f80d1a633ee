// SPDX-License-Identifier: Apache-2.0
// NodeAnnouncement: that a node of the cluster is there, and where it answers, as it lies in the
// servers of the remote tier; and NodeKeys, by which nodes know each other's words
// (docs/remote_format.md, "Nodes").
//
// Everything is authenticated under keys that come of the cluster's secret: who can write in the
// servers, or call a node, can make nothing that is accepted. Nothing is encrypted.
// Thread-safety: values; const methods from any thread. Cost: 1 us each.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/tier/remote/hmac_key.h"
#include "server/tier/remote/remote_secret.h"

namespace kvstrata::remote {

// A node has one of these places; so many nodes can announce themselves.
inline constexpr uint32_t kNodeSeats = 1024;
inline constexpr size_t kAnnouncementBytes = 384;
inline constexpr size_t kMaxNodeAddressBytes = 255;
inline constexpr size_t kMaxNodeReleaseBytes = 56;
// How far clocks of nodes may be apart.
inline constexpr std::chrono::minutes kMaxNodeSkew{10};

struct NodeAnnouncement {
  uint32_t seat = 0;
  uint64_t node = 0;     // random, of one run of a daemon
  uint64_t written = 0;  // seconds since 1970, by the writer's clock
  std::string address;   // HOST:PORT, where others reach it
  std::string release;   // release of kvstrata
};

class NodeKeys {
 public:
  NodeKeys(const RemoteSecret& secret, Seal seal);

  // All seats are in one slot.
  std::string NameOf(uint32_t seat) const;
  // REQUIRES: an address and a release that are not too long, and an address that is not empty.
  std::string Write(const NodeAnnouncement& node) const;
  // `age`: how old it may be, beyond kMaxNodeSkew. DATA_LOSS: REMOTE_CORRUPT (not such bytes, or of
  // another secret or seal), REMOTE_OTHER (another seat's), REMOTE_STALE.
  Result<NodeAnnouncement> Read(std::string_view bytes, uint32_t seat,
                                std::chrono::system_clock::time_point now,
                                std::chrono::seconds age) const;

  // What authenticates a call to a node, and the answer to that call.
  HmacKey::Digest OfCall(std::string_view body) const;
  HmacKey::Digest OfAnswer(const HmacKey::Digest& call, std::string_view body) const;
  static bool Equal(const HmacKey::Digest& digest, std::string_view claimed);

 private:
  const Seal seal_;
  std::string place_;  // "kv1:{PLACE}:node."
  HmacKey tag_;
};

}  // namespace kvstrata::remote
