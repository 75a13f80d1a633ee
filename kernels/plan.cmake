# SPDX-License-Identifier: Apache-2.0
# What plans are made of, the steps that run them, and blocks of engines.
set(KVS_PLAN_SOURCES
  plan/plan.cc plan/plan_axes.cc plan/plan_options.cc plan/plan_rows.cc
  segment/segmenter.cc segment/complete_units.cc segment/page.cc segment/sentence_rule.cc segment/span_rule.cc
  select/selector.cc select/selector_rows.cc select/fixed_selection.cc select/full.cc select/unit_scores.cc
  select/token_scores.cc select/sentence_ends.cc select/sentence_queries.cc select/notice.cc select/why_in_full.cc
  codec/extent.cc codec/extent_bytes.cc codec/extent_descriptions.cc codec/device_extents.cc codec/head_loop.cc
  step/sequence_state.cc step/reported_series.cc step/status_text.cc step/shadow_attention.cc step/step_batch.cc
  step/finite_rows.cc step/step_cost.cc step/step.cc step/step_tiles.cc step/step_works.cc step/break_even.cc
  step/gpu/memory/step_memory.cc step/gpu/memory/repeated_call.cc step/gpu/memory/cuda_hot_pages.cc
  step/gpu/memory/cuda_hot_rows.cc
  step/gpu/frame/cuda_serves.cc step/gpu/frame/cuda_workspace.cc step/gpu/frame/cuda_graphs.cc
  step/gpu/frame/cuda_frame.cc step/gpu/frame/cuda_parts.cc step/gpu/frame/cuda_tensors.cc
  step/gpu/frame/cuda_index.cc step/gpu/frame/cuda_selector.cc step/gpu/frame/cuda_selector_rows.cc
  step/gpu/frame/cuda_host_pages.cc
  step/gpu/lists/cuda_lists.cc step/gpu/lists/cuda_scored_lists.cc step/gpu/lists/cuda_fixed.cc
  step/gpu/cuda_step.cc step/gpu/cuda_layer.cc step/gpu/cuda_selection.cc step/gpu/cuda_inspect.cc
  step/gpu/cuda_shadow.cc
  blocks/block_attention.cc blocks/block_index.cc blocks/block_lists.cc blocks/block_planes.cc
  blocks/block_planes_step.cc blocks/block_shape.cc)
