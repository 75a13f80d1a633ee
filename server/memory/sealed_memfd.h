// SPDX-License-Identifier: Apache-2.0
// A sealed, mapped memfd: what arenas and session segments are made of. Nothing is named in
// /dev/shm; size is fixed by seals, so no peer can make an access fault; the bytes stay out of core
// dumps and of children.
#pragma once

#include "server/memory/memory_resource.h"

namespace kvstrata {

// Who writes to it. kOne: this process through this mapping alone, which a seal makes sure of;
// what lies there can be believed. kSeveral: whoever has a writable descriptor, or is of our own
// user.
enum class Writers { kSeveral, kOne };

// `name` is what /proc shows. Errors as MemoryResource::Allocate.
Result<MappedMemory> MapSealedMemfd(const char* name, uint64_t bytes,
                                    Writers writers = Writers::kSeveral);

// Unmaps, and punches the memory out, so that it returns whoever else still maps it; that of
// kOne returns when nobody maps it or has a descriptor of it.
void UnmapSealedMemfd(MappedMemory memory);

}  // namespace kvstrata
