// SPDX-License-Identifier: Apache-2.0
// RemoteMemory: the TableMemory of a remote session, in the daemon: all arenas are its own, and a
// table grows by a call of the store.
//
// Ownership: borrows the store and the session's device. Threads: one at a time (the session's
// strand). Cost: Resolve asks the store when an entry's arena is another one than the last; the
// first use of an arena of the host by a GPU registers it.
#ifndef KVSTRATA_SERVER_RPC_STEPS_REMOTE_MEMORY_H_
#define KVSTRATA_SERVER_RPC_STEPS_REMOTE_MEMORY_H_

#include "server/rpc/steps/step_runner.h"
#include "server/store/store.h"
#include "session/sequence_tables.h"

namespace kvstrata {

class RemoteMemory final : public TableMemory {
 public:
  RemoteMemory(Store* store, StepDevice* device, uint64_t session)
      : store_(*store), device_(*device), session_(session) {}

  // INTERNAL TABLE_INVALID, and what StepGpu::Reach fails with.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) override;
  bool Writable(const shm::PageEntry& entry) override;
  Status Grow(const TableClaim& claim) override;
  bool on_gpu() const override { return device_.gpu() != nullptr; }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override {
    return device_.Read(to, from, bytes);
  }

 private:
  Store& store_;
  StepDevice& device_;
  const uint64_t session_;
  uint32_t last_arena_ = 0;  // arena of the last Resolve
  std::byte* last_base_ = nullptr;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_STEPS_REMOTE_MEMORY_H_
