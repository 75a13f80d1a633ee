# SPDX-License-Identifier: Apache-2.0
# Web pages, the nodes' view of each other, the composition root, the executable.
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
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/web/status.html)
file(READ web/status.html KVS_STATUS_HTML)
configure_file(web/status_html.cc.in web/status_html.cc @ONLY)
kvs_library(kvs_web ${CMAKE_CURRENT_BINARY_DIR}/web/status_html.cc
  FOLDERS web
  LIBS kvs_http kvs_rpc kvs_store kvs_telemetry OpenSSL::Crypto)

kvs_library(kvs_nodes
  FOLDERS nodes
  LIBS kvs_rpc kvs_work kvs_store kvs_proto kvs_telemetry)

kvs_sources(sources doctor daemon)
list(REMOVE_ITEM sources daemon/main.cc)
kvs_library(kvs_daemon daemon/tiers/local_tier.cc daemon/tiers/remote_tier.cc ${sources}
  LIBS kvs_chunks kvs_config kvs_nodes kvs_web kvs_rpc)
set_source_files_properties(daemon/daemon.cc PROPERTIES COMPILE_DEFINITIONS
  "KVS_VERSION=\"${PROJECT_VERSION}\";KVS_COMMIT=\"${KVS_COMMIT}\"")

find_package(CLI11 REQUIRED)
add_executable(kvstratad daemon/main.cc)
target_link_libraries(kvstratad PRIVATE kvs_daemon CLI11::CLI11)
target_compile_options(kvstratad PRIVATE -O1)  # a command line is read once
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
