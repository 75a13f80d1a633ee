// SPDX-License-Identifier: Apache-2.0
// Devices: their names, where arenas lie in the daemon, and what becomes of one that is lost
// (DEVICE_FAILED, a GPU's sticky error): it gives no memory any more, nobody finds what lies there
// (PageReferences::DropLost), and who has pages there is told. Host and disk go on.
//
// Thread-safety: methods that say so are called under the store's lock, all others from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/store/books/books.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class Devices {
 public:
  Devices(Books& books, SessionCatalog& catalog) : books_(books), catalog_(catalog) {}

  // The number of the one of that name; "": of the first. NOT_FOUND DEVICE_UNKNOWN names them all.
  Result<uint32_t> FindDevice(std::string_view name) const;
  const std::string& DeviceName(uint32_t device) const {
    return books_.memory.name(PoolId::Device(device));
  }
  // What the arenas of a tier are, on every device.
  HandleType handle_type(Tier tier) const { return books_.memory.handle_type(tier); }
  // The daemon's own mapping of an arena; null if there is none of that id. Valid while a reader is
  // inside an epoch and its table names the arena.
  std::byte* ArenaBase(uint32_t arena) const KVS_EXCLUDES(store_lock);
  // Lets kernels of a device follow that mapping, too; done when it returns. As long as ArenaBase
  // is valid. INTERNAL TABLE_INVALID; RESOURCE_EXHAUSTED HOST_UNREACHABLE; DEVICE_FAILED.
  Status ReachFromDevice(uint32_t arena, uint32_t device) const KVS_EXCLUDES(store_lock);
  // Whoever runs steps on a device found that it answers nothing any more: `why`, DEVICE_FAILED.
  void LoseDevice(uint32_t device, const Status& why);

  // DEVICE_FAILED if any of the sequence lies there.
  Status CheckHeld(const Sequence& s) const KVS_REQUIRES(store_lock);

 private:
  Books& books_;
  SessionCatalog& catalog_;
};

}  // namespace kvstrata
