# SPDX-License-Identifier: Apache-2.0
# What every target of kvstrata shares: warnings, sanitizers, ccache, and the shapes of our targets.

find_program(KVS_CCACHE ccache)
if(KVS_CCACHE)
  # Without these two, ccache passes by what uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${KVS_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${KVS_CCACHE})
endif()

add_library(kvs_flags INTERFACE)
target_include_directories(kvs_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(kvs_flags INTERFACE
  -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
  # g++ 12 sees overlaps in std::string's operator+ that are not there (its bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  # GCC takes the anonymous namespace of a source that another one includes for a header's.
  $<$<AND:$<BOOL:${CMAKE_UNITY_BUILD}>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage>
  # GCC looks for garbage whenever its memory has doubled, from 128 MB on. Sources here take .4 to 1.4 GB with that, and
  # a tenth more without, which saves a tenth of their time.
  $<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<CXX_COMPILER_ID:GNU>>:--param=ggc-min-heapsize=1048576>
  # -ffp-contract: whether a*b+c is one rounding or two must not depend on the compiler's mood.
  -ffp-contract=off)
if(KVS_SANITIZE)
  # A target's property and not its option: an option of its own would stand before this one, which then wins.
  string(REPLACE "," "$<COMMA>" sanitizers "${KVS_SANITIZE}")
  if(KVS_SANITIZE MATCHES undefined)
    set(sanitizers $<IF:$<BOOL:$<TARGET_PROPERTY:KVS_ONLY_ADDRESSES>>,address,${sanitizers}>)
  endif()
  # Instrumented code makes g++ guess at uninitialised values: the plain build judges warnings.
  # -O1 and one SIMD target beside the baseline: instrumented vector code takes minutes to compile.
  target_compile_options(kvs_flags INTERFACE -fsanitize=${sanitizers} -fno-omit-frame-pointer -g1
    -fno-sanitize-recover=all -Wno-error)
  if(KVS_SANITIZE MATCHES undefined)
    # A fifth of the time of a build: AddressSanitizer tells of null pointers, too, and hardly anything here is cast down.
    target_compile_options(kvs_flags INTERFACE -fno-sanitize=null,vptr)
  endif()
  target_compile_definitions(kvs_flags INTERFACE
    "HWY_DISABLED_TARGETS=(HWY_AVX3|HWY_AVX3_DL|HWY_SSSE3|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
  target_link_options(kvs_flags INTERFACE -fsanitize=${KVS_SANITIZE})
endif()

# All GoogleTest programs; those that `make asan` builds with sanitizers; of these what reads bytes that others
# wrote, which CI builds so; and those of what links gRPC, which `make asan-rpc` builds: its headers take as long as
# all the rest (docs/testing.md).
add_custom_target(unit_tests)
add_custom_target(sanitized_tests)
add_custom_target(sanitized_byte_tests)
add_custom_target(sanitized_rpc_tests)

# kvs_sources(VARIABLE FOLDERS...): the .cc files of each folder, folder by folder; a new one is seen by itself.
function(kvs_sources variable)
  set(sources)
  foreach(folder ${ARGN})
    file(GLOB found RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ${folder}/*.cc)
    list(APPEND sources ${found})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# kvs_library(NAME SOURCES... [FOLDERS ...] [LIBS ...]): a static, position-independent library of these sources and
# all of these folders. Headers of others that they share are those of KVS_PRECOMPILED, which a folder sets.
function(kvs_library name)
  cmake_parse_arguments(A "" "" "FOLDERS;LIBS" ${ARGN})
  kvs_sources(sources ${A_FOLDERS})
  add_library(${name} STATIC ${A_UNPARSED_ARGUMENTS} ${sources})
  target_link_libraries(${name} PUBLIC kvs_flags ${A_LIBS})
  kvs_reuse(${name} ${KVS_PRECOMPILED})
endfunction()

# kvs_test_options(VARIABLE): tests are compiled as fast as can be, since they are half of a build; what
# they test is compiled as ever. KVS_TEST_ORACLES: these compute for longer than an optimiser takes.
function(kvs_test_options variable)
  if(KVS_TEST_ORACLES AND NOT KVS_SANITIZE)
    set(options -O1)
  else()
    set(options -O0)
  endif()
  set(${variable} ${options} PARENT_SCOPE)
endfunction()

# kvs_test_headers(TARGET): GoogleTest, the standard library and KVS_TEST_HEADERS, which a folder sets, are read
# once for all its tests with the same options.
function(kvs_test_headers target)
  kvs_test_options(options)
  string(SHA1 headers "${options}${KVS_TEST_HEADERS}")
  string(PREPEND headers kvs_test_headers_)
  if(NOT TARGET ${headers})
    kvs_precompiled(${headers} HEADERS <gmock/gmock.h> <gtest/gtest.h> ${KVS_STD_HEADERS} ${KVS_TEST_HEADERS}
      LIBS GTest::gtest GTest::gmock ${KVS_TEST_HEADER_LIBS})
    set_target_properties(${headers} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${headers} PRIVATE ${options} -fPIE)  # as programs are
    kvs_only_addresses(${headers})
  endif()
  kvs_only_addresses(${target})
  target_compile_options(${target} PRIVATE ${options})
  target_link_libraries(${target} PRIVATE ${KVS_TEST_HEADER_LIBS})  # whose definitions the headers were read with
  kvs_reuse(${target} ${headers})
endfunction()

# kvs_only_addresses(TARGETS...): of the sanitizers of memory, AddressSanitizer alone. UndefinedBehaviorSanitizer's
# checks of all that gRPC's headers bring triple the time of a source that includes them; tests are not what is tested.
function(kvs_only_addresses)
  set_target_properties(${ARGN} PROPERTIES KVS_ONLY_ADDRESSES ON)
endfunction()

# kvs_eigen_sources(SOURCES...): those that include the Eigen library, which needs an optimiser and
# no sanitizer.
function(kvs_eigen_sources)
  set(options -O1)
  if(KVS_SANITIZE)
    list(APPEND options -fno-sanitize=all)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()

# kvs_test(NAME SOURCES... [EIGEN] [ORACLES] [LIBS ...] [LABELS ...]): a GoogleTest program, one ctest.
# EIGEN: its tests hold results to Eigen's. ORACLES: they compute for longer than an optimiser takes.
function(kvs_test name)
  cmake_parse_arguments(A "EIGEN;ORACLES" "" "LIBS;LABELS" ${ARGN})
  set(KVS_TEST_ORACLES ${A_ORACLES})
  add_executable(${name} ${A_UNPARSED_ARGUMENTS})
  if(A_EIGEN)
    kvs_eigen_sources(${A_UNPARSED_ARGUMENTS})
  else()
    kvs_test_headers(${name})
  endif()
  target_link_libraries(${name} PRIVATE kvs_flags ${A_LIBS} GTest::gtest GTest::gmock GTest::gtest_main)
  add_dependencies(unit_tests ${name})
  set(labels unit ${A_LABELS})
  if("rpc" IN_LIST A_LABELS)
    add_dependencies(sanitized_rpc_tests ${name})
  else()
    add_dependencies(sanitized_tests ${name})
  endif()
  if("bytes" IN_LIST A_LABELS)
    add_dependencies(sanitized_byte_tests ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 600)
endfunction()

# kvs_bench(NAME SOURCES... [LIBS ...]): a Google Benchmark program in bin/.
function(kvs_bench name)
  cmake_parse_arguments(A "" "" "LIBS" ${ARGN})
  add_executable(${name} ${A_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE kvs_flags ${A_LIBS} benchmark::benchmark)
endfunction()
