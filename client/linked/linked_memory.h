// SPDX-License-Identifier: Apache-2.0
// LinkedMemory: the TableMemory of a linked session: arenas that this process mapped, and a table
// grows by a request over the ring.
//
// Ownership: borrows all. Threads: any. Trust: entries are checked against their arenas. Cost: the
// first use of an arena maps it; one whose descriptor is still on its way is waited for, at most
// `timeout`.
#ifndef KVSTRATA_CLIENT_LINKED_LINKED_MEMORY_H_
#define KVSTRATA_CLIENT_LINKED_LINKED_MEMORY_H_

#include <chrono>

#include "client/linked/attach.h"
#include "client/linked/page_map.h"
#include "client/linked/ring_client.h"
#include "session/sequence_tables.h"

namespace kvstrata::client {

class LinkedMemory final : public TableMemory {
 public:
  LinkedMemory(PageMap* arenas, Connection* connection, RingClient* ring, const Gpu& gpu,
               std::chrono::milliseconds timeout)
      : arenas_(*arenas), connection_(*connection), ring_(*ring), gpu_(gpu), timeout_(timeout) {}

  // As PageMap::Resolve.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) override;
  bool Writable(const shm::PageEntry& entry) override { return arenas_.Writable(entry); }
  Status Grow(const TableClaim& claim) override;
  bool on_gpu() const override { return gpu_.ops != nullptr; }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override;

 private:
  PageMap& arenas_;
  Connection& connection_;
  RingClient& ring_;
  const Gpu gpu_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_LINKED_LINKED_MEMORY_H_
