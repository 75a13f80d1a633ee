# SPDX-License-Identifier: Apache-2.0
# The store and what lies below it: memory resources, telemetry, sockets. Needs no gRPC.
find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(spdlog REQUIRED)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)

kvs_library(kvs_memory FOLDERS memory LIBS kvs_kernels kvs_base)
target_link_libraries(kvs_memory PRIVATE PkgConfig::HWLOC)

kvs_library(kvs_telemetry FOLDERS telemetry LIBS kvs_base kvs_reasons)
target_link_libraries(kvs_telemetry PRIVATE spdlog::spdlog)

kvs_library(kvs_sockets FOLDERS sockets LIBS kvs_shm kvs_base Threads::Threads)

# Its rooms from the bottom up; tests/tree/check_layers.py has their arrows.
kvs_library(kvs_store
  FOLDERS store/options store/reports store/pages store/requests store/books store/references store/prompts store/space
    store/codecs store/lookups store/sequences store/openings store
  LIBS kvs_memory kvs_kernels kvs_shm kvs_base Boost::headers)
target_link_libraries(kvs_store PRIVATE OpenSSL::Crypto)
