# SPDX-License-Identifier: Apache-2.0
# What works on the store beside its callers: the tiers below memory, moves, builds, imports.
kvs_library(kvs_work
  FOLDERS work work/tiers
  LIBS kvs_telemetry kvs_store kvs_value_tiers kvs_kernels Threads::Threads)
