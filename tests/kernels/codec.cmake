# SPDX-License-Identifier: Apache-2.0
# One suite for both recompressors, one each for what their papers say, and the rules of segments.
if(KVS_PLAN_SEKV AND KVS_PLAN_MOSAICKV)
  kvs_test(codec_test codec_test.cc ORACLES LIBS kvs_kernels)
  set_tests_properties(codec_test PROPERTIES COST 100)  # the longest under a sanitizer: starts first
  kvs_test(codec_max_loss_test codec_max_loss_test.cc ORACLES LIBS kvs_kernels)
endif()
if(KVS_PLAN_SEKV)
  kvs_test(codec_lowrank_test codec_lowrank_test.cc LIBS kvs_kernels)
  kvs_test(select_zoom_test select_zoom_test.cc LIBS kvs_kernels)
endif()
if(KVS_PLAN_MOSAICKV)
  kvs_test(codec_packed_test codec_packed_test.cc ORACLES LIBS kvs_kernels)
  kvs_test(cuda_packer_test cuda_packer_test.cc LIBS kvs_kernels)
  kvs_test(packed_room_test packed_room_test.cc LIBS kvs_kernels)
  kvs_test(select_block_test select_block_test.cc LIBS kvs_kernels)
endif()
kvs_test(codec_planes_test codec_planes_test.cc ORACLES LIBS kvs_kernels)
kvs_test(segment_rules_test segment_rules_test.cc LIBS kvs_kernels)
kvs_test(extent_descriptions_test extent_descriptions_test.cc LIBS kvs_kernels)
# One suite for what every codec has stored; its codecs are a table.
kvs_test(stored_rows_test stored_rows_test.cc stored_codecs.cc ORACLES LIBS kvs_kernels)
target_compile_definitions(stored_rows_test PRIVATE KVS_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
