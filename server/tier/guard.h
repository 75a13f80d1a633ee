// SPDX-License-Identifier: Apache-2.0
// Guards: the checks that stand between a disk, or a remote tier, and a wrong byte, by name.
//
// In the product all of them hold, at compile time. The negative controls of tests/server/tier
// compile the engine with KVS_LEAVE_OUT_GUARDS and leave out one at a time: their oracle must then
// find the harm that the guard prevents, or the guard is not proven to do anything.
#pragma once

#include <cstdint>

namespace kvstrata {

enum class Guard : uint8_t {
  kNone,
  kHeaderChecksum,      // slot headers have one
  kSuperblockChecksum,  // superblocks have one
  kCheckpointChecksum,  // checkpoint headers and entries have one
  kPayloadChecksum,     // every buffer's is checked, at every read
  kPlace,               // a header names its own store, segment and block
  kIdentity,            // a read demands the whole key and the index's generation
  kNewest,              // the higher generation of a key's two slots holds
  kDirtyMark,           // a checkpoint counts only for segments unchanged since
  kErasure,             // an erased slot's header is overwritten
  kFailedFlush,         // what a failed flush covered leaves the index

  // What came of a remote tier (docs/remote_format.md, "What guards what").
  kRemoteTag,     // a header is a tenant's, and as it was written
  kRemoteBytes,   // a stripe's bytes have the header's checksum, or tag
  kRemoteKey,     // a header has the whole key that was asked for
  kRemoteStripe,  // and the stripe's number
  kRemoteSizes,   // and the buffers' sizes
  kRemoteLength,  // nothing is missing, and nothing follows
  kRemoteWhole,   // stripes of one value are of one put, or of equal bytes
  kRemoteAge,     // it was not written too long ago, or in the future
};

#ifdef KVS_LEAVE_OUT_GUARDS
extern Guard left_out_guard;
inline bool Holds(Guard guard) { return guard != left_out_guard; }
#else
constexpr bool Holds(Guard) { return true; }
#endif

}  // namespace kvstrata
