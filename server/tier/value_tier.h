// SPDX-License-Identifier: Apache-2.0
// ValueTier: a tier of values below memory, as everything above it sees one: on a local disk, in
// the memory of other machines, or in this process for tests.
//
// A value is 1 to 16 buffers of at least a byte each under a key of 1 to 64 bytes. It is there
// whole or not at all. Equal keys must mean equal bytes: a Put of a key that is there is done at
// once, and a value that changed is forgotten and put again. Any value may leave at any time: a
// full tier makes room by its own choice, and a damaged value leaves when it is read. What Get
// returns with OK was put under that key and has been checked since.
//
// Asynchrony: a call takes a batch and returns; `done` of its TierCall is called exactly once, when
// every request has its status and the tier looks at the batch no more. Get, Put and Forget end in
// a thread of the tier's (but see `waits`), Probe and Walk perhaps before the call returns. Calls
// may overtake each
// other. A tier that is destroyed ends what it holds with UNAVAILABLE.
//   Deadline  A call ends soon after it, whatever a device or a peer does. What has not ended by
//             then gets DEADLINE_EXCEEDED. A call whose deadline has passed touches no device.
//   Cancel    What has not begun then gets ABORTED TIER_CANCELLED and has no effect. What has begun
//             ends as it would, or as ABORTED, by its deadline. Later it means nothing.
//
// Ownership: the batch is the caller's and stays as it is until `done`. `keep` of a request owns
// its buffers. A tier lets go of it when no device uses them any more, which after
// DEADLINE_EXCEEDED or ABORTED may be later than `done`; buffers may be used again, or freed, only
// then. Thread-safety: all methods, from any thread that holds no lock which `done` takes. `done`
// may take as long as a copy of what came, and may make the next call. Blocking: none but Stats,
// briefly.
//
// Errors of a request, by code; reasons are the implementation's: INVALID_ARGUMENT (key, buffers,
// or sizes that are not those that were put), NOT_FOUND, DATA_LOSS (it failed its check and has
// left), RESOURCE_EXHAUSTED (no room, and none could be made), DEADLINE_EXCEEDED, ABORTED,
// UNAVAILABLE (the tier, or its part that has the key, is left alone for a while).
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/status.h"

namespace kvstrata {

using Deadline = std::chrono::steady_clock::time_point;

inline constexpr size_t kMaxValueBuffers = 16;
inline constexpr size_t kMaxValueKeyBytes = 64;
// Buffers that begin at multiples of this are moved without a copy, if the tier has no use for one.
inline constexpr uint64_t kValueAlignment = 4096;

// Bytes of each buffer of a value, without memory of its own elsewhere: look-ups make many.
class ValueSizes {
 public:
  ValueSizes() = default;
  ValueSizes(const ValueSizes& from) { *this = from; }
  // Copies only the sizes that are there.
  ValueSizes& operator=(const ValueSizes& from) {
    if (this == &from) return *this;
    count_ = from.count_;
    std::ranges::copy(from.all(), sizes_.begin());
    return *this;
  }
  // REQUIRES: at most 16.
  explicit ValueSizes(std::span<const uint64_t> sizes) : count_(sizes.size()) {
    KVS_CHECK(sizes.size() <= kMaxValueBuffers);
    std::ranges::copy(sizes, sizes_.begin());
  }
  // Sizes of a value with these buffers. REQUIRES: the same.
  template <typename Byte>
  static ValueSizes Of(const std::vector<std::span<Byte>>& buffers) {
    KVS_CHECK(buffers.size() <= kMaxValueBuffers);
    ValueSizes sizes;
    for (const std::span<Byte>& buffer : buffers) sizes.sizes_[sizes.count_++] = buffer.size();
    return sizes;
  }
  std::span<const uint64_t> all() const { return std::span(sizes_).first(count_); }
  bool empty() const { return count_ == 0; }

 private:
  size_t count_ = 0;
  std::array<uint64_t, kMaxValueBuffers> sizes_;  // the first `count_` of them
};

struct TierProbe {
  std::string_view key;    // the caller's
  ValueSizes sizes;        // none: it is not there, or that cannot be told in time
  std::string_view place;  // the caller's; as in TierPut
};

struct TierGet {
  std::string key;
  std::vector<std::span<std::byte>> buffers;  // with the sizes that were put
  std::shared_ptr<void> keep;
  Status status;
  bool header_room = false;  // the tier may write to the 4096 bytes before the first buffer
  bool inspects = false;     // no use of the value: it is not spared as one in use for that
  std::string place;         // as in TierPut
};

struct TierPut {
  std::string key;
  std::vector<std::span<const std::byte>> buffers;
  std::shared_ptr<void> keep;
  Status status;
  bool header_room = false;  // as in TierGet
  std::string place;         // at most 64 bytes: a tier of several shards keeps equal places on one
};

struct TierForget {
  std::string key;
  Status status;
  std::string place;  // as in TierPut
};

struct TierValue {
  std::string key;
  std::vector<uint64_t> sizes;  // sizes of its buffers
};
inline constexpr uint64_t kWalkEnd = ~uint64_t{0};

struct TierWalk {
  uint64_t cursor = 0;            // 0: the beginning; moved by each call, at the end to kWalkEnd
  size_t most = 256;              // places to look at, at least as many as there are values
  std::vector<TierValue> values;  // set by each call; may be none before the end
  Status status;
};

// How a call ends.
struct TierCall {
  Deadline deadline{};  // the past: late at once
  std::stop_token cancel;
  std::function<void()> done;
  // For Put and Forget: OK means that it holds after a power cut too, where the tier outlives one.
  bool durable = false;
  // The caller does nothing until `done`. A tier may carry a Put, Forget or Walk out in that
  // thread, and wakes none of its own for it then.
  bool waits = false;
};

// Since start, but for what is there now.
struct TierStats {
  uint64_t capacity_bytes = 0, used_bytes = 0, entries = 0;  // now
  uint64_t puts = 0;                                         // that were OK
  uint64_t hits = 0;                                         // gets that were OK
  uint64_t misses = 0;                                       // gets of what was not there
  uint64_t evicted = 0;                                      // gave room to others
  uint64_t damaged = 0;                                      // failed a check, and left
  std::string illness;  // "": well; else what is wrong, for a person
};

class ValueTier {
 public:
  virtual ~ValueTier() = default;

  // Whether values are there, and their sizes; no promise. A deadline in the past asks for what is
  // known in this process, and is answered before the call returns.
  virtual void Probe(std::span<TierProbe> probes, TierCall call) = 0;
  // Reads values into the caller's buffers, whose bytes mean nothing unless OK.
  virtual void Get(std::span<TierGet> gets, TierCall call) = 0;
  // Where several values in a batch have one key, the first counts.
  virtual void Put(std::span<TierPut> puts, TierCall call) = 0;
  // OK for what is not there, too.
  virtual void Forget(std::span<TierForget> keys, TierCall call) = 0;
  // The next portion of all values. What is there during a whole walk comes at least once; what
  // comes or leaves meanwhile may be missed.
  virtual void Walk(TierWalk* walk, TierCall call) = 0;
  virtual TierStats Stats() const = 0;
};

inline Status TierCancelled() {
  return {Code::kAborted, "TIER_CANCELLED", "whoever asked for it does not want it any more"};
}
inline Status TierLate() {
  return {Code::kDeadlineExceeded, "TIER_DEADLINE", "its deadline passed before it could begin"};
}
// OK while a call may begin.
inline Status WhyNotNow(const TierCall& call) {
  if (call.cancel.stop_requested()) return TierCancelled();
  return call.deadline <= std::chrono::steady_clock::now() ? TierLate() : OkStatus();
}
inline Status TierStopped() { return Unavailable("TIER_STOPPED", "the tier is stopping"); }

}  // namespace kvstrata
