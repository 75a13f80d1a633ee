# SPDX-License-Identifier: Apache-2.0
# Codecs: extents, their readers, and the recompressors that write them.
# The rules that say where a span or a sentence ends are here too: codecs and selectors use them.
set(KVS_CODEC_SOURCES
  codec/codec.cc codec/lowrank_options.cc codec/packed_options.cc codec/extent.cc codec/extent_bytes.cc codec/extent_description.cc
  codec/extent_descriptions.cc codec/head_loop.cc
  codec/packed.cc codec/packed_reading.cc codec/packed_inspect.cc codec/packed_layout.cc
  codec/packed_places.cc codec/packed_recompressor.cc codec/segment_packer.cc codec/strategy.cc
  codec/host_packer.cc codec/cuda_packer.cc
  codec/loss_limit.cc
  codec/lowrank.cc codec/lowrank_reading.cc codec/lowrank_inspect.cc codec/lowrank_recompressor.cc codec/lowrank_writer.cc
  codec/span_factors.cc codec/span_gates.cc codec/span_parameters.cc
  segment/sentence_rule.cc segment/span_rule.cc)
