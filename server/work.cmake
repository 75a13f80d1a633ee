# SPDX-License-Identifier: Apache-2.0
# What works on the store beside its callers: the tiers below memory, moves, builds, imports.
kvs_library(kvs_work
  work/block_rows.cc
  work/importer.cc
  work/mover.cc
  work/recompress.cc
  work/tensor_releases.cc
  work/tiers/lost_value_log.cc
  work/tiers/pin_records.cc
  work/tiers/tier_loads.cc
  work/tiers/tier_chain.cc
  work/tiers/tier_row.cc
  work/tiers/tier_scrubs.cc
  work/tiers/tier_searches.cc
  work/tiers/tier_writer.cc
  work/tiers/value_catalog.cc
  work/tiers/write_queue.cc
  LIBS kvs_telemetry kvs_store kvs_value_tiers kvs_kernels Threads::Threads)
