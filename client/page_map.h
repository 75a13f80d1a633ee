// PageMap: the arenas that the daemon passed to this session, mapped when first used, and the way
// from a table's entry to an address.
//
// Ownership: owns descriptors until they are mapped, then the mappings, until destruction.
// Threads: all methods from any thread; one short lock.
// Trust: sizes and seals are verified before mapping, entries are bounds-checked: a wrong table is
// an error, never a fault. Mappings are not inherited by fork() nor dumped in a core.
// Cost: Resolve is a hash look-up; the first use of an arena is one mmap (no memory is touched).
#ifndef KVSTRATA_CLIENT_PAGE_MAP_H_
#define KVSTRATA_CLIENT_PAGE_MAP_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "proto/ring_messages.h"
#include "proto/shm_layout.h"

namespace kvstrata::client {

// One shared mapping of a sealed memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // Maps all `bytes` of `fd`. DATA_LOSS SEGMENT_INVALID, naming `what`, when the file has another
  // size or could still shrink under us (a fault later).
  static Result<Mapping> Of(int fd, uint64_t bytes, bool writable, std::string_view what);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Forgets the mapping: in a child of fork() it does not exist, and the range may be another's.
  void Abandon();

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

class PageMap {
 public:
  void Add(const shm::Arena& arena, UniqueFd fd);

  // The address of `bytes` bytes at `entry`. NOT_FOUND ARENA_UNKNOWN when its arena has not arrived
  // (read the attach socket and try again), DATA_LOSS TABLE_INVALID when it breaks bounds.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes);

  // Whether this session may write the entry's bytes without asking for a private copy.
  bool Writable(const shm::PageEntry& entry);

  // Unmaps all, before the daemon is told that this was done.
  void Clear();
  // As Mapping::Abandon, for all.
  void AbandonAfterFork() KVS_NO_THREAD_SAFETY_ANALYSIS;

 private:
  struct Arena {
    UniqueFd fd;  // until mapped
    uint64_t bytes = 0;
    bool writable = false;
    Mapping mapping;
  };
  Mutex mu_;
  std::unordered_map<uint32_t, Arena> arenas_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_PAGE_MAP_H_
