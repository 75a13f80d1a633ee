# SPDX-License-Identifier: Apache-2.0
# Tiers of values below memory. Know nothing of pages, sequences or the store.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(LIBURING REQUIRED IMPORTED_TARGET GLOBAL liburing)

# Those with guards (tier/guard.h), in no object with others: the negative controls link their own instead.
set(KVS_GUARDED_SOURCES tier/disk/format/format.cc tier/disk/state/segment_marks.cc tier/disk/checkpoint_files.cc
  tier/disk/tier_start.cc tier/disk/value_reads.cc)
kvs_sources(KVS_TIER_SOURCES tier/disk tier/disk/files tier/disk/format tier/disk/state)
list(REMOVE_ITEM KVS_TIER_SOURCES tier/disk/disk_value_tier.cc ${KVS_GUARDED_SOURCES})
list(APPEND KVS_TIER_SOURCES tier/blocking_calls.cc tier/call_queue.cc)
set_source_files_properties(${KVS_TIER_SOURCES} PROPERTIES UNITY_GROUP unguarded)
set_source_files_properties(${KVS_GUARDED_SOURCES} PROPERTIES UNITY_GROUP guarded)
kvs_library(kvs_tier ${KVS_TIER_SOURCES} ${KVS_GUARDED_SOURCES} LIBS kvs_base Threads::Threads)
list(TRANSFORM KVS_GUARDED_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
set(KVS_GUARDED_SOURCES ${KVS_GUARDED_SOURCES} PARENT_SCOPE)
set_target_properties(kvs_tier PROPERTIES UNITY_BUILD_MODE GROUP)
target_link_libraries(kvs_tier PRIVATE PkgConfig::LIBURING)

# The bytes of values in a remote tier: names, headers, sealing.
kvs_sources(sources tier/remote)
list(REMOVE_ITEM sources tier/remote/known_values.cc)
set_source_files_properties(tier/remote/remote_format.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # it has guards
kvs_library(kvs_remote_format ${sources} LIBS kvs_base)
target_link_libraries(kvs_remote_format PRIVATE OpenSSL::Crypto)

# The client of Redis and Valkey servers.
kvs_library(kvs_redis
  FOLDERS tier/redis/client
  LIBS kvs_base Threads::Threads)
target_link_libraries(kvs_redis PRIVATE OpenSSL::SSL)

# Each engine as a ValueTier, in a folder of its own.
kvs_library(kvs_value_tiers
  tier/call_threads.cc tier/tier_buffers.cc tier/disk/disk_value_tier.cc tier/remote/known_values.cc
  FOLDERS tier/mooncake tier/redis
  LIBS kvs_memory kvs_telemetry kvs_tier kvs_redis kvs_remote_format Threads::Threads)
