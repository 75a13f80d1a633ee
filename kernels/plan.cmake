# SPDX-License-Identifier: Apache-2.0
set(KVS_PLAN_SOURCES
  plan.cc plan_axes.cc plan_options.cc plan_rows.cc plan_needs.cc
  segment/segmenter.cc segment/complete_units.cc segment/page.cc segment/hierarchy.cc segment/bits.cc
  select/selector.cc select/selector_rows.cc select/fixed_selection.cc select/full.cc select/window.cc select/minmax.cc select/cascade.cc select/cascade_trigger.cc select/affinity.cc
  select/unit_scores.cc select/vote.cc select/token_scores.cc
  select/block.cc select/bits.cc select/bucket.cc select/importance.cc select/sentence_ends.cc select/sentence_queries.cc
  select/zoom.cc select/span_bucket.cc select/span_rows.cc select/notice.cc select/why_in_full.cc
  step/sequence_state.cc step/reported_series.cc step/status_text.cc step/shadow_attention.cc step/step_batch.cc step/finite_rows.cc step/step_cost.cc
  step/step.cc step/step_tiles.cc step/step_works.cc step/break_even.cc
  step/cuda_serves.cc step/cuda_workspace.cc step/step_memory.cc step/cuda_graphs.cc step/repeated_call.cc
  step/cuda_frame.cc step/cuda_parts.cc step/cuda_step.cc step/cuda_layer.cc step/cuda_tensors.cc step/cuda_selection.cc
  step/cuda_inspect.cc step/cuda_shadow.cc
  step/cuda_index.cc step/cuda_selector.cc step/cuda_lists.cc step/cuda_scored_lists.cc step/cuda_fixed.cc step/cuda_selector_rows.cc step/cuda_minmax.cc step/cuda_bits.cc step/cuda_cascade.cc
  step/cuda_vote.cc step/cuda_bucket.cc step/cuda_sentences.cc step/cuda_block.cc
  step/cuda_packed.cc step/cuda_spans.cc step/cuda_host_pages.cc step/cuda_hot_pages.cc
  blocks/block_attention.cc blocks/block_bits.cc blocks/block_index.cc blocks/block_lists.cc blocks/block_minmax.cc blocks/block_shape.cc
  blocks/block_vote.cc)
