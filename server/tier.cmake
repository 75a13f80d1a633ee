# SPDX-License-Identifier: Apache-2.0
# The disk tier's storage engine. Knows nothing of pages, sequences or the store.
include(CheckLibraryExists)
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(LIBURING REQUIRED IMPORTED_TARGET GLOBAL liburing)

# Checksums of what leaves memory. Debian's libxxhash for x86 chooses its vector kernels when it runs.
kvs_library(kvs_checksum tier/checksum.cc LIBS kvs_base)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
target_link_libraries(kvs_checksum PRIVATE PkgConfig::XXHASH)
check_library_exists(xxhash XXH3_128bits_dispatch "${XXHASH_LIBRARY_DIRS}" KVS_XXHASH_DISPATCH)
if(KVS_XXHASH_DISPATCH)
  target_compile_definitions(kvs_checksum PRIVATE KVS_XXHASH_DISPATCH)
endif()

set(KVS_TIER_SOURCES
  blocking_calls.cc
  call_queue.cc
  checkpoint.cc
  checkpoint_files.cc
  disk_check.cc
  disk_resize.cc
  disk_space.cc
  disk_tier.cc
  format.cc
  pread_queue.cc
  segment_marks.cc
  segment_table.cc
  slot_erasure.cc
  tier_directory.cc
  tier_files.cc
  tier_place.cc
  tier_start.cc
  tier_state.cc
  tier_victims.cc
  transfer_queue.cc
  uring_queue.cc
  value_reads.cc
  value_writes.cc)
list(TRANSFORM KVS_TIER_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/tier/)
set(KVS_TIER_SOURCES ${KVS_TIER_SOURCES} PARENT_SCOPE)  # for the negative controls
kvs_library(kvs_tier ${KVS_TIER_SOURCES} LIBS kvs_base kvs_checksum Threads::Threads)
target_link_libraries(kvs_tier PRIVATE PkgConfig::LIBURING)

# The bytes of values in a remote tier: names, headers, sealing.
set(KVS_REMOTE_FORMAT_SOURCES
  hmac_key.cc
  node_announcement.cc
  remote_envelope.cc
  remote_format.cc
  remote_names.cc
  remote_secret.cc
  stripe_cipher.cc)
list(TRANSFORM KVS_REMOTE_FORMAT_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/tier/)
set(KVS_REMOTE_FORMAT_SOURCES ${KVS_REMOTE_FORMAT_SOURCES} PARENT_SCOPE)  # for the negative controls
kvs_library(kvs_remote_format ${KVS_REMOTE_FORMAT_SOURCES} LIBS kvs_base kvs_checksum)
target_link_libraries(kvs_remote_format PRIVATE OpenSSL::Crypto)

# The client of Redis and Valkey servers.
kvs_library(kvs_redis
  tier/redis_client.cc
  tier/redis_connection.cc
  tier/redis_request.cc
  tier/redis_resolver.cc
  tier/redis_server.cc
  tier/redis_slots.cc
  tier/redis_socket.cc
  tier/resp_reader.cc
  tier/slot_watch.cc
  LIBS kvs_base Threads::Threads)
target_link_libraries(kvs_redis PRIVATE OpenSSL::SSL)
