# SPDX-License-Identifier: Apache-2.0
# The gRPC services, in one process with a store on a temporary socket.
kvs_test(rpc_status_test rpc_status_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_control_test rpc_control_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_compute_test rpc_compute_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_admin_test rpc_admin_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_server_test rpc_server_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_heartbeat_test rpc_heartbeat_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_work_queue_test rpc_work_queue_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_values_test rpc_values_test.cc LIBS kvs_rpc kvs_work LABELS rpc)
kvs_test(rpc_quota_test rpc_quota_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_users_test rpc_users_test.cc LIBS kvs_rpc LABELS rpc)
kvs_test(rpc_gpu_test rpc_gpu_test.cc LIBS kvs_rpc LABELS rpc)
