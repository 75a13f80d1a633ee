# SPDX-License-Identifier: Apache-2.0
# The gRPC services.
find_library(KVS_GRPC_REFLECTION grpc++_reflection REQUIRED)
kvs_library(kvs_rpc
  FOLDERS rpc/steps rpc/calls rpc/engine rpc/admin rpc
  LIBS kvs_attach kvs_chunks kvs_store kvs_session kvs_kernels kvs_proto kvs_shm ${KVS_GRPC_REFLECTION})
