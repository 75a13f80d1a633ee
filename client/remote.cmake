# SPDX-License-Identifier: Apache-2.0
# libkvstrata_remote.so: the C ABI over gRPC. For tools and tests: it brings gRPC and protobuf along.
set(KVS_PRECOMPILED kvs_grpc_headers)
kvs_library(kvs_remote remote/remote_channel.cc remote/remote_session.cc LIBS kvs_daemon_socket kvs_kernels kvs_proto_lite)
target_include_directories(kvs_remote PRIVATE ${CMAKE_SOURCE_DIR}/client/include)
kvs_abi_library(kvstrata_remote kvstrata_remote kvs_remote)
if(NOT KVS_SANITIZE)
  target_link_options(kvstrata_remote PRIVATE -Wl,-z,defs)
endif()
