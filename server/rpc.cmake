# SPDX-License-Identifier: Apache-2.0
# The gRPC services.
find_library(KVS_GRPC_REFLECTION grpc++_reflection REQUIRED)
kvs_library(kvs_rpc
  rpc/admin_messages.cc
  rpc/admin_service.cc
  rpc/value_messages.cc
  rpc/value_stream.cc
  rpc/call_records.cc
  rpc/calls_under_way.cc
  rpc/cluster_service.cc
  rpc/compute_service.cc
  rpc/config_calls.cc
  rpc/control_service.cc
  rpc/cpu_steps.cc
  rpc/engine_calls.cc
  rpc/gpu_steps.cc
  rpc/grpc_connections.cc
  rpc/grpc_server.cc
  rpc/health_names.cc
  rpc/library_log.cc
  rpc/malformed_requests.cc
  rpc/prefix_messages.cc
  rpc/quota_calls.cc
  rpc/remote_calls.cc
  rpc/recall_stream.cc
  rpc/recompress_stream.cc
  rpc/refused_connections.cc
  rpc/remote_memory.cc
  rpc/remote_session.cc
  rpc/scrub_stream.cc
  rpc/selection_calls.cc
  rpc/service_context.cc
  rpc/session_stream.cc
  rpc/tensor_ref.cc
  rpc/watch_stream.cc
  rpc/work_calls.cc
  rpc/work_queue.cc
  LIBS kvs_attach kvs_chunks kvs_store kvs_session kvs_kernels kvs_proto kvs_shm ${KVS_GRPC_REFLECTION})
