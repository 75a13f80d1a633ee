# SPDX-License-Identifier: Apache-2.0
# The ops alone, without a daemon, and the attend op as a C library for Python comparisons.
kvs_bench(ops_bench ops_bench.cc LIBS kvs_kernels)
add_library(kvs_op_attend SHARED op_attend.cc)
target_link_libraries(kvs_op_attend PRIVATE kvs_flags kvs_kernels -static-libstdc++ -static-libgcc
  -Wl,--exclude-libs,ALL)
