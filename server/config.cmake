# SPDX-License-Identifier: Apache-2.0
# HTTP, and the configuration of all that needs no gRPC.
find_package(PkgConfig REQUIRED)
pkg_check_modules(TOMLPLUSPLUS REQUIRED IMPORTED_TARGET tomlplusplus)

kvs_library(kvs_http
  FOLDERS http
  LIBS kvs_telemetry Boost::headers Threads::Threads)

# Engines of the remote tier: their keys are the configuration's.
file(GLOB KVS_REMOTE_ENGINES CONFIGURE_DEPENDS daemon/tiers/remote_*.cc)
list(FILTER KVS_REMOTE_ENGINES EXCLUDE REGEX "/remote_tier.cc$")
kvs_library(kvs_config ${KVS_REMOTE_ENGINES}
  FOLDERS config
  LIBS kvs_attach kvs_http kvs_work kvs_kernels)
target_link_libraries(kvs_config PRIVATE PkgConfig::TOMLPLUSPLUS)
