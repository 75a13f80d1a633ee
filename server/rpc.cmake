# SPDX-License-Identifier: Apache-2.0
# The gRPC services.
find_library(KVS_GRPC_REFLECTION grpc++_reflection REQUIRED)
kvs_library(kvs_rpc
  rpc/steps/cpu_steps.cc
  rpc/steps/gpu_steps.cc
  rpc/steps/remote_session.cc
  rpc/steps/work_queue.cc
  rpc/calls/call_records.cc
  rpc/calls/grpc_connections.cc
  rpc/calls/grpc_library.cc
  rpc/calls/prefix_messages.cc
  rpc/calls/refused_connections.cc
  rpc/calls/service_context.cc
  rpc/engine/compute_service.cc
  rpc/engine/control_service.cc
  rpc/engine/session_stream.cc
  rpc/admin/admin_messages.cc
  rpc/admin/admin_service.cc
  rpc/admin/config_calls.cc
  rpc/admin/quota_calls.cc
  rpc/admin/recall_stream.cc
  rpc/admin/remote_calls.cc
  rpc/admin/scrub_stream.cc
  rpc/admin/selection_calls.cc
  rpc/admin/value_stream.cc
  rpc/admin/watch_stream.cc
  rpc/admin/work_calls.cc
  rpc/cluster_service.cc
  rpc/grpc_server.cc
  LIBS kvs_attach kvs_chunks kvs_store kvs_session kvs_kernels kvs_proto kvs_shm ${KVS_GRPC_REFLECTION})
