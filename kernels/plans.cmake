# SPDX-License-Identifier: Apache-2.0
# The plans, a folder each, and their tables.
set(KVS_PLANS_SOURCES
  plans/codec_rows.cc plans/plan_needs.cc
  plans/window/window.cc
  plans/quest/minmax.cc
  plans/quest/gpu/cuda_minmax.cc plans/quest/gpu/block_minmax.cc
  plans/chess/cascade.cc plans/chess/cascade_trigger.cc plans/chess/affinity.cc plans/chess/hierarchy.cc
  plans/chess/gpu/cuda_cascade.cc
  plans/chess/ops/cascade/cascade_ref.cc
  plans/tokenselect/vote.cc
  plans/tokenselect/gpu/cuda_vote.cc plans/tokenselect/gpu/block_vote.cc
  plans/tokenselect/ops/mean_query/mean_query_ref.cc
  plans/bits/bits.cc plans/bits/bits_segmenter.cc
  plans/bits/gpu/cuda_bits.cc plans/bits/gpu/block_bits.cc
  plans/planes/fine.cc plans/planes/planes.cc plans/planes/planes_layout.cc plans/planes/planes_options.cc
  plans/planes/planes_recompressor.cc plans/planes/cuda_planes_packer.cc
  plans/planes/gpu/cuda_fine.cc plans/planes/gpu/cuda_planes.cc
  plans/sentencekv/bucket.cc plans/sentencekv/importance.cc plans/sentencekv/cuda_sentences.cc
  plans/sentencekv/gpu/cuda_bucket.cc
  plans/sentencekv/ops/buckets/buckets_ref.cc plans/sentencekv/ops/importance/importance_ref.cc
  plans/sentencekv/ops/observe/observe_ref.cc plans/sentencekv/ops/pick_buckets/pick_buckets_ref.cc)
# Plans that a build may leave out (plan/built_plans.h).
if(KVS_PLAN_SEKV)
  list(APPEND KVS_PLANS_SOURCES
    plans/sekv/zoom.cc plans/sekv/span_bucket.cc plans/sekv/span_rows.cc
    plans/sekv/lowrank.cc plans/sekv/lowrank_options.cc plans/sekv/lowrank_reading.cc plans/sekv/lowrank_inspect.cc
    plans/sekv/lowrank_recompressor.cc plans/sekv/lowrank_writer.cc
    plans/sekv/span_factors.cc plans/sekv/span_gates.cc plans/sekv/span_parameters.cc
    plans/sekv/gpu/cuda_spans.cc
    plans/sekv/ops/attend_lowrank/attend_lowrank_ref.cc plans/sekv/ops/attend_lowrank/attend_lowrank_simd.cc
    plans/sekv/ops/attend_spans/attend_spans_ref.cc plans/sekv/ops/attend_spans/expand_spans_ref.cc
    plans/sekv/ops/attend_spans/score_spans_ref.cc
    plans/sekv/ops/svd/svd_ref.cc plans/sekv/ops/svd/svd_simd.cc)
endif()
if(KVS_PLAN_MOSAICKV)
  list(APPEND KVS_PLANS_SOURCES
    plans/mosaickv/block.cc
    plans/mosaickv/packed.cc plans/mosaickv/packed_options.cc plans/mosaickv/packed_reading.cc
    plans/mosaickv/packed_inspect.cc plans/mosaickv/packed_layout.cc plans/mosaickv/packed_places.cc
    plans/mosaickv/packed_recompressor.cc plans/mosaickv/segment_packer.cc plans/mosaickv/strategy.cc
    plans/mosaickv/host_packer.cc plans/mosaickv/cuda_packer.cc plans/mosaickv/loss_limit.cc
    plans/mosaickv/gpu/cuda_block.cc plans/mosaickv/gpu/cuda_packed.cc
    plans/mosaickv/ops/attend_packed/attend_packed_ref.cc plans/mosaickv/ops/attend_packed/attend_packed_simd.cc
    plans/mosaickv/ops/covariance/covariance_ref.cc plans/mosaickv/ops/covariance/covariance_simd.cc
    plans/mosaickv/ops/rotate_pack/rotate_pack_ref.cc plans/mosaickv/ops/rotate_pack/rotate_pack_simd.cc)
endif()
