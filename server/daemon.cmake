# SPDX-License-Identifier: Apache-2.0
# Pages, the nodes' view of each other, the composition root, the executable.
# The version that the daemon tells; the commit is that of the last configure, or of KVS_COMMIT in the
# environment, where there is no git.
execute_process(COMMAND git rev-parse --short HEAD WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
  OUTPUT_VARIABLE KVS_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT KVS_COMMIT)
  set(KVS_COMMIT unknown)
  if(DEFINED ENV{KVS_COMMIT})
    set(KVS_COMMIT $ENV{KVS_COMMIT})
  endif()
endif()
# The status page lies in the program: status.html as it is, as a string.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/pages/status.html)
file(READ pages/status.html KVS_STATUS_HTML)
configure_file(pages/status_html.cc.in pages/status_html.cc @ONLY)
kvs_library(kvs_pages pages/health.cc pages/healthz.cc pages/livez.cc pages/local_request.cc pages/metrics.cc pages/pages.cc
  pages/process_numbers.cc pages/readyz.cc pages/status.cc pages/status_data.cc
  ${CMAKE_CURRENT_BINARY_DIR}/pages/status_html.cc
  LIBS kvs_http kvs_rpc kvs_store kvs_telemetry OpenSSL::Crypto)
kvs_library(kvs_nodes nodes/cluster_view.cc nodes/node_address.cc nodes/node_calls.cc nodes/node_credentials.cc nodes/node_list.cc nodes/node_server.cc
  LIBS kvs_rpc kvs_work kvs_store kvs_proto kvs_telemetry)
kvs_library(kvs_daemon command_line.cc daemon.cc daemon_numbers.cc daemon_offers.cc local_tier.cc machine_check.cc page_server.cc part_health.cc
  pool_resources.cc remote_mooncake.cc remote_redis.cc remote_tier.cc run_daemon.cc stop_watchdog.cc
  doctor.cc doctor_daemon.cc doctor_disk.cc doctor_http.cc doctor_limits.cc doctor_peers.cc doctor_remote.cc
  LIBS kvs_chunks kvs_config kvs_nodes kvs_pages kvs_rpc)
set_source_files_properties(daemon.cc PROPERTIES COMPILE_DEFINITIONS
  "KVS_VERSION=\"${PROJECT_VERSION}\";KVS_COMMIT=\"${KVS_COMMIT}\"")

add_executable(kvstratad main.cc manual_page.cc)
target_link_libraries(kvstratad PRIVATE kvs_daemon CLI11::CLI11)
# Trained parameters and the agent of Mooncake, which the daemon finds beside its folder; in a build
# tree they are links.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/share/kvstrata)
file(CREATE_LINK ${CMAKE_SOURCE_DIR}/parameters ${CMAKE_BINARY_DIR}/share/kvstrata/parameters SYMBOLIC)
file(CREATE_LINK ${CMAKE_SOURCE_DIR}/integrations/mooncake_agent
  ${CMAKE_BINARY_DIR}/share/kvstrata/mooncake_agent SYMBOLIC)
# jemalloc serves the daemon executable alone: in a library it breaks dlopen, and sanitizers have
# allocators of their own.
find_library(KVS_JEMALLOC jemalloc)
if(KVS_JEMALLOC AND NOT KVS_SANITIZE)
  target_link_libraries(kvstratad PRIVATE ${KVS_JEMALLOC})
endif()
