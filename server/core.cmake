# The store: memory resources, pages, sessions, tables. Needs no gRPC.
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(Boost 1.81 REQUIRED)
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
  memory/host_pinned.cc
  memory/limiting_resource.cc
  memory/memfd_tensor.cc
  memory/numa_topology.cc
  memory/sealed_memfd.cc
  LIBS kvs_kernels kvs_base)
target_link_libraries(kvs_memory PRIVATE PkgConfig::HWLOC)

kvs_library(kvs_store
  store/allocate.cc
  store/artefact_ledger.cc
  store/artefact_record.cc
  store/artefact_tier.cc
  store/artefacts.cc
  store/audit.cc
  store/blocks.cc
  store/build_parts.cc
  store/capacity.cc
  store/device_failure.cc
  store/epochs.cc
  store/evict.cc
  store/find_prefix.cc
  store/held_prefix.cc
  store/import.cc
  store/imported_tensors.cc
  store/inspect.cc
  store/hold_limits.cc
  store/user_limits.cc
  store/keys.cc
  store/leases.cc
  store/lookup.cc
  store/move.cc
  store/open_sequence.cc
  store/page.cc
  store/page_map.cc
  store/page_tier.cc
  store/parameters.cc
  store/pins.cc
  store/prefix_index.cc
  store/prefix_key.cc
  store/prefix_survey.cc
  store/long_request.cc
  store/pass_arenas.cc
  store/publish.cc
  store/raw_pages.cc
  store/recall.cc
  store/recall_audit.cc
  store/recompress.cc
  store/replicate.cc
  store/segments.cc
  store/selected_pages.cc
  store/series.cc
  store/step_events.cc
  store/truncate.cc
  store/store.cc
  store/watermarks.cc
  store/work_requests.cc
  LIBS kvs_memory kvs_kernels kvs_shm kvs_base Boost::headers)
target_link_libraries(kvs_store PRIVATE OpenSSL::Crypto)
