# One suite per op: every simd target of this CPU held to ref.
foreach(op append attend_coarse attend_lowrank attend_packed attend_raw covariance merge pick
        rotate_pack score summarize vote executor page_view backend)
  kvs_test(ops_${op}_test ops_${op}_test.cc LIBS kvs_kernels)
endforeach()
# These two are held to the Eigen library as well.
find_package(Eigen3 REQUIRED NO_MODULE)
foreach(op eigen svd)
  kvs_test(ops_${op}_test ops_${op}_test.cc EIGEN LIBS kvs_kernels Eigen3::Eigen)
endforeach()
