# SPDX-License-Identifier: Apache-2.0
# One suite per op: every simd target of this CPU held to ref.
set(ops append attend_coarse attend_planes attend_raw merge pack_planes pick quantise_keys score score_bits summarize
    take vote executor page_view backend)
# Refs of ops that only a GPU has, held to what their headers say.
list(APPEND ops attend_chunk buckets cascade copy_rows promote reuse)
if(KVS_PLAN_SEKV)
  list(APPEND ops attend_lowrank attend_spans)
endif()
if(KVS_PLAN_MOSAICKV)
  list(APPEND ops attend_packed covariance rotate_pack)
endif()
foreach(op ${ops})
  kvs_test(ops_${op}_test ops_${op}_test.cc LIBS kvs_kernels)
endforeach()
# What tests/golden has of these is of the ops, too.
foreach(op attend_planes pack_planes quantise_keys score_bits)
  target_compile_definitions(ops_${op}_test PRIVATE "KVS_GOLDEN=\"${CMAKE_SOURCE_DIR}/tests/golden\"")
endforeach()
# These two are held to the Eigen library as well.
find_package(Eigen3 REQUIRED NO_MODULE)
set(ops eigen)
if(KVS_PLAN_SEKV)
  list(APPEND ops svd)
endif()
foreach(op ${ops})
  kvs_test(ops_${op}_test ops_${op}_test.cc EIGEN LIBS kvs_kernels Eigen3::Eigen)
endforeach()
kvs_test(dtype_test dtype_test.cc LIBS kvs_kernels)
kvs_test(cuda_loading_test cuda_loading_test.cc LIBS kvs_kernels)
if(TARGET kvstrata_cuda)
  add_dependencies(cuda_loading_test kvstrata_cuda)
  target_compile_definitions(cuda_loading_test PRIVATE
    "KVS_CUDA_LIBRARY=\"$<TARGET_FILE:kvstrata_cuda>\"")
endif()
