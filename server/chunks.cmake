# SPDX-License-Identifier: Apache-2.0
# Engine chunks: the room, its socket, its way to the tiers. Knows nothing of the store.
kvs_library(kvs_chunks
  chunks/chunk_credits.cc
  chunks/chunk_door.cc
  chunks/chunk_key.cc
  chunks/chunk_leases.cc
  chunks/chunk_link.cc
  chunks/chunk_processes.cc
  chunks/chunk_region.cc
  chunks/chunk_room.cc
  chunks/chunk_server.cc
  chunks/chunk_sums.cc
  chunks/chunk_tiers.cc
  chunks/engine_recalls.cc
  chunks/room_state.cc
  LIBS kvs_memory kvs_checksum kvs_sockets kvs_telemetry kvs_base Threads::Threads)
target_link_libraries(kvs_chunks PRIVATE OpenSSL::Crypto)
