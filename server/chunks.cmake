# SPDX-License-Identifier: Apache-2.0
# Engine chunks: the room, its socket, its way to the tiers. Knows nothing of the store.
kvs_library(kvs_chunks
  chunks/room/chunk_credits.cc
  chunks/room/chunk_key.cc
  chunks/room/chunk_leases.cc
  chunks/room/chunk_region.cc
  chunks/room/chunk_room.cc
  chunks/room/engine_recalls.cc
  chunks/room/room_state.cc
  chunks/chunk_door.cc
  chunks/chunk_server.cc
  chunks/chunk_tiers.cc
  LIBS kvs_memory kvs_sockets kvs_telemetry kvs_base Threads::Threads)
target_link_libraries(kvs_chunks PRIVATE OpenSSL::Crypto)
