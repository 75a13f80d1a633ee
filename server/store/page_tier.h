// PageTier: where sealed pages and index blocks outlive the store's memory, as the store sees it
// (server/work/disk_pages.h). The store decides what is offered and what is wanted; the tier does
// all I/O, in its own threads and without the store's lock.
//
// Write-through: a page is offered when it enters the prefix index. Writing it when it is evicted
// would be later than kill -9 and would make an allocation wait.
#ifndef KVSTRATA_SERVER_STORE_PAGE_TIER_H_
#define KVSTRATA_SERVER_STORE_PAGE_TIER_H_

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/store/pins.h"
#include "server/store/prefix_key.h"

namespace kvstrata {

// What an opening sequence wants to have read, from the first page on.
struct PrefixLoad {
  std::vector<PageKey> keys;
  // Called from the tier's thread with the bytes of keys `first` and on, an empty span for one that
  // did not come; returns whether more is of use.
  std::function<bool(size_t first, std::span<const std::span<const std::byte>> values)> take;
  // Called last, exactly once, from the tier's thread.
  std::function<void()> done;
};

// Thread-safety: all methods, from any thread.
class PageTier {
 public:
  virtual ~PageTier() = default;
  // Something of this key is in the prefix index now. Under the store's lock: short, never calls
  // the store. What the tier has no room for is lost to it, and counted there.
  virtual void Offer(const PageKey& key) = 0;
  // A look-up in memory, no promise. Not under the store's lock.
  virtual bool Holds(const PageKey& key) const = 0;
  // Keeps what is or comes under the keys of a pin until Unpin, and the pin itself for the next
  // daemon; each time counts. Waits for the disk: not under the store's lock. What it cannot keep for
  // the next daemon is an error.
  virtual Status Pin(const PrefixPin& pin) = 0;
  // `forget`: for the next daemon too, which waits for the disk; else nothing is written.
  virtual Status Unpin(const PrefixPin& pin, bool forget) = 0;
  // Starts a load, which ends within the tier's deadline. False: none was started, nothing will be
  // called. Not under the store's lock.
  virtual bool Load(PrefixLoad load) = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PAGE_TIER_H_
