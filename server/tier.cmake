# SPDX-License-Identifier: Apache-2.0
# Tiers of values below memory. Know nothing of pages, sequences or the store.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(LIBURING REQUIRED IMPORTED_TARGET GLOBAL liburing)

set(KVS_TIER_SOURCES
  blocking_calls.cc
  call_queue.cc
  disk/files/pread_queue.cc
  disk/files/tier_directory.cc
  disk/files/tier_place.cc
  disk/files/transfer_queue.cc
  disk/files/uring_queue.cc
  disk/format/checkpoint.cc
  disk/format/segment_table.cc
  disk/state/tier_files.cc
  disk/state/tier_state.cc
  disk/disk_check.cc
  disk/disk_resize.cc
  disk/disk_space.cc
  disk/disk_tier.cc
  disk/value_writes.cc)
list(TRANSFORM KVS_TIER_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/tier/)
# Those with guards (tier/guard.h), in no object with others: the negative controls link their own instead.
set(KVS_GUARDED_SOURCES disk/format/format.cc disk/state/segment_marks.cc disk/checkpoint_files.cc disk/tier_start.cc
  disk/value_reads.cc)
list(TRANSFORM KVS_GUARDED_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/tier/)
set(KVS_GUARDED_SOURCES ${KVS_GUARDED_SOURCES} PARENT_SCOPE)
set_source_files_properties(${KVS_TIER_SOURCES} PROPERTIES UNITY_GROUP unguarded)
set_source_files_properties(${KVS_GUARDED_SOURCES} PROPERTIES UNITY_GROUP guarded)
kvs_library(kvs_tier ${KVS_TIER_SOURCES} ${KVS_GUARDED_SOURCES} LIBS kvs_base Threads::Threads)
set_target_properties(kvs_tier PROPERTIES UNITY_BUILD_MODE GROUP)
target_link_libraries(kvs_tier PRIVATE PkgConfig::LIBURING)

# The bytes of values in a remote tier: names, headers, sealing.
set(KVS_REMOTE_FORMAT_SOURCES
  remote/hmac_key.cc
  remote/node_announcement.cc
  remote/remote_envelope.cc
  remote/remote_format.cc
  remote/remote_secret.cc
  remote/stripe_cipher.cc)
list(TRANSFORM KVS_REMOTE_FORMAT_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/tier/)
set_source_files_properties(tier/remote/remote_format.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # it has guards
kvs_library(kvs_remote_format ${KVS_REMOTE_FORMAT_SOURCES} LIBS kvs_base)
target_link_libraries(kvs_remote_format PRIVATE OpenSSL::Crypto)

# The client of Redis and Valkey servers.
kvs_library(kvs_redis
  tier/redis/client/redis_client.cc
  tier/redis/client/redis_connection.cc
  tier/redis/client/redis_request.cc
  tier/redis/client/redis_resolver.cc
  tier/redis/client/redis_server.cc
  tier/redis/client/redis_slots.cc
  tier/redis/client/redis_socket.cc
  tier/redis/client/resp_reader.cc
  tier/redis/client/slot_watch.cc
  LIBS kvs_base Threads::Threads)
target_link_libraries(kvs_redis PRIVATE OpenSSL::SSL)

# Each engine as a ValueTier, in a folder of its own.
file(GLOB KVS_ENGINE_SOURCES RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS tier/*/*.cc)
list(FILTER KVS_ENGINE_SOURCES EXCLUDE REGEX "^tier/(disk|remote)/")
kvs_library(kvs_value_tiers
  tier/call_threads.cc
  tier/tier_buffers.cc
  tier/disk/disk_value_tier.cc
  tier/remote/known_values.cc
  ${KVS_ENGINE_SOURCES}
  LIBS kvs_memory kvs_telemetry kvs_tier kvs_redis kvs_remote_format Threads::Threads)
