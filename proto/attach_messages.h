// SPDX-License-Identifier: Apache-2.0
// What travels through an attach socket (docs/shm_layout.md): SOCK_SEQPACKET, one struct a packet.
//
// All structs are PODs. Strings are UTF-8, NUL-terminated inside their array.
#pragma once

#include <cstdint>

namespace kvstrata::shm {

enum AttachType : uint32_t {
  kHello = 1,       // client, first packet
  kWelcome = 2,     // daemon, descriptors: session segment, table segment, doorbell (eventfd)
  kRefused = 3,     // daemon, then it closes
  kArena = 4,       // daemon, descriptor: the arena
  kDescriptor = 5,  // client, descriptor: memory that a RegisterTensors is about to name
  kRedeem = 6,      // client, first packet instead of Hello: a token that it got over gRPC
  kTables = 7,      // daemon, descriptor: the table segment; kArena packets follow it
};

struct Hello {
  uint32_t type;  // kHello
  uint32_t magic;
  uint32_t version;
  uint32_t reserved;
  char device_uuid[64];  // "" the first
  char client_name[64];  // for `session ls`
};

struct Welcome {
  uint32_t type;
  uint32_t version;
  uint64_t session_id;
  uint64_t daemon_epoch;
  uint64_t session_bytes;
  uint64_t table_bytes;
  char backend[16];  // the daemon's, so that both transports answer alike unless told otherwise
  char device_uuid[64];
};

struct Refused {
  uint32_t type;
  int32_t code;
  char reason[48];
  char message[456];
};

struct Arena {
  uint32_t type;
  uint32_t arena;
  uint64_t bytes;
  uint16_t tier;      // 0 device, 1 host
  uint16_t writable;  // 1: this session writes it; else it maps it read-only
  uint16_t memory;    // 0 memfd, 1 memory of the GPU that the Welcome names (a VMM handle)
  uint16_t reserved;
};

struct Descriptor {
  uint32_t type;
  uint32_t number;  // the client chooses it
};

// Sent by a process without the library, whose session is gRPC's.
struct Redeem {
  uint32_t type;  // kRedeem
  uint32_t magic;
  uint32_t version;
  uint32_t reserved;
  uint8_t token[16];  // Control.IssueAttachToken's
};
static_assert(sizeof(Redeem) == 32);

struct Tables {
  uint32_t type;
  uint32_t version;
  uint64_t session_id;
  uint64_t daemon_epoch;
  uint64_t table_bytes;
  uint32_t arenas;  // Arena packets that follow at once; others when arenas are granted
  uint32_t reserved;
  char device_uuid[64];
};
static_assert(sizeof(Tables) == 104);

}  // namespace kvstrata::shm
