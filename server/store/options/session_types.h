// SPDX-License-Identifier: Apache-2.0
// What the store is told of who attaches, and what it gives him. Plain values.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/tier.h"
#include "proto/shm_layout.h"
#include "server/memory/memory_resource.h"

namespace kvstrata {

// A pool: that of the host, or that of a device, by its number in the store.
class PoolId {
 public:
  static constexpr uint32_t kMaxDevices = 64;

  static constexpr PoolId Host() { return PoolId(0); }
  static constexpr PoolId Device(uint32_t device) { return PoolId(device + 1); }

  Tier tier() const { return index_ == 0 ? Tier::kHost : Tier::kDevice; }
  uint32_t device() const { return index_ - 1; }  // REQUIRES: tier() is kDevice
  size_t index() const { return index_; }         // below 1 + the number of devices
  auto operator<=>(const PoolId&) const = default;

 private:
  explicit constexpr PoolId(uint32_t index) : index_(index) {}
  uint32_t index_;
};

// Who is at the other end; from the kernel, never from a request.
struct PeerIdentity {
  uint32_t uid = 0, gid = 0, pid = 0;
  std::string tenant;  // "uid:1000"
};

enum class Transport : uint8_t { kLinked, kRemote };

// An arena that a session may map. Descriptors stay owned by the store.
struct ArenaGrant {
  uint32_t arena = 0;
  uint64_t bytes = 0;
  Tier tier = Tier::kDevice;
  bool writable = false;
  HandleType handle_type = HandleType::kMemfd;
  int fd = -1;  // read-only or writable descriptor, as `writable` says
};
// Called, under the store's lock, before a table that names the arena is published.
using ArenaSink = std::function<void(const ArenaGrant&)>;

struct SessionSegments {
  uint64_t session = 0;
  uint64_t daemon_epoch = 0;
  int session_fd = -1;                   // writable by both
  int table_fd = -1;                     // read-only for the client
  shm::SessionHeader* header = nullptr;  // the daemon's mappings
  const shm::TableHeader* tables = nullptr;
  uint64_t session_bytes = 0, table_bytes = 0;
};

// What a process without the library maps of a session besides arenas.
struct PassedTables {
  UniqueFd table_fd;  // read-only; its own, so that it outlives the session
  uint64_t table_bytes = 0, daemon_epoch = 0;
  uint32_t device = 0;
  uint32_t arenas = 0;  // that were passed at once
};

struct ModelDesc {
  std::string name, digest, layout, adapter;
  Geometry geometry;
  int32_t rank = 0, ranks = 1;
  std::vector<int32_t> boundary_tokens;
  bool operator==(const ModelDesc&) const = default;
};

enum class SessionEnd : uint8_t {
  kDetached,  // the client said that it unmapped everything: memory may be reused at once
  kEof,   // the connection is gone, the process may live: sequences close, its arenas are fenced
  kDied,  // the process is dead: the fence falls
};

// What an end of a session was the end of.
struct EndedSession {
  std::string client_name;  // "": it gave none, or there was no such session
  uint32_t uid = 0;
  uint32_t sequences = 0;    // that were open
  uint64_t freed_bytes = 0;  // that nothing else refers to: free, or cached until room is needed
};

}  // namespace kvstrata
