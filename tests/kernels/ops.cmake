# One suite per op: every simd target of this CPU held to ref.
foreach(op append attend_coarse attend_lowrank attend_packed attend_raw merge pick score summarize executor page_view backend)
  kvs_test(ops_${op}_test ops_${op}_test.cc LIBS kvs_kernels)
endforeach()
