# SPDX-License-Identifier: Apache-2.0
# The daemon: telemetry, the attach server, configuration, composition root, executable.
find_package(spdlog REQUIRED)
find_package(CLI11 REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(TOMLPLUSPLUS REQUIRED IMPORTED_TARGET tomlplusplus)

kvs_library(kvs_telemetry telemetry/event_ring.cc telemetry/heartbeat.cc telemetry/log.cc telemetry/metric_table.cc telemetry/spans.cc
  telemetry/metric_text.cc telemetry/readiness.cc
  telemetry/refusals.cc telemetry/state_watch.cc telemetry/traffic.cc telemetry/verified_hits.cc
  LIBS kvs_base kvs_reasons)
target_link_libraries(kvs_telemetry PRIVATE spdlog::spdlog)

kvs_library(kvs_work
  work/value_catalog.cc
  work/block_rows.cc
  work/build.cc
  work/page_tiers.cc
  work/remote_pages.cc
  work/remote_writer.cc
  work/tier_pages.cc
  work/tier_loads.cc work/tier_scrubs.cc
  work/tier_writer.cc
  work/tier_records.cc
  work/value_scrub.cc
  work/call_threads.cc
  work/disk_value_tier.cc
  work/lost_value_log.cc
  work/importer.cc
  work/mover.cc
  work/pin_records.cc
  work/recompress.cc
  work/known_values.cc
  work/redis_calls.cc work/redis_get.cc work/redis_ping.cc work/redis_probe.cc work/redis_put.cc work/redis_walk.cc
  work/redis_survey.cc work/redis_threads.cc work/redis_value_tier.cc work/write_health.cc
  work/agent_memory.cc work/agent_process.cc work/mooncake_agent.cc
  work/mooncake_get.cc work/mooncake_probe.cc work/mooncake_put.cc work/mooncake_value_tier.cc
  work/tensor_releases.cc
  work/tier_buffers.cc
  LIBS kvs_telemetry kvs_store kvs_tier kvs_redis kvs_remote_format kvs_kernels Threads::Threads)

kvs_library(kvs_sockets sockets/descriptor_closer.cc sockets/event_poll.cc sockets/packet.cc sockets/peer_process.cc
  sockets/unix_listener.cc LIBS kvs_shm kvs_base Threads::Threads)

kvs_library(kvs_attach
  attach/admission.cc
  attach/answer_box.cc
  attach/arena_mailbox.cc
  attach/attach_server.cc
  attach/attach_state.cc
  attach/attach_tokens.cc
  attach/awaited_requests.cc
  attach/connection_ends.cc
  attach/connection_lending.cc
  attach/descriptor_inbox.cc
  attach/fair_queue.cc
  attach/handshake.cc
  attach/hello.cc
  attach/housekeeping.cc
  attach/open_sequences.cc
  attach/peer.cc
  attach/reply_ring.cc
  attach/ring_handlers.cc
  attach/ring_import.cc
  attach/ring_lookup.cc
  attach/ring_session.cc
  attach/ring_quantum.cc
  attach/ring_sequences.cc
  attach/ring_work.cc
  attach/session_tensors.cc
  attach/token_passing.cc
  LIBS kvs_telemetry kvs_sockets kvs_store kvs_kernels kvs_shm kvs_base Threads::Threads)

kvs_library(kvs_http http/http_address.cc http/http_server.cc http/trace_exporter.cc LIBS kvs_telemetry Boost::headers Threads::Threads)

kvs_library(kvs_config
  config.cc config_files.cc config_keys.cc config_limits.cc config_reload.cc config_remote.cc pool_memory.cc start_memory.cc
  LIBS kvs_attach kvs_http kvs_work kvs_kernels)
target_link_libraries(kvs_config PRIVATE PkgConfig::TOMLPLUSPLUS)
