# SPDX-License-Identifier: Apache-2.0
# Headers of others that are read once for all sources of a library: parsing them takes longer than compiling what
# is ours. None of our own headers is among them, so that an edit compiles what includes it and no more. Sources
# name every header that they use all the same: `make tidy` compiles them without.

# kvs_precompiled(NAME HEADERS ... [LIBS ...]): a set of headers, which need these libraries' include folders.
function(kvs_precompiled name)
  cmake_parse_arguments(A "" "" "HEADERS;LIBS" ${ARGN})
  set(source ${CMAKE_BINARY_DIR}/precompiled/${name}.cc)
  file(GENERATE OUTPUT ${source} CONTENT "")
  add_library(${name} OBJECT ${source})
  target_link_libraries(${name} PRIVATE kvs_flags ${A_LIBS})
  target_precompile_headers(${name} PRIVATE ${A_HEADERS})
  kvs_precompiled_options(${name})
endfunction()

# kvs_reuse(TARGET NAME): compiles the target's sources with that set.
function(kvs_reuse target name)
  target_precompile_headers(${target} REUSE_FROM ${name})
  kvs_precompiled_options(${target})
endfunction()

# Without -fpch-preprocess ccache passes by. g++ 12 forgets that a precompiled header is the system's, and then
# tells of std::string's bounds what it does not tell otherwise (its bug 105651).
function(kvs_precompiled_options target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    target_compile_options(${target} PRIVATE -fpch-preprocess -Wno-array-bounds -Wno-stringop-overflow
      -Wno-stringop-overread)
  endif()
endfunction()

set(KVS_STD_HEADERS <algorithm> <array> <atomic> <bit> <cerrno> <charconv> <chrono> <cmath> <condition_variable>
  <cstddef> <cstdint> <cstdio> <cstdlib> <cstring> <deque> <filesystem> <fstream> <functional> <limits> <list> <map>
  <memory> <mutex> <numeric> <optional> <random> <set> <span> <sstream> <stop_token> <string> <string_view> <thread>
  <tuple> <unordered_map> <unordered_set> <utility> <variant> <vector>)
set(KVS_BOOST_HEADERS <boost/interprocess/indexes/null_index.hpp> <boost/interprocess/managed_external_buffer.hpp>
  <boost/interprocess/mem_algo/rbtree_best_fit.hpp> <boost/interprocess/sync/mutex_family.hpp>
  <boost/unordered/unordered_flat_map.hpp>)
set(KVS_GRPC_HEADERS <grpcpp/grpcpp.h> <google/protobuf/message.h>)
set(KVS_PROTO_HEADERS <kvstrata/v1/admin.grpc.pb.h> <kvstrata/v1/compute.grpc.pb.h> <kvstrata/v1/control.grpc.pb.h>)
