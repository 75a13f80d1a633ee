// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/epochs.h"

#include <algorithm>

namespace kvstrata {

uint64_t OldestReader(const shm::SessionHeader& session) {
  uint64_t oldest = kNoReader;
  for (const shm::ReaderSlot& reader : session.readers) {
    const uint64_t epoch = reader.epoch.load(std::memory_order_seq_cst);
    if (epoch != 0) oldest = std::min(oldest, epoch);
  }
  return oldest;
}

uint32_t CountReaders(const shm::SessionHeader& session) {
  return static_cast<uint32_t>(std::count_if(
      std::begin(session.readers), std::end(session.readers),
      [](const shm::ReaderSlot& r) { return r.epoch.load(std::memory_order_relaxed) != 0; }));
}

}  // namespace kvstrata
