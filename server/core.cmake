# SPDX-License-Identifier: Apache-2.0
# The store and what lies below it: memory resources, telemetry, sockets. Needs no gRPC.
find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(spdlog REQUIRED)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)

kvs_library(kvs_memory
  memory/cgroup.cc
  memory/cuda_device.cc
  memory/cuda_tensor.cc
  memory/emulated_device.cc
  memory/extent_allocator.cc
  memory/host_memory.cc
  memory/memfd_tensor.cc
  memory/memory_resource.cc
  memory/numa_topology.cc
  memory/sealed_memfd.cc
  LIBS kvs_kernels kvs_base)
target_link_libraries(kvs_memory PRIVATE PkgConfig::HWLOC)

kvs_library(kvs_telemetry
  telemetry/event_ring.cc
  telemetry/thread_top.cc
  telemetry/log.cc
  telemetry/metric_table.cc
  telemetry/metric_text.cc
  telemetry/readiness.cc
  telemetry/refusals.cc
  telemetry/spans.cc
  telemetry/state_watch.cc
  telemetry/traffic.cc
  telemetry/verified_hits.cc
  LIBS kvs_base kvs_reasons)
target_link_libraries(kvs_telemetry PRIVATE spdlog::spdlog)

kvs_library(kvs_sockets
  sockets/descriptor_closer.cc
  sockets/event_poll.cc
  sockets/packet.cc
  sockets/peer_process.cc
  sockets/unix_listener.cc
  LIBS kvs_shm kvs_base Threads::Threads)

# Its rooms from the bottom up; tests/tree/check_layers.py has their arrows.
kvs_library(kvs_store
  store/options/parameters.cc
  store/options/user_limits.cc
  store/reports/recall_audit.cc
  store/reports/selection_totals.cc
  store/reports/session_totals.cc
  store/reports/value_info.cc
  store/pages/artefacts.cc
  store/pages/epochs.cc
  store/pages/hold_limits.cc
  store/pages/page.cc
  store/pages/page_memory.cc
  store/pages/prefix_index.cc
  store/pages/prefix_key.cc
  store/pages/series.cc
  store/requests/imported_tensors.cc
  store/books/capacity.cc
  store/books/devices.cc
  store/books/plans.cc
  store/books/segments.cc
  store/books/sequence.cc
  store/books/books.cc
  store/references/eviction.cc
  store/references/models.cc
  store/references/page_references.cc
  store/references/tables.cc
  store/references/watermarks.cc
  store/prompts/artefact_ledger.cc
  store/prompts/held_prefix.cc
  store/prompts/opening.cc
  store/prompts/prefix_catalog.cc
  store/prompts/prefix_survey.cc
  store/prompts/sealed_values.cc
  store/space/capacity_counter.cc
  store/space/moves.cc
  store/space/page_allocator.cc
  store/space/page_copies.cc
  store/space/raw_pages.cc
  store/space/relief.cc
  store/codecs/build_pages.cc
  store/codecs/build_pieces.cc
  store/codecs/builds.cc
  store/codecs/codec_extents.cc
  store/codecs/recompression.cc
  store/codecs/work_requests.cc
  store/lookups/artefact_loads.cc
  store/lookups/lookups.cc
  store/lookups/prefix_loads.cc
  store/lookups/prefix_pins.cc
  store/lookups/remote_searches.cc
  store/lookups/replication.cc
  store/sequences/audit.cc
  store/sequences/imports.cc
  store/sequences/inspection.cc
  store/sequences/keys.cc
  store/sequences/pass_arenas.cc
  store/sequences/recall_audits.cc
  store/sequences/selected_pages.cc
  store/sequences/sequence_entry.cc
  store/sequences/sequences.cc
  store/sequences/sessions.cc
  store/sequences/step_events.cc
  store/sequences/truncate.cc
  store/openings/leases.cc
  store/openings/opening_ends.cc
  store/openings/openings.cc
  store/openings/rest_loads.cc
  store/prompt_values.cc
  store/store.cc
  LIBS kvs_memory kvs_kernels kvs_shm kvs_base Boost::headers)
target_link_libraries(kvs_store PRIVATE OpenSSL::Crypto)
