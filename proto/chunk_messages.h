// SPDX-License-Identifier: Apache-2.0
// What travels through a chunk socket (docs/chunks.md): SOCK_SEQPACKET, one message a packet, of at
// most kMostChunkPacket bytes, little-endian.
//
// All structs are PODs. Strings are UTF-8, NUL-terminated inside their array. Those with `count`
// are followed by as many elements, and nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvstrata::chunks {

inline constexpr uint32_t kMagic = 0x4b56434b;
inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kMostChunkPacket = 65536;
inline constexpr uint32_t kMostAsked = 1024;                // keys of one Ask
inline constexpr uint32_t kMostLeased = 1u << 20;           // keys of one lease
inline constexpr uint32_t kMostRecalledLayers = 1024;       // an engine's, by number
inline constexpr uint32_t kMostRecalledSamples = 1u << 20;  // a layer's in one Recalled
inline constexpr uint64_t kRowGranularity = 4096;           // bytes; rows are multiples of it
// Keys of chunks in tiers begin so; 32 bytes follow.
inline constexpr std::string_view kKeyPrefix = "chunk/";
inline constexpr size_t kTierKeyBytes = kKeyPrefix.size() + 32;
inline constexpr int32_t kNotThere = -1, kComing = -2;  // instead of a chunk's id

enum class Type : uint32_t {
  // The client's.
  kHello = 1,     // the first packet
  kSpace = 2,     // later keys belong to it
  kAsk = 3,       // + AskedKey[count]
  kRelease = 4,   // + uint32_t lease[count]
  kWant = 5,      // so many more credits
  kStored = 6,    // + StoredChunk[count]
  kReturn = 7,    // + int32_t id[count]
  kDetach = 8,    // nobody of this engine copies any more; the last packet
  kRecalled = 9,  // + RecalledLayer[count]
  // The daemon's.
  kWelcome = 101,  // descriptor: the region
  kRefused = 102,  // then it closes
  kHeld = 103,     // + int32_t id[count]
  kArrived = 104,  // + ArrivedChunk[count]
  kCredits = 105,  // + int32_t id[count]
  kRecall = 106,   // so many of the credits that nobody writes are to be returned
};

enum class Role : uint32_t { kScheduler = 0, kWorker = 1 };

using Hash = std::array<uint8_t, 32>;

struct Hello {
  Type type;
  uint32_t magic;
  uint32_t version;
  Role role;
  uint64_t row_bytes;
  char engine[64];
  char client_name[64];
};
static_assert(sizeof(Hello) == 152);

struct Space {
  Type type;
  uint32_t reserved;
  Hash space;
};
static_assert(sizeof(Space) == 40);

struct Ask {
  Type type;
  uint32_t lease;
  uint32_t first;  // number of the first key within the lease
  uint32_t count;
};
static_assert(sizeof(Ask) == 16);

struct AskedKey {
  Hash hash;
  uint32_t group;
};
static_assert(sizeof(AskedKey) == 36);

// Release, Stored, Return and Credits begin so; Want, Detach and Recall are nothing else.
struct Counted {
  Type type;
  uint32_t count;
};
static_assert(sizeof(Counted) == 8);

struct StoredChunk {
  AskedKey key;
  int32_t id;
};
static_assert(sizeof(StoredChunk) == 40);

// What a plan lost since the message before, of a worker whose engine attends by it over its own
// blocks. `plan` as the engine was given it, not empty.
struct Recalled {
  Type type;
  uint32_t count;  // 1 .. kMostRecalledLayers
  char plan[128];
  char model[120];
};
static_assert(sizeof(Recalled) == 256);

struct RecalledLayer {
  uint32_t layer;    // below kMostRecalledLayers
  uint32_t samples;  // query heads of steps; 1 .. kMostRecalledSamples
  float recall;      // softmax mass of full attention on what the plan attended, 0 .. 1: mean
  float least;       // the least of these
  float error;       // ||plan - full|| / ||full|| of the output, 0 or more: mean
};
static_assert(sizeof(RecalledLayer) == 20);

struct Welcome {
  Type type;
  uint32_t version;
  uint64_t daemon_epoch;
  uint64_t region_bytes;
  uint64_t row_bytes;
};
static_assert(sizeof(Welcome) == 32);

struct Refused {
  Type type;
  int32_t code;
  char reason[48];
  char message[456];
};
static_assert(sizeof(Refused) == 512);

struct Held {
  Type type;
  uint32_t lease;
  uint32_t first;
  uint32_t count;
};
static_assert(sizeof(Held) == 16);

struct Arrived {
  Type type;
  uint32_t lease;
  uint32_t count;
};
static_assert(sizeof(Arrived) == 12);

struct ArrivedChunk {
  uint32_t index;  // in the lease
  int32_t id;      // or kNotThere
};
static_assert(sizeof(ArrivedChunk) == 8);

}  // namespace kvstrata::chunks
