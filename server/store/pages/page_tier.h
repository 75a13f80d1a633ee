// SPDX-License-Identifier: Apache-2.0
// PageTier: where sealed pages, index blocks and artefacts outlive the store's memory, as the store
// sees it (server/work/tiers/tier_chain.h). The store decides what is offered and what is wanted;
// the tier does all I/O, in its own threads and without the store's lock.
//
// Write-through: a page is offered when it enters the prefix index, and again when its positions
// have more reported of them; an artefact when it is complete; all also when they are used again,
// pinned or loaded. Which offers a tier takes is its policy (WritePolicy::Wants). Writing them when
// they are evicted would be later than kill -9 and would make an allocation wait.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "server/store/pages/pins.h"
#include "server/store/pages/prefix_key.h"

namespace kvstrata {

// A value that an offered key stands for (docs/disk_format.md, "Values").
struct SealedValue {
  PageKey key{};
  std::vector<uint64_t> sizes;  // sizes of its buffers
  bool changed = false;  // since it was copied last: it takes the place of the one that is there
};

// What a tier calls a key.
inline std::string TierNameOf(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

// Pages of a prompt that a tier of several shards keeps together: a group. The key of its first
// page is the place of them all, and of the index blocks that end with them. An artefact's place is
// its own key.
inline constexpr size_t kGroupPages = 256;
constexpr size_t GroupBegin(size_t page) { return page / kGroupPages * kGroupPages; }

// Why a key is offered.
enum class OfferedFor : uint8_t {
  kSealed,    // it is new here
  kReported,  // more was reported of its positions
  kArtefact,  // a codec made it
  kReused,    // another sequence opened on it
  kPinned,
  kLoaded,  // it came from a tier that was searched, and those before have it not
};

struct TierOffer {
  PageKey key{};
  PageKey place{};
  uint64_t bytes = 0;  // about
  OfferedFor why = OfferedFor::kSealed;
  std::string_view tenant;  // whose it is, during Offer; "": an operator wants it there
};

// What tiers that were searched say they have of a prompt: what to ask them for, and no promise.
struct TierFinds {
  struct Value {
    std::vector<uint64_t> sizes;  // sizes of its buffers
    PageKey place{};
    size_t row = 0;  // who has it, in the chain of tiers
  };
  std::unordered_map<PageKey, Value, PageKeyHash> values;
  std::chrono::steady_clock::time_point deadline{};  // for reading them
};

// What of a prompt neither memory nor the local tier has.
struct TierSearch {
  struct Key {
    PageKey key{};
    PageKey place{};
    bool page = true;  // else an index block's or an artefact's
  };
  std::string tenant;       // who opens
  std::vector<Key> keys;    // in the order of the prompt; an artefact's first
  bool artefact = false;    // the first is one
  uint32_t tokens = 0;      // in the pages among them
  uint64_t bytes = 0;       // the same
  double prefill_rate = 0;  // tokens a second that the engine computes; 0: not known
  std::chrono::steady_clock::time_point asked;
  // Called once, by the tier's deadline, from its thread.
  std::function<void(TierFinds finds)> done;
};

// The buffers of a value that came, whole or not at all: then there are none.
using LoadedValue = std::vector<std::span<const std::byte>>;

// What an opening sequence wants to have read.
struct TierLoad {
  std::vector<PageKey> keys;
  std::chrono::steady_clock::time_point asked;  // the tier's time for the open counts from here
  std::chrono::seconds longer{0};               // than the tier gives an open
  // What tiers were found to have of them, by a search; null: nothing.
  std::shared_ptr<const TierFinds> finds;
  // Called from the tier's thread with the values of keys `first` and on; returns whether more is
  // of use.
  std::function<bool(size_t first, std::span<const LoadedValue> values)> take;
  // Called last, exactly once, from the tier's thread. May start the next load.
  std::function<void()> done;
};

// Thread-safety: all methods, from any thread.
class PageTier {
 public:
  virtual ~PageTier() = default;
  // Something of this key is in the prefix index now, or an artefact. Under the store's lock or
  // not: short, never calls the store. What the tier has no room for is lost to it, and counted
  // there.
  virtual void Offer(const TierOffer& offer) = 0;
  // For the local tier: a look-up in memory, no promise. Not under the store's lock.
  virtual bool Holds(const PageKey& key) const = 0;
  // Asks a remote tier what it has. False: there is none, or it is not worth it; nothing will be
  // called. Not under the store's lock.
  virtual bool Search(TierSearch search) = 0;
  // Keeps what is or comes under the keys of a pin until Unpin, and the pin itself for the next
  // daemon; each time counts. Waits for the disk: not under the store's lock. What it cannot keep
  // for the next daemon is an error.
  virtual Status Pin(const PrefixPin& pin) = 0;
  // `forget`: for the next daemon too, which waits for the disk; else nothing is written.
  virtual Status Unpin(const PrefixPin& pin, bool forget) = 0;
  // Starts a load, which ends within the tier's deadline. False: none was started, nothing will be
  // called. Not under the store's lock.
  virtual bool Load(TierLoad load) = 0;
};

}  // namespace kvstrata
