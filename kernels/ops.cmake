# Ops, their backends, executors and page layouts. Highway is used as headers alone: libkvstrata.so
# may depend on libc only, so dispatch is ours (kernels/simd_target.h) and libhwy is not linked.
set(KVS_OPS_SOURCES
  backend.cc
  executor.cc
  page_view.cc
  simd_target.cc
  ops/append/append_ref.cc
  ops/append/append_simd.cc
  ops/attend_coarse/attend_coarse_ref.cc
  ops/attend_coarse/attend_coarse_simd.cc
  ops/attend_lowrank/attend_lowrank_ref.cc
  ops/attend_lowrank/attend_lowrank_simd.cc
  ops/attend_packed/attend_packed_ref.cc
  ops/attend_packed/attend_packed_simd.cc
  ops/attend_raw/attend_raw_ref.cc
  ops/attend_raw/attend_raw_simd.cc
  ops/merge/merge_ref.cc
  ops/merge/merge_simd.cc
  ops/pick/pick_ref.cc
  ops/pick/pick_simd.cc
  ops/score/score_ref.cc
  ops/score/score_simd.cc
  ops/summarize/summarize_ref.cc
  ops/summarize/summarize_simd.cc)
