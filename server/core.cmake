# SPDX-License-Identifier: Apache-2.0
# The store: memory resources, pages, sessions, tables. Needs no gRPC.
find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
find_package(PkgConfig REQUIRED)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)

kvs_library(kvs_memory
  memory/cgroup.cc
  memory/copy_between.cc
  memory/cuda_device.cc
  memory/cuda_tensor.cc
  memory/emulated_device.cc
  memory/extent_allocator.cc
  memory/failing_resource.cc
  memory/host_memory.cc
  memory/limiting_resource.cc
  memory/memfd_tensor.cc
  memory/numa_topology.cc
  memory/sealed_memfd.cc
  LIBS kvs_kernels kvs_base)
target_link_libraries(kvs_memory PRIVATE PkgConfig::HWLOC)

kvs_library(kvs_store
  store/answers.cc
  store/artefact_ledger.cc
  store/artefact_loads.cc
  store/artefact_record.cc
  store/artefacts.cc
  store/audit.cc
  store/value_info.cc
  store/build_pages.cc
  store/build_pieces.cc
  store/builds.cc
  store/capacity.cc
  store/capacity_counter.cc
  store/codec_extents.cc
  store/devices.cc
  store/epochs.cc
  store/eviction.cc
  store/held_prefix.cc
  store/hold_limits.cc
  store/imported_tensors.cc
  store/imports.cc
  store/inspection.cc
  store/keys.cc
  store/leases.cc
  store/long_request.cc
  store/lookups.cc
  store/prompt_values.cc
  store/model_table.cc
  store/models.cc
  store/moves.cc
  store/opening.cc
  store/opening_ends.cc
  store/openings.cc
  store/page.cc
  store/page_allocator.cc
  store/page_copies.cc
  store/page_holds.cc
  store/page_map.cc
  store/page_memory.cc
  store/page_references.cc
  store/parameters.cc
  store/pass_arenas.cc
  store/plans.cc
  store/prefix_catalog.cc
  store/prefix_index.cc
  store/prefix_key.cc
  store/prefix_loads.cc
  store/prefix_pins.cc
  store/prefix_survey.cc
  store/raw_pages.cc
  store/recall_audit.cc
  store/recall_audits.cc
  store/recompression.cc
  store/relief.cc
  store/remote_searches.cc
  store/replication.cc
  store/sealed_values.cc
  store/segments.cc
  store/selected_pages.cc
  store/sequence.cc
  store/sequence_entry.cc
  store/sequences.cc
  store/series.cc
  store/session_catalog.cc
  store/selection_totals.cc
  store/session_totals.cc
  store/sessions.cc
  store/step_events.cc
  store/store.cc
  store/tables.cc
  store/taker.cc
  store/truncate.cc
  store/user_limits.cc
  store/watermarks.cc
  store/work_requests.cc
  LIBS kvs_memory kvs_kernels kvs_shm kvs_base Boost::headers)
target_link_libraries(kvs_store PRIVATE OpenSSL::Crypto)
