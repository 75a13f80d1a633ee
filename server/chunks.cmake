# SPDX-License-Identifier: Apache-2.0
# Engine chunks: the room, its socket, its way to the tiers. Knows nothing of the store.
kvs_library(kvs_chunks
  FOLDERS chunks/room chunks
  LIBS kvs_memory kvs_sockets kvs_telemetry kvs_base Threads::Threads)
target_link_libraries(kvs_chunks PRIVATE OpenSSL::Crypto)
