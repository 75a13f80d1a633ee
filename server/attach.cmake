# SPDX-License-Identifier: Apache-2.0
# The attach server and the rings of its sessions.
kvs_library(kvs_attach
  FOLDERS attach/peers attach/ring attach
  LIBS kvs_telemetry kvs_sockets kvs_store kvs_kernels kvs_shm kvs_base Threads::Threads)
